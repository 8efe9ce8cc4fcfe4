package capture

import (
	"bytes"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestPrint(t *testing.T) {
	for name, rules := range map[string]Rules{
		"tproxy": everything(),
		"little": {Mode: TPROXY, Port: 1081, Interfaces: anywhere},
		"udp": {
			Mode: TPROXY, Port: 1081, Interfaces: []string{"lan0"},
			Hold:    Hold{Ports: []PortRange{{443, 443}}, Uplink: true},
			Sources: Match{Exclude: []netip.Prefix{netip.MustParsePrefix("10.1.0.3/32")}},
		},
		"redirect": {
			Mode: Redirect, Port: 1081, IPv4: true, Interfaces: []string{"lan0"},
			Ports: []PortRange{{80, 80}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var b bytes.Buffer
			rules.Connected = ConnectedCapture // the machine's networks are the machine's
			require.NoError(t, rules.Print(&b))
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				require.NoError(t, os.WriteFile(golden, b.Bytes(), 0o644))
			}
			want, err := os.ReadFile(golden)
			require.NoError(t, err)
			assert.Equal(t, string(want), b.String())
		})
	}
}

func TestMistakesNameTheSetting(t *testing.T) {
	good := Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}
	for want, spoil := range map[string]func(*Rules){
		`mode "tprox" is neither`:    func(r *Rules) { r.Mode = "tprox" },
		"port: the port":             func(r *Rules) { r.Port = 0 },
		"share bits":                 func(r *Rules) { r.Mark, r.OwnMark = 0x3, 0x2 },
		"route-table -1":             func(r *Rules) { r.RouteTable = -1 },
		"route-table 254 is the":     func(r *Rules) { r.RouteTable = 254 },
		`interface "wg*"`:            func(r *Rules) { r.Interfaces = []string{"lan0", "wg*"} },
		`interface "sixteen-letters`: func(r *Rules) { r.Interfaces = []string{"sixteen-letters!"} },
		"interface: where connections come in is missing: --interface lan0": func(r *Rules) { r.Interfaces = nil },
		"port range 9-8":         func(r *Rules) { r.Ports = []PortRange{{9, 8}} },
		"port range 7-6":         func(r *Rules) { r.Hold.Ports = []PortRange{{7, 6}} },
		"--udp-up needs --udp":   func(r *Rules) { r.Hold.Uplink = true },
		"any does not say where": func(r *Rules) { r.Hold = Hold{All: true, Uplink: true} },
		"the queue of what goes": func(r *Rules) { r.Hold = Hold{All: true, Uplink: true, UplinkQueue: DefaultHoldQueue} },
		"must not have the bit":  func(r *Rules) { r.Hold.All, r.Mark = true, CongestionMark },
		"port range 0":           func(r *Rules) { r.Ports = []PortRange{{}} },
		"prefix ::ffff:10.0.0.0/104": func(r *Rules) {
			r.Sources.Include = []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("::ffff:10.0.0.0"), 104)}
		},
		"prefix invalid Prefix": func(r *Rules) { r.Destinations.Exclude = make([]netip.Prefix, 1) },
	} {
		r := good
		spoil(&r)
		err := r.Print(&bytes.Buffer{})
		assert.ErrorContains(t, err, "capture: ")
		assert.ErrorContains(t, err, want)
		assert.Equal(t, err, r.Apply(t.Context()), "refused before anything is touched")
	}
}

func TestPortRangeText(t *testing.T) {
	for text, want := range map[string]PortRange{"80": {80, 80}, "8000-8099": {8000, 8099}, "1-65535": {1, 65535}} {
		var p PortRange
		require.NoError(t, p.UnmarshalText([]byte(text)))
		assert.Equal(t, want, p)
		assert.Equal(t, text, p.String())
	}
	for _, text := range []string{"", "0", "80-", "-80", "90-80", "65536", "http", "1-2-3", "80 "} {
		var p PortRange
		assert.ErrorContains(t, p.UnmarshalText([]byte(text)), "neither a port nor a range", text)
	}
}

// Elements hold exactly what the prefixes hold, in order and apart.
func TestElementsAreThePrefixes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefixes := rapid.SliceOf(rapid.Custom(func(t *rapid.T) netip.Prefix {
			// Few distinct bits, so that prefixes meet.
			addr := netip.AddrFrom4([4]byte{
				rapid.SampledFrom([]byte{0, 127, 128, 255}).Draw(t, "a"), 0, 0,
				rapid.Byte().Draw(t, "d"),
			})
			return netip.PrefixFrom(addr, rapid.SampledFrom([]int{0, 1, 8, 24, 30, 31, 32}).Draw(t, "bits"))
		})).Draw(t, "prefixes")
		elements := addressElements(prefixes, true)
		for i := 1; i < len(elements); i++ {
			if end := elements[i-1].end; end == nil || bytes.Compare(end, elements[i].first) >= 0 {
				t.Fatalf("%v and %v meet", elements[i-1], elements[i])
			}
		}
		probe := netip.AddrFrom4([4]byte{
			rapid.SampledFrom([]byte{0, 1, 127, 128, 255}).Draw(t, "pa"), 0, 0, rapid.Byte().Draw(t, "pd"),
		})
		want, got := false, false
		for _, p := range prefixes {
			want = want || p.Contains(probe)
		}
		for _, e := range elements {
			got = got || bytes.Compare(e.first, probe.AsSlice()) <= 0 &&
				(e.end == nil || bytes.Compare(probe.AsSlice(), e.end) < 0)
		}
		if got != want {
			t.Fatalf("%v: %v in the prefixes, %v in the elements", probe, want, got)
		}
	})
}
