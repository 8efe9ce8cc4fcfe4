package capture

import (
	"encoding/binary"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// nft runs nft with a ruleset, or a command, in a namespace.
func (ns namespace) nft(t *testing.T, text string) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	ns.do(t, func() error {
		cmd := exec.Command("nft", "-f", "-") // a child is where the thread is
		cmd.Stdin = strings.NewReader(text)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Logf("%s", out)
		}
		return err
	})
}

// edge is a namespace with an inside and an outside interface.
func edge(t *testing.T) namespace {
	t.Helper()
	ns, beside := newNamespace(t), newNamespace(t)
	veth(t, ns, "lan0", []string{"10.1.0.1/24", "fd01::1/64"}, beside, "lan0", nil)
	veth(t, ns, "wan0", []string{"10.2.0.1/24", "fd02::1/64"}, beside, "wan0", nil)
	return ns
}

// Chains as programs and people write them. "MARK" is a rule's match of captured packets.
const (
	// as ufw's own, by iptables over nftables
	ufwLike = `table ip filter {
		chain ufw-not-local {
			fib daddr type local return
			fib daddr type multicast return
			fib daddr type broadcast return
			limit rate 3/minute burst 10 packets log prefix "[UFW BLOCK] "
			drop
		}
		chain ufw-before-input {
			EXTRA
			iifname "lo" accept
			ct state related,established accept
			ct state invalid log prefix "[UFW AUDIT INVALID] "
			ct state invalid drop
			icmp type { destination-unreachable, time-exceeded, parameter-problem, echo-request } accept
			udp sport 67 udp dport 68 accept
			jump ufw-not-local
			ip daddr 224.0.0.251 udp dport 5353 accept
			jump ufw-user-input
		}
		chain ufw-user-input { tcp dport 22 accept; tcp dport 443 accept; tcp dport 6881-6889 accept; }
		chain ufw-after-input { udp dport 137 counter; tcp dport 139 counter; }
		chain INPUT {
			type filter hook input priority filter; policy drop;
			counter jump ufw-before-input
			jump ufw-after-input
		}
		chain OUTPUT { type filter hook output priority filter; policy accept; oifname "lo" accept; ct state new accept; }
	}`
	firewalldLike = `table inet firewalld {
		chain filter_INPUT {
			type filter hook input priority filter + 10; policy accept;
			EXTRA
			ct state { established, related } accept
			ct status dnat accept
			iifname "lo" accept
			ct state invalid drop
			jump filter_INPUT_ZONES
			reject with icmpx admin-prohibited
		}
		chain filter_INPUT_ZONES { iifname "lan0" goto filter_IN_internal; goto filter_IN_public; }
		chain filter_IN_internal {
			jump filter_IN_internal_allow
			meta l4proto { icmp, ipv6-icmp } accept
			ZONE
			reject with icmpx admin-prohibited
		}
		chain filter_IN_internal_allow {
			tcp dport 22 accept
			ip daddr 224.0.0.251 udp dport 5353 accept
			ip6 daddr fe80::/64 udp dport 546 accept
		}
		chain filter_IN_public { tcp dport 22 accept; reject with icmpx admin-prohibited; }
	}`
	openWrtLike = `table inet fw4 {
		chain input {
			type filter hook input priority filter; policy drop;
			EXTRA
			iif "lo" accept
			ct state vmap { invalid : drop, established : accept, related : accept }
			tcp flags & (fin | syn | rst | ack) == syn jump syn_flood
			iifname vmap { "lan0" : jump input_lan, "wan0" : jump input_wan }
			jump handle_reject
		}
		chain syn_flood { limit rate 25/second burst 50 packets return; drop; }
		chain input_lan { jump LAN; }
		chain input_wan { tcp dport 22 accept; jump handle_reject; }
		chain accept_all { counter accept; }
		chain handle_reject { meta l4proto tcp reject with tcp reset; reject; }
	}`
)

