package cost

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
)

// greeting is how clients tell a listener of a mode where they want to go.
type greeting struct {
	mode  string
	turns func(to netip.AddrPort) []turn
}

// turn is what a client says, and how many bytes it hears then.
type turn struct {
	says  string
	hears int
}

// greetings are those of clients that are asked.
var greetings = []greeting{
	{"socks5", func(to netip.AddrPort) []turn {
		request := append([]byte("\x05\x01\x00\x01"), to.Addr().AsSlice()...)
		return []turn{{"\x05\x01\x00", 2}, {string(binary.BigEndian.AppendUint16(request, to.Port())), 10}}
	}},
	{"connect", func(to netip.AddrPort) []turn {
		established := "HTTP/1.1 200 Connection established\r\n\r\n"
		return []turn{{fmt.Sprintf("CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", to), len(established)}}
	}},
}

// say greets.
func (g *greeting) say(conn net.Conn, to netip.AddrPort) error {
	for _, t := range g.turns(to) {
		if _, err := io.WriteString(conn, t.says); err != nil {
			return err
		}
		if _, err := io.ReadFull(conn, make([]byte, t.hears)); err != nil {
			return err
		}
	}
	return nil
}

// BenchmarkGreeting compares the CPU time of a new connection on the ways in with that of mode forward.
func BenchmarkGreeting(b *testing.B) {
	executable := build(b)
	plain := carrier{name: "forward", envelope: "cubic", algorithm: "none"}
	ways := []carrier{plain}
	for i := range greetings {
		way := plain
		way.name, way.greeting = greetings[i].mode, &greetings[i]
		ways = append(ways, way)
	}
	named := plain
	named.name = "host-rule"
	named.more = "rules: [{name: named, match: {server_name: [a.example]}, algorithm: none}]\n"
	for b.Loop() {
		took := map[string][]float64{}
		for range 3 {
			for _, way := range append(ways, named) {
				s := newSite(b, executable, way)
				took[way.name] = append(took[way.name], connect(b, s)["CPU-us/connection"])
				s.close(b)
			}
		}
		for _, us := range took {
			slices.Sort(us)
		}
		for name, us := range took {
			x := us[1] / took[plain.name][1]
			b.Logf("%s: CPU-us/connection %.1f, the median %.2f of forward's", name, us, x)
			b.ReportMetric(x, name+"-x-forward")
		}
	}
}
