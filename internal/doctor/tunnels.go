package doctor

import (
	"errors"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
)

// wireGuardTrial names the trial of the kernel's WireGuard.
const wireGuardTrial = "kernel_wireguard"

// unprivilegedPorts is the setting from which port on nobody needs a capability.
const unprivilegedPorts = "net.ipv4.ip_unprivileged_port_start"

// pingGroups is the setting of the groups that may open ping sockets.
const pingGroups = "net.ipv4.ping_group_range"

func (f facts) judgeTunnels() []Check {
	return []Check{f.judgePorts(), f.judgePing(), f.judgeWireGuard()}
}

// judgePing is about echo requests that come out of a tunnel.
func (f facts) judgePing() Check {
	switch {
	case f.ping == nil:
		return okCheck("ping", "pings through a tunnel are sent by ping sockets, which this process may open")
	case f.capabilities.Has(caps.NetRaw):
		return okCheck("ping", "pings through a tunnel are sent by raw sockets, opened at the start with CAP_NET_RAW")
	}
	return Check{
		Name: "ping", State: Missing,
		Found: fmt.Sprintf("pings through a tunnel stay unanswered: %s is %q and leaves out this process's groups, "+
			"and "+
			"CAP_NET_RAW is not held", pingGroups, f.sysctls[pingGroups]),
		Fix: fmt.Sprintf("sysctl -w %s=\"0 2147483647\"; or %s", pingGroups, f.grantHint(caps.NetRaw)),
	}
}

// judgePorts is about where listeners may be, those of WireGuard among them.
func (f facts) judgePorts() Check {
	first, err := strconv.Atoi(f.sysctls[unprivilegedPorts])
	if err != nil {
		first = 1024
	}
	if f.capabilities.Has(caps.NetBindService) || first <= 1 {
		return okCheck("ports", "listeners may be on every port")
	}
	return okCheck("ports", "listeners may be on ports from %d on, WireGuard's 51820 among them; below, "+
		"CAP_NET_BIND_SERVICE is needed", first)
}

// judgeWireGuard is about the kernel's own: listeners of mode wireguard do without.
func (f facts) judgeWireGuard() Check {
	c := Check{Name: wireGuardTrial}
	t, made := f.trials[wireGuardTrial]
	err := t.asError()
	switch {
	case !made:
		return f.untriedCheck(c)
	case err == nil:
		return okCheck(c.Name, "makes devices: tunnels may end in the kernel, by wireguard.datapath: kernel")
	}
	c.State, c.Found = Warn, err.Error()+"; listeners of mode wireguard do without, and take more CPU"
	switch {
	case errors.Is(err, unix.EPERM):
		c.Fix = f.grantHint(caps.NetAdmin)
	default:
		c.Fix = "modprobe wireguard; where there is no such module, boot a kernel with CONFIG_WIREGUARD (5.6 or later)"
	}
	return c
}
