package ccp

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// FuzzMessages has every datagram be refused, or be written again as it was read.
func FuzzMessages(f *testing.F) {
	f.Add(bytesOf(f, exampleInstall, 244))
	f.Add(Create{5, 14480, 1448, netip.AddrPort{}, netip.AddrPort{}, "reno"}.Append(nil))
	f.Add(Change{5, 1, []Update{cwnd(1)}}.Append(nil))
	f.Add(Change{5, 0, []Update{cwnd(1)}}.Append(nil))
	f.Add(Measure{5, 1, []uint64{1, 2}}.Append(nil))
	f.Add(Ready{7}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		for {
			m, rest, err := Next(b)
			if err != nil {
				require.ErrorIs(t, err, ErrMalformed)
				return
			}
			again, err := rewrite(m)
			if err != nil {
				require.ErrorIs(t, err, ErrMalformed)
			} else if again != nil {
				reread, none, err := Next(again)
				require.NoError(t, err)
				require.Empty(t, none)
				twice, err := rewrite(reread)
				require.NoError(t, err)
				require.Equal(t, again, twice)
			}
			b = rest
		}
	})
}

func rewrite(m Message) ([]byte, error) {
	switch m.Kind {
	case KindCreate:
		v, err := m.Create()
		return v.Append(nil), err
	case KindMeasure:
		v, err := m.Measure()
		return v.Append(nil), err
	case KindInstall:
		v, err := m.Install()
		return v.Append(nil), err
	case KindUpdate, KindChange:
		v, err := m.Change()
		return v.Append(nil), err
	case KindReady:
		v, err := m.Ready()
		return v.Append(nil), err
	}
	return nil, nil
}

// FuzzAgent has an agent say anything to a flow that is under way: its limits stay valid
// and what is sent to it stays well-formed.
func FuzzAgent(f *testing.F) {
	f.Add(bytesOf(f, exampleInstall, 244), uint64(1000), byte(3))
	f.Add(Change{1, 1, []Update{cwnd(1 << 63)}}.Append(nil), uint64(0), byte(200))
	f.Fuzz(func(t *testing.T, datagram []byte, value uint64, n byte) {
		b := newBench(t, reports)
		b.ack(1)
		b.say(1)
		_ = b.agent.Receive(b.now, datagram)
		for i := range uint32(maxNamed) {
			b.say(0, Update{Register{ClassControl, i}, value}, cwnd(value), Update{Register{ClassImplicit, i}, value})
		}
		b.say(1)
		for i := range int(n) {
			b.ack(cc.Bytes(value%50) + 1)
			if i%7 == 0 {
				b.alg.OnLoss(cc.Loss{State: b.state(), Lost: cc.Bytes(value % 1e6)})
			}
			ctl := b.alg.Control()
			require.GreaterOrEqual(t, ctl.Cwnd, cc.Bytes(2*1448))
			require.LessOrEqual(t, ctl.Cwnd, cc.MaxCwnd)
			require.GreaterOrEqual(t, ctl.PacingRate, cc.Rate(0))
		}
	})
}

// FuzzPrograms has every program be refused or run, whatever its registers hold.
func FuzzPrograms(f *testing.F) {
	f.Add(bytesOf(f, exampleInstall, 244)[HeaderLen:], uint64(1000), uint64(1<<63))
	f.Fuzz(func(t *testing.T, body []byte, a, b uint64) {
		in, err := Message{Kind: KindInstall, body: body}.Install()
		if err != nil {
			return
		}
		p, err := in.Verify()
		if err != nil {
			require.ErrorIs(t, err, ErrProgram)
			return
		}
		var m machine
		m.resetProgram(p, a)
		for i := range uint64(4) {
			for s := range m.regs[:slotNamed] {
				m.regs[s] = a*i + b*uint64(s)
			}
			m.runOnce(a + i)
			m.renewVolatile()
		}
		for _, c := range p.consts {
			require.Equal(t, c.value, m.regs[c.slot], "an immediate has changed")
		}
	})
}

// FuzzCompile has every text be refused or become a program that is verified.
func FuzzCompile(f *testing.F) {
	f.Add(example)
	f.Add(reports)
	f.Add("(def (Report.foo 0) (bar 1)) # c\n(when (|| Flow.was_timeout false) (:= x 1) (:= Report.foo (ewma 2 x)))")
	f.Fuzz(func(t *testing.T, text string) {
		code, err := Compile(text)
		if err != nil {
			require.ErrorIs(t, err, ErrProgram)
			return
		}
		_, err = code.Install(1).Verify()
		require.NoError(t, err)
	})
}