func TestObstaclesAreChainsThatDropWhatIsCaptured(t *testing.T) {
	tproxy := Rules{Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan0"}}
	redirected := tproxy
	redirected.Mode = Redirect
	web := tproxy
	web.Ports = []PortRange{{443, 443}}
	four := tproxy
	four.IPv4 = true
	known := "ct state established,related accept; "
	chain := func(rules string) string {
		return "table inet fw { set admins { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }; " +
			"map services { type inet_service : verdict; elements = { 22 : accept, 80 : drop }; }; " +
			"chain more { " + "tcp dport 22 accept; }; " +
			"chain input { type filter hook input priority 0; policy drop; " + known + rules + " }; }"
	}
	with := func(template string, pairs ...string) string {
		return strings.NewReplacer(append(pairs, "EXTRA", "", "ZONE", "", "LAN", "handle_reject")...).Replace(template)
	}
	const mark = "meta mark & 0x01000000 == 0x01000000 accept"
	for name, row := range map[string]struct {
		rules    Rules
		firewall string
		finds    string // a part of the one obstacle; empty: there is none
	}{
		"no firewall":               {tproxy, "", ""},
		"an empty chain that drops": {tproxy, chain(""), "input chain inet fw input drops captured connections from lan0"},
		"a service":                 {tproxy, chain("iif lo accept; tcp dport 22 accept;"), "inet fw input"},
		"what is new alone": {
			tproxy, bareChain("ct state new accept;"), "drops what follows the first packet of captured connections from lan0: ",
		},
		"what is captured alone": {tproxy, bareChain(mark + ";"), ""}, // with keep_client, answers have the mark, too
		"what is redirected alone": {
			redirected, bareChain("ct status dnat accept;"), "drops answers to the proxy's own connections: ",
		},
		"either":                   {tproxy, bareChain(mark + "; ct state established accept;"), ""},
		"the mark":                 {tproxy, chain("ct state invalid drop; " + mark + ";"), ""},
		"the mark, after others":   {tproxy, chain("tcp dport 22 accept; jump more; " + mark + ";"), ""},
		"the mark, after a drop":   {tproxy, chain("tcp dport 1-65535 drop; " + mark + ";"), "inet fw input"},
		"the mark, whole":          {tproxy, chain("meta mark 0x01000000 accept;"), ""},
		"another mark, whole":      {tproxy, chain("meta mark 0x10 accept;"), "inet fw input"},
		"another bit":              {tproxy, chain("meta mark & 0x10 == 0x10 accept;"), "inet fw input"},
		"the interface":            {tproxy, chain(`iifname "lan0" accept;`), ""},
		"the interface's number":   {tproxy, chain(`iif "lan0" accept;`), ""},
		"a wildcard":               {tproxy, chain(`iifname "lan*" accept;`), ""},
		"interfaces":               {tproxy, chain(`iifname { "lan0", "lan1" } accept;`), ""},
		"another interface":        {tproxy, chain(`iifname "wan0" accept; iif "wan0" accept;`), "inet fw input"},
		"all but one interface":    {tproxy, chain(`iifname != "wan0" accept;`), ""},
		"networks inside":          {tproxy, chain("ip saddr 10.1.0.0/24 accept; ip6 saddr fd01::/64 accept;"), ""},
		"networks inside of IPv4":  {tproxy, chain("ip saddr @admins accept;"), "such as over IPv6"},
		"and IPv6 is not captured": {four, chain("ip saddr @admins accept;"), ""},
		"networks and services":    {tproxy, chain("ip saddr @admins tcp dport 22 accept;"), "inet fw input"},
		"the machine's address":    {tproxy, chain("ip daddr 10.1.0.1 accept; ip6 daddr fd01::1 accept;"), "inet fw input"},
		"what is for the machine":  {tproxy, chain("fib daddr type local accept;"), "inet fw input"},
		"what is not for it drops": {tproxy, chain("fib daddr type != local drop; accept;"), "inet fw input"},
		"a web server of its own":  {tproxy, chain("tcp dport { 80, 443 } accept;"), "to port 50000"},
		"which is what we capture": {web, chain("tcp dport { 80, 443 } accept;"), ""},
		"ports by range":           {tproxy, chain("tcp dport { 1-100, 200-65535 } accept;"), ""},
		"ports but some":           {tproxy, chain("tcp dport != 1-1023 accept;"), "to port 443"},
		"new connections":          {tproxy, chain("ct state new accept;"), ""},
		"a limit":                  {tproxy, chain("limit rate 10/second accept;"), ""},
		"a socket":                 {tproxy, chain("meta l4proto tcp socket transparent 1 accept;"), ""},
		"a verdict map":            {tproxy, chain("tcp dport vmap @services;"), "inet fw input"},
		"a verdict map lets in":    {tproxy, chain("tcp dport vmap { 0-79 : drop, 80-65535 : accept };"), ""},
		"marked before":            {tproxy, chain("meta mark set 0x10; meta mark 0x10 accept;"), ""},
		"another hook": {
			tproxy, "table inet fw { chain forward { type filter hook forward priority 0; policy drop; }; }", "",
		},
		"bridges": {
			tproxy, "table bridge fw { chain input { type filter hook input priority 0; policy drop; }; }", "",
		},
		"a chain of IPv6 alone": {
			four, "table ip6 fw { chain input { type filter hook input priority 0; policy drop; }; }", "",
		},

		"redirect":                   {redirected, chain("tcp dport 22 accept;"), "ct status dnat tcp dport 1081 accept"},
		"redirect, the port":         {redirected, chain("tcp dport 1081 accept;"), ""},
		"redirect, the mark":         {redirected, chain("meta l4proto tcp " + mark + ";"), "inet fw input"},
		"redirect, translated":       {redirected, chain("ct status dnat accept;"), ""},
		"redirect, for this machine": {redirected, chain("fib daddr type local tcp dport 1000-1100 accept;"), ""},

		"ufw":                         {tproxy, with(ufwLike), "-A ufw-before-input -m mark --mark 0x1000000/0x1000000 -j ACCEPT"},
		"ufw with our rule":           {tproxy, with(ufwLike, "EXTRA", mark), ""},
		"ufw, redirect":               {redirected, with(ufwLike), "-p tcp --dport 1081 -m conntrack --ctstate DNAT -j ACCEPT"},
		"ufw that lets redirected in": {redirected, with(ufwLike, "EXTRA", "ct status dnat tcp dport 1081 accept"), ""},

		"firewalld":                 {tproxy, with(firewalldLike), "--zone=trusted --change-interface=lan0"},
		"firewalld with our rule":   {tproxy, with(firewalldLike, "EXTRA", mark), ""},
		"firewalld, an open zone":   {tproxy, with(firewalldLike, "ZONE", "accept"), ""},
		"firewalld, redirect":       {redirected, with(firewalldLike), ""},
		"OpenWrt":                   {tproxy, with(openWrtLike, "LAN", "accept_all"), ""},
		"OpenWrt, a guests' zone":   {tproxy, with(openWrtLike), "/usr/share/nftables.d/chain-pre/input/penstock.nft"},
		"OpenWrt, with our rule":    {tproxy, with(openWrtLike, "EXTRA", mark), ""},
		"a firewall in two chains":  {tproxy, with(ufwLike, "EXTRA", mark) + "\n" + chain(""), "inet fw input"},
		"a chain of the output":     {tproxy, outputChain("oif lo accept; ct state established accept;"), "the proxy's own connections"},
		"the output, our mark":      {tproxy, outputChain("ct state established accept; meta mark & 0x02000000 != 0 accept;"), ""},
		"the output, new ones":      {tproxy, outputChain("ct state new accept; oif lo accept;"), "answers to captured clients from lan0"},
		"the output, by user":       {tproxy, outputChain("ct state established accept; meta skuid 1000 accept;"), ""},
		"the output, towards there": {tproxy, outputChain(`oifname "lan0" accept; oifname "wan0" accept;`), ""},
		"the output, rejected": {
			tproxy, "table inet fw { chain output { type filter hook output priority 0; ct state established accept; " +
				"oifname \"lo\" accept; udp dport 53 accept; reject; }; }", "output chain inet fw output drops the proxy's own",
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := edge(t)
			ns.nft(t, row.firewall)
			var found []Obstacle
			look := func() {
				ns.do(t, func() (err error) {
					found, err = row.rules.Obstacles()
					return err
				})
			}
			look()
			if row.finds == "" {
				assert.Empty(t, found)
				return
			}
			require.NotEmpty(t, found)
			assert.Contains(t, found[0].String(), row.finds)

			// What is told cures it.
			for range 8 {
				if len(found) == 0 {
					break
				}
				line := regexp.MustCompile(`nft (insert rule .*? accept)`).FindStringSubmatch(found[0].Cure)
				require.NotNil(t, line, found[0].Cure)
				ns.nft(t, line[1])
				look()
			}
			assert.Empty(t, found)
		})
	}
}

