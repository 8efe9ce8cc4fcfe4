package doctor

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// leastBuffer is what the largest buffer of a connection should be at least:
// Linux's own default.
const leastBuffer cc.Bytes = 4 << 20

// fewConnections is where the room for connections is worth a word.
const fewConnections = 1000

func (f facts) judgeDescriptors() Check {
	c := okCheck("descriptors", "%d: room for %d connections and %d pipes", f.descriptors.Total,
		f.descriptors.Connections, f.descriptors.Pipes)
	if f.descriptors.Connections < fewConnections {
		c.State = Warn
		c.Fix = "ulimit -Hn 1048576 (as root), or LimitNOFILE=1048576 in the systemd unit"
	}
	return c
}

// judgedSetting is a setting of the kernel and what to say of its value.
type judgedSetting struct {
	name  string
	judge func(name, value string) Check
}

// Settings that may keep captured connections from working at all.
const (
	SYNCookies = "net.ipv4.tcp_syncookies"
	localPorts = "net.ipv4.ip_local_port_range"
	reusePorts = "net.ipv4.tcp_tw_reuse"
)

// Settings judges those settings alone, where the calling thread is.
func Settings() []Check {
	f := facts{sysctls: map[string]string{}}
	f.readSettings(SYNCookies, localPorts, reusePorts)
	return f.judgeSettings()
}

// judgeSettings is about what the kernel's TCP is told, where it is told.
func (f facts) judgeSettings() []Check {
	var checks []Check
	for _, s := range []judgedSetting{
		{"net.ipv4.tcp_wmem", judgeBuffer("in flight towards a client or server")},
		{"net.ipv4.tcp_rmem", judgeBuffer("in flight towards this machine")},
		{"net.ipv4.tcp_sack", judgeSwitch("losses are found one in a round trip, and the datapath sees less of them")},
		{"net.ipv4.tcp_timestamps", judgeSwitch("round trips are measured more rarely, and retransmissions blur them")},
		{"net.ipv4.tcp_window_scaling", judgeSwitch("at most 64 KiB are in flight, 5 Mbit/s at 100 ms")},
		{"net.ipv4.tcp_mtu_probing", judgeMTUProbing},
		{SYNCookies, judgeSYNCookies},
		{localPorts, f.judgeLocalPorts},
		{"net.ipv4.tcp_slow_start_after_idle", informOnly("the kernel's window starts over after a pause (cubic and reno "+
			"only)", "the kernel's window stays as it was over a pause")},
		{"net.ipv4.ip_forward", informOnly("IPv4 is routed, as capturing other machines' connections needs",
			"IPv4 is not routed; a router that captures needs 1")},
		{"net.ipv6.conf.all.forwarding", informOnly("IPv6 is routed, as capturing other machines' connections needs",
			"IPv6 is not routed; a router that captures needs 1")},
	} {
		if value, ok := f.sysctls[s.name]; ok {
			checks = append(checks, s.judge(s.name, value))
		}
	}
	return checks
}

// judgeBuffer is about the three sizes of a buffer that tunes itself.
func judgeBuffer(what string) func(name, value string) Check {
	return func(name, value string) Check {
		sizes := strings.Fields(value)
		if len(sizes) != 3 {
			return okCheck(name, "%s", value)
		}
		n, err := strconv.ParseInt(sizes[2], 10, 64)
		most := cc.Bytes(n)
		if err != nil || most >= leastBuffer {
			return okCheck(name, "at most %s bytes of a connection", sizes[2])
		}
		return Check{
			Name: name, State: Warn,
			Found: fmt.Sprintf("at most %s bytes of a connection %s: %.3g Mbit/s at a round trip of 100 ms",
				sizes[2], what, float64(cc.RateOf(most, 100*time.Millisecond))/1e6),
			Fix: fmt.Sprintf("sysctl -w %s=\"%s %s %d\"", name, sizes[0], sizes[1], leastBuffer),
		}
	}
}

