//go:build linux

package e2e

import (
	"io"
	"net"
	"net/netip"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Connections that a firewall drops on their way to the proxy die in silence. Who applies the rules, or asks doctor,
// reads so, with the line that cures it.
func TestAFirewallInTheWayIsNamedWithItsCure(t *testing.T) {
	needsPrivilege(t)
	for _, row := range []struct {
		name, mode, firewall, hook string
	}{
		{
			name: "as ufw has it", mode: "tproxy", hook: "input",
			firewall: `
table ip filter {
	chain ufw-not-local { fib daddr type local return; limit rate 3/minute log prefix "[UFW BLOCK] "; drop; }
	chain ufw-before-input {
		iifname "lo" accept
		ct state related,established accept
		ct state invalid drop
		icmp type echo-request accept
		jump ufw-not-local
		jump ufw-user-input
	}
	chain ufw-user-input { tcp dport { 22, 80, 443 } accept; }
	chain INPUT { type filter hook input priority filter; policy drop; counter jump ufw-before-input; }
}
table ip6 filter {
	chain ufw6-before-input {
		iifname "lo" accept
		ct state related,established accept
		icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-advert } accept
		tcp dport 22 accept
	}
	chain INPUT { type filter hook input priority filter; policy drop; jump ufw6-before-input; }
}`,
		},
		{
			name: "as firewalld has it", mode: "tproxy", hook: "input",
			firewall: `
table inet firewalld {
	chain filter_INPUT {
		type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		jump filter_INPUT_ZONES
		reject with icmpx admin-prohibited
	}
	chain filter_INPUT_ZONES { iifname "` + netlab.NearDevice + `" goto filter_IN_internal; goto filter_IN_public; }
	chain filter_IN_internal {
		tcp dport 22 accept
		meta l4proto { icmp, ipv6-icmp } accept
		reject with icmpx admin-prohibited
	}
	chain filter_IN_public { meta l4proto { icmp, ipv6-icmp } accept; reject; }
}`,
		},
		{
			name: "a redirected port", mode: "redirect", hook: "input",
			firewall: `
table inet fw {
	chain input {
		type filter hook input priority filter; policy drop;
		ct state established,related accept
		meta l4proto { icmp, icmpv6 } accept
		iif lo accept
		tcp dport { 22, 8080 } accept
	}
}`,
		},
		{
			name: "what the proxy sends", mode: "tproxy", hook: "output",
			firewall: `
table inet fw {
	chain output {
		type filter hook output priority filter; policy drop;
		oifname lo accept
		meta l4proto { icmp, icmpv6 } accept
		udp dport 53 accept
	}
}`,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newScene(t)
			s.start("listeners: [{name: lan, address: \"[::]:7000\", mode: " + row.mode + "}]\nmark: 0x2000000\n" +
				"telemetry: {address: \"" + telemetryAddr + "\"}\n")
			loadRules(t, s.Edge, row.firewall)
			say := func(args ...string) string {
				out, err := s.Edge.Command(t.Context(), executable, args...).CombinedOutput()
				require.NoError(t, err, "%s", out)
				return string(out)
			}
			apply := func() string {
				return say("rules", "apply", "--interface", netlab.NearDevice, "--port", "7000", "--mode", row.mode, "--connected")
			}
			warned := regexp.MustCompile(`(?m)^warning: ` + row.hook + ` chain .*(nft insert rule .*? accept)`)
			doctors := regexp.MustCompile(`(?m)^ +warn +` + row.hook + `_chain .*\n.*fix: .*nft insert rule .* accept`)
			said := apply()
			require.Regexp(t, warned, said)
			assert.Regexp(t, doctors, say("doctor"))
			for range 8 {
				cures := warned.FindAllStringSubmatch(said, -1)
				if len(cures) == 0 {
					break
				}
				for _, cure := range cures {
					loadRules(t, s.Edge, cure[1][len("nft "):])
				}
				said = apply()
			}
			assert.NotRegexp(t, warned, said)
			assert.NotRegexp(t, doctors, say("doctor"))
			for _, addr := range []netip.Addr{s.ServerAddr.V4, s.ServerAddr.V6} {
				to := netip.AddrPortFrom(addr, servicePort)
				need.Serve(t, s.listen(to), func(c net.Conn) { _, _ = io.WriteString(c, "here") })
				c, err := s.Client.Dial("tcp", to.String())
				require.NoError(t, err)
				defer c.Close()
				require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
				got, err := io.ReadAll(c)
				require.NoError(t, err)
				assert.Equal(t, "here", string(got))
			}
			assert.EqualValues(t, 2, s.proxy.metric("penstock_flows_total"), "they were captured")
		})
	}
}