// A firewall that lets some in does not let all in.
func TestAcceptsOfOthersLetNoCapturedConnectionIn(t *testing.T) {
	r := Rules{Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan0"}, IPv4: true}
	const known = "ct state established,related accept; iif lo accept; meta l4proto { icmp, ipv6-icmp } accept; "
	for name, row := range map[string]struct {
		rules   string
		letsAll bool
	}{
		"a host":                       {"ip saddr 10.1.0.99 accept;", false},
		"hosts":                        {"ip saddr { 10.1.0.99, 10.1.0.98 } accept;", false},
		"a set that programs add to":   {"ip saddr @knocked accept;", false},
		"hosts with an expiry":         {"ip saddr @admins accept;", false},
		"ports by interface":           {`iifname . tcp dport { "lan0" . 22, "lan0" . 53 } accept;`, false},
		"hosts and ports":              {"ip saddr . tcp dport { 10.1.0.99 . 22, 10.1.0.99 . 443 } accept;", false},
		"ranges of hosts and ports":    {"ip saddr . tcp dport { 10.1.0.96-10.1.0.99 . 1-1023 } accept;", false},
		"a verdict map of hosts":       {"ip saddr vmap { 10.1.0.99 : accept, 10.1.0.98 : drop };", false},
		"a hardware address":           {"ether saddr 02:00:00:00:00:01 accept;", false},
		"a mark":                       {"meta mark 0x5 accept;", false},
		"a mark by mask":               {"meta mark and 0xff == 0x5 accept;", false},
		"marks by range":               {"meta mark 5-9 accept;", false},
		"IPsec":                        {"meta ipsec exists accept;", false},
		"a time to live":               {"ip ttl 255 accept;", false},
		"a class of service":           {"ip dscp ef accept;", false},
		"own addresses":                {"ip daddr { 10.1.0.1, 10.2.0.1 } accept;", false},
		"the own network":              {"ip daddr 10.1.0.0/24 accept;", false},
		"the own network, other width": {"ip daddr 10.1.0.0/25 accept;", false},
		"multicast":                    {"ip daddr 224.0.0.0/4 accept;", false},
		"private destinations":         {"ip daddr { 10.0.0.0/8, 192.168.0.0/16 } accept;", false},
		"a group of interfaces":        {"iifgroup 7 accept;", false},
		"a network beside":             {"ip saddr 10.3.0.0/24 accept;", false},
		"a mark that a rule sets":      {"meta mark set meta mark or 0x10; meta mark 0x20 accept;", false},

		"the network of clients":        {"ip saddr 10.1.0.0/24 accept;", true},
		"addresses that DHCP gives out": {"ip saddr 10.1.0.100-10.1.0.199 accept;", true},
		"private sources":               {"ip saddr { 10.0.0.0/8, 192.168.0.0/16 } accept;", true},
		"networks by interface":         {`iifname . ip saddr { "lan0" . 10.1.0.0/24 } accept;`, true},
		"sources and ports":             {"ip saddr . tcp dport { 10.0.0.0/8 . 1-65535 } accept;", true},
		"all destinations but own":      {"ip daddr != { 10.1.0.1, 10.2.0.1 } accept;", true},
		"the usual time to live":        {"ip ttl 2-128 accept;", true},
		"no IPsec":                      {"meta ipsec missing accept;", true},
		"high ports of clients":         {"tcp sport 1024-65535 accept;", true},
		"a country":                     {"ip daddr 24.0.0.0/8 accept;", true},
		"a mark that a rule adds to":    {"meta mark set meta mark or 0x10; meta mark 0x01000010 accept;", true},
		"a chain that sets a mark":      {"jump marks; jump marks; meta mark 0x30 accept;", true},
		"a limit":                       {"limit rate 1/second accept;", true},
		"a quota":                       {"quota until 1 mbytes accept;", true},
	} {
		for _, family := range []string{"ip", "inet"} {
			t.Run(name+", "+family, func(t *testing.T) {
				ns := edge(t)
				ns.nft(t, "table "+family+" fw { set knocked { type ipv4_addr; flags dynamic,timeout; timeout 1m; }; "+
					"set admins { type ipv4_addr; flags timeout; elements = { 10.1.0.99 timeout 1h }; }; "+
					"chain marks { meta mark set 0x30; }; "+
					"chain input { type filter hook input priority 0; policy drop; "+known+row.rules+" }; }")
				ns.do(t, func() error {
					found, err := r.Obstacles()
					assert.Equal(t, row.letsAll, len(found) == 0, "%v", found)
					return err
				})
			})
		}
	}
}

func bareChain(rules string) string {
	return "table inet fw { chain input { type filter hook input priority 0; policy drop; " + rules + " }; }"
}

func outputChain(rules string) string {
	return "table inet fw { chain output { type filter hook output priority 0; policy drop; " + rules + " }; }"
}

// Iptables over nftables keeps matches in the form of its own modules.
func TestMatchesOfIptablesAreEvaluated(t *testing.T) {
	p := packet{
		family: ipv4, flags: flagSYN, state: expr.CtStateBitNEW, mark: 0x10, known: 0x10, targetPort: 443,
		sourceType: unix.RTN_UNICAST, targetType: unix.RTN_UNICAST,
	}
	redirected := p
	redirected.translated, redirected.targetType = true, unix.RTN_LOCAL
	raw := func(name string, data ...[]byte) *expr.Match {
		info := xt.Unknown(slices.Concat(data...))
		return &expr.Match{Name: name, Info: &info}
	}
	tcp := func(first, last uint16, invert xt.TcpInvFlagset) *expr.Match {
		return &expr.Match{Name: "tcp", Info: &xt.Tcp{
			SrcPorts: [2]uint16{0, 65535}, DstPorts: [2]uint16{first, last}, InvFlags: invert,
		}}
	}
	states := func(mask, invert uint16) *expr.Match {
		info := &xt.ConntrackMtinfo3{}
		info.MatchFlags, info.InvertFlags, info.StateMask = conntrackState, invert, mask
		return &expr.Match{Name: "conntrack", Info: info}
	}
	ports := func(which byte, of ...uint16) *expr.Match {
		var list []byte
		for i := range 15 {
			port := uint16(0)
			if i < len(of) {
				port = of[i]
			}
			list = binary.NativeEndian.AppendUint16(list, port)
		}
		ranges := make([]byte, 15)
		ranges[1] = 1 // the second and the third are one
		return raw("multiport", []byte{which, byte(len(of))}, list, ranges, []byte{0})
	}
	for name, row := range map[string]struct {
		match *expr.Match
		of    packet
		is    truth
	}{
		"the mark":               {raw("mark", nativeBytes(0x10), nativeBytes(0x10), []byte{0}), p, yes},
		"not the mark":           {raw("mark", nativeBytes(0x10), nativeBytes(0x10), []byte{1}), p, no},
		"another bit":            {raw("mark", nativeBytes(0x20), nativeBytes(0x20), []byte{0}), p, maybe},
		"no mark":                {raw("mark", nativeBytes(0), nativeBytes(0x10), []byte{0}), p, no},
		"known connections":      {states(2|4, 0), p, no},
		"but known ones":         {states(2|4, conntrackState), p, yes},
		"new connections":        {states(8, 0), p, yes},
		"in the older form":      {raw("state", nativeBytes(8)), p, yes},
		"what was translated":    {states(conntrackDNAT, 0), redirected, yes},
		"and was not":            {states(conntrackDNAT, 0), p, no},
		"a port":                 {tcp(22, 22, 0), p, no},
		"its port":               {tcp(443, 443, 0), p, yes},
		"all but its port":       {tcp(443, 443, xt.TcpInvDestPorts), p, no},
		"any port":               {tcp(0, 65535, 0), p, yes},
		"ports":                  {ports(1, 22, 400, 500), p, yes},
		"other ports":            {ports(1, 22, 400, 442, 444), p, no},
		"ports of the sender":    {ports(0, 22, 400, 500), p, maybe},
		"UDP":                    {&expr.Match{Name: "udp", Info: &xt.Udp{}}, p, no},
		"ICMP":                   {raw("icmp"), p, no},
		"what is for us":         {&expr.Match{Name: "addrtype", Info: &xt.AddrTypeV1{Dest: 1 << unix.RTN_LOCAL}}, p, no},
		"what is redirected":     {&expr.Match{Name: "addrtype", Info: &xt.AddrTypeV1{Dest: 1 << unix.RTN_LOCAL}}, redirected, yes},
		"what is not for us":     {&expr.Match{Name: "addrtype", Info: &xt.AddrTypeV1{Dest: 1 << unix.RTN_LOCAL, Flags: 2}}, p, yes},
		"a remark":               {&expr.Match{Name: "comment", Info: new(xt.Comment)}, p, yes},
		"what nobody understood": {raw("bpf"), p, maybe},
	} {
		assert.Equal(t, row.is, row.of.matchesIptables(row.match), name)
	}
}

// What the kernel tells of others' rules is of whatever length.
func FuzzRulesOfOthers(f *testing.F) {
	f.Add("mark", slices.Concat(nativeBytes(1), nativeBytes(1), make([]byte, 4)))
	f.Add("state", nativeBytes(8))
	f.Add("multiport", append([]byte{1, 15}, make([]byte, 46)...))
	f.Add("vmap", []byte("\x08\x00\x01\x00\xff\xff\xff\xfd\x09\x00\x02\x00more\x00"))
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		info := xt.Unknown(data)
		p := packet{family: ipv4, mark: 1, known: 1, targetPort: 443}
		is := p.matchesIptables(&expr.Match{Name: name, Info: &info})
		assert.Contains(t, []truth{no, maybe, yes}, is)
		if v := elementVerdict(nftables.SetElement{Val: data}); v.chain != "" {
			assert.Greater(t, len(data), 12)
		}
		for op := range expr.CmpOpGte + 2 {
			assert.Contains(t, []truth{no, maybe, yes}, portValue(p.targetPort).compare(op, data))
		}
		p.markValue().bitwise(&expr.Bitwise{Len: 4, Mask: data, Xor: data})
		set := filterSet{&nftables.Set{Interval: true}, []nftables.SetElement{{Key: data}, {Key: data, IntervalEnd: true}}}
		_, is = set.findElement(portValue(p.targetPort))
		assert.Contains(t, []truth{no, maybe, yes}, is)
	})
}

