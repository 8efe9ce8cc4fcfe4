package telemetry

import "github.com/penstock-net/penstock/proxy/agent"

// Metrics of congestion control agents.
var (
	agentUp = gauge("agent_up",
		"1 while the agent is there; otherwise its flows are under their fallback.", "agent")
	agentFlows = gauge("agent_flows",
		"Windows that the agent is to decide, by who does: the agent, or the fallback.", "agent", "decides")
	agentConnects = counter("agent_connects_total", "Times the agent was reached.", "agent")
	agentReports  = counter("agent_reports_total", "Reports sent to the agent.", "agent")
	agentDropped  = counter("agent_reports_dropped_total",
		"Reports for which the agent's queue had no room; the next ones have what they would have told.", "agent")
	agentDecisions = counter("agent_decisions_total", "Messages of the agent about flows that there are.", "agent")
	agentRefused   = counter("agent_messages_refused_total",
		"Messages of the agent that were not heeded, by reason: malformed; about a flow that there is none of (no_such_flow), "+
			"as one that has just ended; about a program that was not installed (no_such_program); or of a kind that "+
			"agents do not send (unexpected_kind).", "agent", "reason")
	agentAborts = counter("agent_program_aborts_total",
		"Runs of the agent's programs that ended in arithmetic without a result.", "agent")
	agentFallbacks = counter("agent_fallbacks_total",
		"Times the fallback took over from the agent: it is gone, stalled (does not read), silent (does not "+
			"answer), or its program fails.", "agent", "reason")
	agentTook = histogram("agent_decision_seconds",
		"From a report to the agent until the decision that followed it was in force; without reports that the agent passed "+
			"over for a later one.", "agent")
)

func (s sink) agent(a agent.Info) {
	s.put(agentUp, oneIf(a.Up), a.Name)
	s.put(agentFlows, float64(a.Steered), a.Name, "agent")
	s.put(agentFlows, float64(max(0, a.Flows-a.Steered)), a.Name, "fallback")
	s.put(agentConnects, float64(a.Connects), a.Name)
	s.put(agentReports, float64(a.Reports), a.Name)
	s.put(agentDropped, float64(a.Dropped), a.Name)
	s.put(agentDecisions, float64(a.Decisions), a.Name)
	s.put(agentAborts, float64(a.Aborted), a.Name)
	s.histogram(agentTook, a.Took, a.Name)
	for reason, n := range a.Refused {
		s.put(agentRefused, float64(n), a.Name, reason)
	}
	for reason, n := range a.Fallbacks {
		s.put(agentFallbacks, float64(n), a.Name, reason)
	}
}
