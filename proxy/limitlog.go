package proxy

import (
	"log/slog"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// limitLogPeriod is the least time between two warnings about one limit.
const limitLogPeriod = time.Minute

// Limits that refuse no connection of a listener. Their names stand in the log beside the Reasons.
const (
	limitHandshakes Reason = "handshakes"     // of a tunnel's connections that wait for their servers
	limitSessions   Reason = "udp_sessions"   // of a tunnel's datagrams
	limitMemory     Reason = "memory"         // for what is read and not yet written
	limitWindows    Reason = "kernel_windows" // that the kernel enforces
)

// raises names, for each limit, the setting that raises it.
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

// metLimit names a limit.
type metLimit struct {
	listener string // empty: of the whole proxy
	reason   Reason
}

// metTimes counts how often a limit was met.
type metTimes struct {
	raise    string
	unlogged uint64  // times since the last line
	logged   cc.Time // time of the last line; 0: none yet
	seen     uint64  // the limit's counter at the last call of addGrowth
}

// addTimes counts a limit that was met the given number of times. raise is what raises it.
func (l *limitLog) addTimes(log *slog.Logger, now cc.Time, met metLimit, times uint64, raise string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.findTimes(met)
	m.unlogged, m.raise = m.unlogged+times, raise
	m.warnIfDue(log, now, met)
}

// addGrowth counts how much a counter of a limit has grown since the last call.
func (l *limitLog) addGrowth(log *slog.Logger, now cc.Time, met metLimit, count uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := l.findTimes(met)
	if count > m.seen { // a smaller count is that of another counter
		m.unlogged += count - m.seen
	}
	m.seen, m.raise = count, raises[met.reason]
	m.warnIfDue(log, now, met)
}

// warnOfAll logs the limits that were met since their last line, once limitLogPeriod has passed.
func (l *limitLog) warnOfAll(log *slog.Logger, now cc.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for met, m := range l.met {
		m.warnIfDue(log, now, met)
	}
}

// findTimes returns the entry of a limit. The caller holds l.mu.
func (l *limitLog) findTimes(met metLimit) *metTimes {
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

// warnIfDue logs a warning if the limit was met since the last one, and limitLogPeriod has passed.
func (m *metTimes) warnIfDue(log *slog.Logger, now cc.Time, met metLimit) {
	if m.unlogged == 0 || m.logged != 0 && now.Sub(m.logged) < limitLogPeriod {
		return
	}
	log.Warn("a limit is met", "listener", met.listener, "reason", met.reason, "times", m.unlogged, "raise", m.raise)
	m.unlogged, m.logged = 0, now
}