// Doctor asks without knowing what was applied.
func TestObstaclesOfTheRulesInForce(t *testing.T) {
	ns := edge(t)
	look := func() (found []Obstacle, inForce bool) {
		ns.do(t, func() (err error) {
			found, inForce, err = Obstacles()
			return err
		})
		return found, inForce
	}
	ns.nft(t, "table inet fw { chain input { type filter hook input priority 0; policy drop; "+
		"iifname \"wan0\" accept; meta mark & 0x40 == 0x40 accept; meta mark 0x80 accept; }; }")
	_, inForce := look()
	assert.False(t, inForce)
	for _, row := range []struct {
		rules Rules
		finds string
	}{
		{Rules{Mode: TPROXY, Port: 7, Interfaces: []string{"lan0"}}, "captured connections from lan0"},
		{Rules{Mode: TPROXY, Port: 7, Interfaces: []string{"wan0"}}, ""},
		{Rules{Mode: TPROXY, Port: 7, Interfaces: []string{"lan0"}, Mark: 0x40}, ""},
		{
			Rules{Mode: Redirect, Port: 7, Interfaces: []string{"lan0"}, IPv6: true, Ports: []PortRange{{53, 54}}},
			"ct status dnat tcp dport 7 accept",
		},
	} {
		ns.do(t, func() error { return row.rules.Apply(t.Context()) })
		found, inForce := look()
		assert.True(t, inForce)
		if row.finds == "" {
			assert.Empty(t, found)
			continue
		}
		require.NotEmpty(t, found)
		assert.Contains(t, found[0].String(), row.finds)
	}
	ns.nft(t, "flush chain inet fw input")
	for _, row := range []struct {
		rules Rules
		finds string
	}{
		{
			Rules{Mode: TPROXY, Port: 7, Interfaces: []string{"lan0"}, Mark: 0x40},
			"captured connections from lan0, such as over IPv4 to port 443: " +
				"nft insert rule inet fw input meta mark and 0x00000040 == 0x00000040 accept",
		},
		{
			Rules{Mode: TPROXY, Port: 7, Interfaces: anywhere, IPv6: true, Ports: []PortRange{{8000, 8080}}},
			"captured connections, such as over IPv6 to port 8000: ",
		},
		{
			Rules{Mode: Redirect, Port: 7, Interfaces: []string{"lan0"}, Ports: []PortRange{{53, 54}}},
			"nft insert rule inet fw input ct status dnat tcp dport 7 accept",
		},
	} {
		ns.do(t, func() error { return row.rules.Apply(t.Context()) })
		var all []string
		found, inForce := look()
		assert.True(t, inForce)
		for _, o := range found {
			all = append(all, o.String())
		}
		assert.Contains(t, strings.Join(all, "\n"), row.finds)
	}
	ns.do(t, func() error { return Remove(t.Context()) })
	ns.do(t, func() error {
		tunnel := aTunnel()
		tunnel.Interface = "lan0"
		return tunnel.Apply(t.Context())
	})
	found, inForce := look()
	assert.True(t, inForce)
	require.NotEmpty(t, found)
	ns.do(t, func() error {
		own, err := Tunnel{Interface: "lan0", Inside: aTunnel().Inside}.Obstacles()
		assert.Equal(t, own, found)
		return err
	})
	assert.Equal(t, "inet fw input", found[0].Chain, "and not the tunnel's own chain")
	assert.Contains(t, found[0].Drops, "captured connections from lan0")
}

func TestWithoutTheCapabilityObstaclesAreUnknown(t *testing.T) {
	ns := newNamespace(t)
	err := ns.in(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		if err := unix.Capset(&header, &(&[2]unix.CapUserData{})[0]); err != nil {
			return err
		}
		_, _, err := Obstacles()
		return err
	})
	assert.ErrorIs(t, err, unix.EPERM)
}
