package proxy

import (
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// limitLogPeriod is how long nothing more is told of a limit that has been told of.
const limitLogPeriod = time.Minute

// Limits that refuse no connection of a listener; their names stand in the log beside the Reasons that do.
const (
	limitHandshakes Reason = "handshakes"     // of a tunnel's connections that wait for their servers
	limitSessions   Reason = "udp_sessions"   // of a tunnel's datagrams
	limitMemory     Reason = "memory"         // for what is read and not yet written
	limitWindows    Reason = "kernel_windows" // that the kernel enforces
)

// raises is what raises a limit.
var raises = map[Reason]string{
	RejectedListenerLimit: "connections of the listener",
	RejectedSourceLimit:   "limits.per_source",
	RejectedDescriptors:   "LimitNOFILE (ulimit -n)",
	RejectedPorts:         "net.ipv4.ip_local_port_range",
	limitHandshakes:       "nothing: peers send what is dropped again",
	limitSessions:         "tunnel.udp_sessions, or LimitNOFILE (ulimit -n)",
	limitMemory:           "limits.memory",
	limitWindows:          "limits.held_legs",
}

// limitLog warns of limits that are met: at once, and then once in limitLogPeriod for each listener and reason.
// The zero value is ready.
type limitLog struct {
	mu  sync.Mutex
	met map[metLimit]*metTimes
}

type metLimit struct {
	listener string // empty: of the whole proxy
	reason   Reason
}

type metTimes struct {
	raise  string
	untold uint64  // times since the last line
	told   cc.Time // when that was; 0: never
	seen   uint64  // a counter of it, as of the last look
}

// LimitMet notes that a limit of a listener, or a port of telemetry, was met, and warns of it. raise is what raises it.
func (s *Server) LimitMet(listener string, reason Reason, raise string) {
	s.limitsMet.note(s.log, s.clock(), metLimit{listener, reason}, 1, raise)
}

// note counts a limit that was met so many times.
func (l *limitLog) note(log *slog.Logger, now cc.Time, met metLimit, times uint64, raise string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.entry(met)
	m.untold, m.raise = m.untold+times, raise
	m.tell(log, now, met)
}

// follow notes how much a counter of a limit has grown since the last call.
func (l *limitLog) follow(log *slog.Logger, now cc.Time, met metLimit, count uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.entry(met)
	if count > m.seen { // less: what counts is another
		m.untold += count - m.seen
	}
	m.seen, m.raise = count, raises[met.reason]
	m.tell(log, now, met)
}

// tellRest tells of what was met again before a limit could be told of.
func (l *limitLog) tellRest(log *slog.Logger, now cc.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for met, m := range l.met {
		m.tell(log, now, met)
	}
}

// entry is what is known of a limit; the caller holds l.mu.
func (l *limitLog) entry(met metLimit) *metTimes {
	if l.met == nil {
		l.met = map[metLimit]*metTimes{}
	}
	m := l.met[met]
	if m == nil {
		m = &metTimes{}
		l.met[met] = m
	}
	return m
}

func (m *metTimes) tell(log *slog.Logger, now cc.Time, met metLimit) {
	if m.untold == 0 || m.told != 0 && now.Sub(m.told) < limitLogPeriod {
		return
	}
	log.Warn("a limit is met", "listener", met.listener, "reason", met.reason, "times", m.untold, "raise", m.raise)
	m.untold, m.told = 0, now
}

// noteRefusal notes that a connection was refused, if that was for a limit.
func (s *Server) noteRefusal(listener string, reason Reason) {
	raise, ok := raises[reason]
	if reason == RejectedGlobalLimit {
		raise, ok = s.limits.raise(), true
	}
	if ok {
		s.LimitMet(listener, reason, raise)
	}
}

// lookAtLimits notes limits that were met elsewhere than at a listener's door.
func (s *Server) lookAtLimits() {
	now := s.clock()
	follow := func(listener string, reason Reason, count uint64) {
		s.limitsMet.follow(s.log, now, metLimit{listener, reason}, count)
	}
	for _, l := range s.currentSettings().listeners {
		if t := l.Tunnel(); t != nil {
			status, _ := t.Status() // its counters are good
			follow(l.cfg.Name, limitHandshakes, status.Handshakes)
			follow(l.cfg.Name, limitSessions, status.Datagrams.Crowded)
		}
	}
	follow("", limitMemory, s.buffers.Short())
	if s.parts.UnenforcedLegs != nil {
		follow("", limitWindows, s.parts.UnenforcedLegs())
	}
	s.limitsMet.tellRest(s.log, now)
}
