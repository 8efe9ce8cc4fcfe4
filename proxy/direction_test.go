package proxy_test

import (
	"bytes"
	"errors"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// ending is how one side of a connection stops sending.
type ending int

const (
	withFin ending = iota
	withReset
)

// side is what one end does, and what it saw.
type side struct {
	pieces [][]byte
	ending ending
	takes  int // bytes taken at once
	got    []byte
	err    error
}

func (s *side) all() []byte { return bytes.Join(s.pieces, nil) }

func anySide(t *rapid.T, name string) *side {
	s := &side{takes: rapid.IntRange(1, 100_000).Draw(t, name+" takes")}
	for range rapid.IntRange(0, 8).Draw(t, name+" pieces") {
		size := rapid.IntRange(1, 300_000).Draw(t, name+" size")
		s.pieces = append(s.pieces, random(uint64(size), size))
	}
	if rapid.IntRange(0, 3).Draw(t, name+" resets") == 0 {
		s.ending = withReset
	}
	return s
}

// Whatever the sizes of pieces, reads and buffers, and whoever ends how: a side
// sees a prefix of what the other sent, the whole of it before a FIN, and never
// a FIN after a RST.
func TestRelayDeliversWhatWasSentOrSaysThatItDidNot(t *testing.T) {
	algorithms := []policy.Algorithm{"none", "static:cwnd_packets=3", "cubic"}
	rapid.Check(t, func(rt *rapid.T) {
		client, server := anySide(rt, "client"), anySide(rt, "server")
		capacity := rapid.IntRange(1500, 1<<20).Draw(rt, "capacity")
		algorithm := rapid.SampledFrom(algorithms).Draw(rt, "algorithm")
		b := newBench(t, func(c *config.Config, b *bench) {
			c.Defaults.Algorithm = algorithm
			c.Limits.Buffer = cc.Bytes(rapid.IntRange(16<<10, 1<<20).Draw(rt, "buffer"))
			b.capacity = capacity
		})
		clientLeg, serverLeg := b.connect()
		done := make(chan struct{})
		play := func(s *side, leg *fakeLeg) {
			for _, p := range s.pieces {
				leg.send(p)
			}
			if s.ending == withFin {
				leg.sendFin()
			} else {
				leg.sendReset()
			}
		}
		taking := func(s *side, leg *fakeLeg) {
			s.got, s.err = leg.takeAll(s.takes)
			done <- struct{}{}
		}
		go taking(client, clientLeg)
		go taking(server, serverLeg)
		go play(client, clientLeg)
		go play(server, serverLeg)
		<-done
		<-done
		b.end()

		check := func(name string, s, other *side) {
			sent := other.all()
			require.True(rt, bytes.HasPrefix(sent, s.got), "%s sees %d bytes that are not the first of what was sent",
				name, len(s.got))
			if s.ending == withReset {
				return // it has thrown away what was on its way
			}
			switch s.err {
			case nil:
				require.Equal(rt, withFin, other.ending, "%s sees an end, but the other side had reset", name)
				require.Len(rt, s.got, len(sent), "%s sees an end before all has come", name)
			default:
				require.True(rt, errors.Is(s.err, syscall.ECONNRESET))
				require.Equal(rt, withReset, other.ending, "%s sees a reset that nobody sent", name)
				require.Len(rt, s.got, len(sent), "%s sees the reset before what came before it", name)
			}
		}
		check("the client", client, server)
		check("the server", server, client)
	})
}
