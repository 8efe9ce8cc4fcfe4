package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// fade forgets m's algorithm, once it has been without members for so long that
// it would not go on from where it was, and reports whether it has been.
func (m *macroflow) fade(now cc.Time) bool {
	if now.Sub(m.idleSince) <= m.lingers() {
		return false
	}
	if m.alg != nil {
		m.memory, m.alg = m.alg.Control().Cwnd, nil
		m.initial, m.ssthresh, m.gone = 0, 0, 0
		m.ctl = cc.Control{}
	}
	return true
}

// lingers is how long m stays as it is without members.
func (m *macroflow) lingers() time.Duration { return max(linger, 3*m.rtt.rto()) }

// remembered is the window of an m that has faded, as it would start with it at
// now (after RFC 2861): at least the usual first one, unless it was less.
func (m *macroflow) remembered(now cc.Time) cc.Bytes {
	idle := now.Sub(m.idleSince) - m.lingers()
	halvings := min(max(0, idle/m.rtt.rto()), 62)
	return max(m.memory>>halvings, min(m.memory, cc.InitialCwndPackets*m.mss))
}

// revive readies m, if it has faded, for a member whose bytes go along r: it
// starts anew from what is left of the window, up to which the path is known, and
// with r's base round trip. Of a way that is new nothing is known.
func (m *macroflow) revive(now cc.Time, r *route) {
	if len(m.members) > 0 || !m.fade(now) || m.memory == 0 {
		return
	}
	initial := r.expand(m.remembered(now))
	m.ssthresh = r.expand(m.memory)
	if r.base == 0 {
		initial, m.ssthresh = 0, 0
	}
	m.initial, m.memory = initial, 0
	m.rtt = rttEstimator{srtt: r.base, rttvar: r.base / 2, min: r.base}
	m.cwndFullAt = 0
	m.anchor(r)
}
