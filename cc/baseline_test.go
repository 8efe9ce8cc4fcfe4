package cc

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestNoneNeverBinds(t *testing.T) {
	p := newPath(t, "none")
	p.Ack(10, 40*ms)
	p.Lose(5)
	p.Timeout()
	assert.Equal(t, Control{Cwnd: MaxCwnd, Phase: "unlimited"}, p.alg.Control())
}

func TestStaticStaysWhereItIs(t *testing.T) {
	p := newPath(t, "static")
	p.Ack(10, 40*ms)
	p.Lose(5)
	p.Timeout()
	assert.Equal(t, Control{Cwnd: 22 * DefaultMSS, Phase: "static"}, p.alg.Control())

	p = newPath(t, "static:cwnd_packets=40,pacing_mbit=12")
	p.state.MSS = 1000
	p.Ack(1, 40*ms)
	assert.Equal(t, Control{Cwnd: 40_000, PacingRate: 12e6, Phase: "static"}, p.alg.Control(),
		"in segments of the path")
}
