package proxy

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel/kernelspace"
)

// What the kernel takes past the proxy shows no name, which undecided: refuse refuses in either datapath.
func TestTheKernelRefusesWhatShowsNoNameAndHadTo(t *testing.T) {
	cfg, err := config.Parse([]byte(`
listeners:
  - name: vpn
    mode: wireguard
    address: ":51820"
    wireguard: {private_key_file: vpn.key, pool: [10.9.0.0/24], datapath: kernel}
rules:
  - {name: asked, match: {host: [video.example]}, refuse: true}
  - {name: video, match: {server_name: [video.example], ports: [80]}, refuse: true}
  - {name: named, match: {server_name: [video.example], source: [10.9.0.2], ports: [443]}, undecided: refuse}
  - {name: tcp, match: {server_name: [video.example], protocol: tcp}, undecided: refuse}
  - {name: ssh, match: {ports: [22], protocol: tcp}, refuse: true}
`))
	require.NoError(t, err)
	var got []kernelspace.Rule
	for _, r := range cfg.KernelRules(&cfg.Listeners[0]) {
		got = append(got, kernelRules(r)...)
	}
	from := []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32")}
	https := []kernelspace.PortRange{{First: 443, Last: 443}}
	assert.Equal(t, []kernelspace.Rule{
		{Refuse: true, Sources: from, Ports: https, UDP: true},
		{Refuse: true, Sources: from, Ports: https, ICMP: true},
		{Refuse: true, Ports: []kernelspace.PortRange{{First: 22, Last: 22}}, TCP: true},
	}, got)
}

func TestTheKernelRefusesADestinationInEveryFormOfItsAddress(t *testing.T) {
	to := netip.MustParsePrefix("192.0.2.0/24")
	r := policy.RuleSettings{Match: policy.Match{Destinations: []netip.Prefix{to}}}
	assert.Equal(t, []netip.Prefix{to}, kernelRules(r)[0].Targets)
	r.Refuse = "no"
	targets := kernelRules(r)[0].Targets
	assert.Contains(t, targets, to)
	assert.Contains(t, targets, netip.MustParsePrefix("64:ff9b::c000:200/120"))
}