// judgeSwitch is about what should be on.
func judgeSwitch(off string) func(name, value string) Check {
	return func(name, value string) Check {
		if value != "0" {
			return okCheck(name, "on")
		}
		return Check{Name: name, State: Warn, Found: "off: " + off, Fix: "sysctl -w " + name + "=1"}
	}
}

// judgeMTUProbing is about paths that are narrower further on (RFC 4821). With 1 the kernel probes once a
// connection loses packets without end, with 2 from the start. No socket can set it for itself.
func judgeMTUProbing(name, value string) Check {
	if value != "0" {
		return okCheck(name, "%s: a path that swallows full packets without a word of ICMP is found out", value)
	}
	return Check{
		Name: name, State: Warn,
		Found: "0: a path that swallows full packets without a word of ICMP (a black hole) stops connections for good",
		Fix:   "sysctl -w " + name + "=1",
	}
}

// judgeSYNCookies is about handshakes that leave no socket behind, by which TPROXY knows the rest of a connection.
func judgeSYNCookies(name, value string) Check {
	switch value {
	case "0":
		return okCheck(name, "0: in a flood of SYNs clients try again")
	case "2":
		return Check{
			Name: name, State: Warn, Found: "2, always: every connection captured by tproxy is reset",
			Fix: "sysctl -w " + name + "=1",
		}
	}
	return okCheck(name, "%s: in a flood of SYNs, connections captured by tproxy are reset "+
		"(with 0 clients try again)", value)
}

// What a port rests for behind a connection, and how few of them are worth a word.
const (
	portRest     = time.Minute
	fewPorts     = 16384
	fewOpenPorts = 1024
)

// judgeLocalPorts is about connections to one server: each takes a local port, which rests behind it.
func (f facts) judgeLocalPorts(name, value string) Check {
	var first, last int
	if n, _ := fmt.Sscan(value, &first, &last); n != 2 {
		return okCheck(name, "%s", value)
	}
	ports, reuse := last-first+1, f.sysctls[reusePorts]
	c := okCheck(name, "%d ports: so many connections to one server", ports)
	if reuse != "1" {
		c.Found = fmt.Sprintf("%d ports: %d new connections in a second to one server, as %s is %q", ports,
			ports/int(portRest.Seconds()), reusePorts, reuse)
	}
	if ports < fewOpenPorts || ports < fewPorts && reuse != "1" {
		c.State = Warn
		c.Fix = fmt.Sprintf("sysctl -w %s=\"32768 60999\" %s=1", name, reusePorts)
	}
	return c
}

// informOnly is about what is right for some and wrong for others.
func informOnly(on, off string) func(name, value string) Check {
	return func(name, value string) Check {
		if value == "0" {
			return okCheck(name, "0: %s", off)
		}
		return okCheck(name, "%s: %s", value, on)
	}
}

// judgeSources names the interfaces that the key hints could have, with what
// they tell of themselves.
func (f facts) judgeSources() Check {
	if f.sourceless != nil {
		return Check{
			Name: "sources", State: Warn, Found: f.sourceless.Error(),
			Fix: "let the process open netlink sockets (systemd: RestrictAddressFamilies=AF_NETLINK); without them " +
				"the key " +
				"hints has no effect",
		}
	}
	words := make([]string, len(f.sources))
	for i, s := range f.sources {
		what := []string{s.Queue}
		if s.Radio {
			what = append(what, "radio")
		}
		switch {
		case s.Rate > 0:
			what = append(what, s.Rate.String())
		case !s.Radio:
			what = append(what, "does not tell its rate: set capacity")
		}
		words[i] = fmt.Sprintf("%s (%s)", s.Name, strings.Join(what, ", "))
	}
	if len(words) == 0 {
		words = []string{"no interface is up but loopback"}
	}
	return okCheck("sources", "%s", strings.Join(words, "; "))
}
