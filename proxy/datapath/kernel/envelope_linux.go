package kernel

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Envelopes lists the congestion controls this kernel has loaded, and of those
// the ones a process without CAP_NET_ADMIN may set.
func Envelopes() (available, allowed []string, err error) {
	if available, err = listControls("available"); err != nil {
		return nil, nil, err
	}
	allowed, err = listControls("allowed")
	return available, allowed, err
}

func listControls(which string) ([]string, error) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_" + which + "_congestion_control")
	if err != nil {
		return nil, fmt.Errorf("kernel: list envelopes: %w", err)
	}
	return strings.Fields(string(text)), nil
}

// settleEnvelope finds the control to set on each socket by setting it on one
// that goes nowhere, which also loads its module where that is allowed. Empty:
// sockets keep the system's default, and why says what to do about it.
func chooseEnvelope(fd int, want string) (envelope, why string) {
	set := func(name string) error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) }
	if want != "" {
		if err := set(want); err != nil {
			return "", envelopeRefused(want, err)
		}
		return want, ""
	}
	err := set("bbr")
	if err == nil {
		return "bbr", ""
	}
	why = envelopeRefused("bbr", err)
	if err := set("cubic"); err != nil {
		return "", why + "; " + envelopeRefused("cubic", err)
	}
	return "cubic", why
}

// envelopeRefused says in words why the kernel did not take an envelope.
func envelopeRefused(name string, err error) string {
	switch {
	case errors.Is(err, unix.ENOENT):
		return fmt.Sprintf("envelope %q: this kernel has not loaded it; run: modprobe tcp_%s", name, name)
	case errors.Is(err, unix.EPERM):
		allowed, _ := listControls("allowed")
		if !slices.Contains(allowed, name) {
			allowed = append(allowed, name)
		}
		return fmt.Sprintf("envelope %q: not permitted; run: sysctl -w net.ipv4.tcp_allowed_congestion_control=%q, "+
			"or grant CAP_NET_ADMIN",
			name, strings.Join(allowed, " "))
	default:
		return fmt.Sprintf("envelope %q: %v", name, err)
	}
}

// envelopeOf returns the congestion control in use on a socket; empty: unknown.
func envelopeOf(fd int) string {
	name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	if err != nil {
		return ""
	}
	return strings.TrimRight(name, "\x00")
}
