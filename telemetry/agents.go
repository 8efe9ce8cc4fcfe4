package telemetry

import "github.com/penstock-net/penstock/proxy/agent"

// Metrics of congestion control agents.
var (
	agentUp = newGauge("agent_up",
		"1 while the agent is there; otherwise its flows are under their fallback.", "agent")
	agentFlows = newGauge("agent_flows",
		"Windows that the agent is to decide, by who does: the agent, or the fallback.", "agent", "decides")
	agentConnects = newCounter("agent_connects_total", "Times the agent was reached.", "agent")
	agentReports  = newCounter("agent_reports_total", "Reports sent to the agent.", "agent")
	agentDropped  = newCounter("agent_reports_dropped_total",
		"Reports for which the agent's queue had no room; the next ones have what they would have told.", "agent")
	agentDecisions = newCounter("agent_decisions_total", "Messages of the agent about flows that there are.", "agent")
	agentRefused   = newCounter("agent_messages_refused_total",
		"Messages of the agent that were not heeded, by reason: malformed; about a flow that there is none of "+
			"(no_such_flow), as one that has just ended; about a program that was not installed (no_such_program); or of a kind that "+
			"agents do not send (unexpected_kind).", "agent", "reason")
	agentAborts = newCounter("agent_program_aborts_total",
		"Runs of the agent's programs that ended in arithmetic without a result.", "agent")
	agentFallbacks = newCounter("agent_fallbacks_total",
		"Times the fallback took over from the agent: it is gone, stalled (does not read), silent (does not "+
			"answer), or its program fails.", "agent", "reason")
	agentTook = newHistogram("agent_decision_seconds",
		"From a report to the agent until the decision that followed it was in force; without reports that the agent passed "+
			"over for a later one.", "agent")
)

func (s sink) writeAgent(a agent.Info) {
	s.putSample(agentUp, oneIf(a.Up), a.Name)
	s.putSample(agentFlows, float64(a.Steered), a.Name, "agent")
	s.putSample(agentFlows, float64(max(0, a.Flows-a.Steered)), a.Name, "fallback")
	s.putSample(agentConnects, float64(a.Connects), a.Name)
	s.putSample(agentReports, float64(a.Reports), a.Name)
	s.putSample(agentDropped, float64(a.Dropped), a.Name)
	s.putSample(agentDecisions, float64(a.Decisions), a.Name)
	s.putSample(agentAborts, float64(a.Aborted), a.Name)
	s.putHistogram(agentTook, a.Took, a.Name)
	for reason, n := range a.Refused {
		s.putSample(agentRefused, float64(n), a.Name, reason)
	}
	for reason, n := range a.Fallbacks {
		s.putSample(agentFallbacks, float64(n), a.Name, reason)
	}
}
