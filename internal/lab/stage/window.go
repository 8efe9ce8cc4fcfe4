package stage

import (
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Window says how the kernel under the proxy obeyed the proxy's window, as seen
// from outside through sock_diag.
type Window struct {
	// How often the windows were looked at.
	Samples int `json:"samples"`
	// Share of samples in which the kernel's own window was at least ours; elsewhere the kernel decided.
	KernelCovers float64 `json:"kernel_cwnd_covers_share"`
	// The kernel's own window: `median`, `min`, `max`.
	KernelCwnd figures.Spread `json:"kernel_cwnd_packets"`
	// Our window.
	Cwnd figures.Spread `json:"cwnd_packets"`
	// Packets on the wire; lost and SACKed ones are left out.
	Pipe figures.Spread `json:"pipe_packets"`
	// The most by which the wire had more than our window, which a window that shrinks always shows; below 0: never.
	PipeExcess float64 `json:"pipe_excess_packets_max"`
}

// socket is one look at the connection towards the client, in segments.
type socket struct {
	cwnd, pipe float64
	mss        cc.Bytes
	sentFor    // since the connection began
}

// windowSample is one look at our window and at the socket below it.
type windowSample struct {
	ours   cc.Bytes
	kernel socket
}

// window summarises samples; nil when there are none.
func window(samples []windowSample) *Window {
	var cwnd, kernel, pipe []float64
	covers, excess := 0, math.Inf(-1)
	for _, s := range samples {
		if s.kernel.mss <= 0 || s.ours <= 0 {
			continue
		}
		ours := float64(s.ours) / float64(s.kernel.mss)
		cwnd = append(cwnd, ours)
		kernel = append(kernel, s.kernel.cwnd)
		pipe = append(pipe, s.kernel.pipe)
		if s.kernel.cwnd >= math.Floor(ours) { // a fraction of a segment is never sent
			covers++
		}
		excess = max(excess, s.kernel.pipe-ours)
	}
	if len(cwnd) == 0 {
		return nil
	}
	return &Window{
		Samples:      len(cwnd),
		KernelCovers: float64(covers) / float64(len(cwnd)),
		KernelCwnd:   figures.SpreadOf(kernel), Cwnd: figures.SpreadOf(cwnd), Pipe: figures.SpreadOf(pipe),
		PipeExcess: excess,
	}
}

// sockets are the node's connections, by the other end or by their own, as sock_diag shows them.
func sockets(node *netlab.Node, own bool) (all map[netip.AddrPort]socket, err error) {
	all = map[netip.AddrPort]socket{}
	err = node.Do(func() error {
		// A listener for both families makes sockets of the second kind only.
		for _, family := range []uint8{unix.AF_INET6, unix.AF_INET} {
			found, err := netlink.SocketDiagTCPInfo(family)
			if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
				return fmt.Errorf("read sockets of %s: %w", node.Name(), err)
			}
			for _, r := range found {
				ip, port := r.InetDiagMsg.ID.Destination, r.InetDiagMsg.ID.DestinationPort
				if own {
					ip, port = r.InetDiagMsg.ID.Source, r.InetDiagMsg.ID.SourcePort
				}
				if addr, ok := netip.AddrFromSlice(ip); ok && r.TCPInfo != nil {
					i := r.TCPInfo
					all[netip.AddrPortFrom(addr.Unmap(), port)] = socket{
						cwnd: float64(i.Snd_cwnd), mss: cc.Bytes(i.Snd_mss),
						// What the kernel itself counts as being on the wire, RFC 6675's pipe.
						pipe:    float64(i.Unacked) - float64(i.Sacked) - float64(i.Lost) + float64(i.Retrans),
						sentFor: sentFor{cc.Bytes(i.Bytes_sent), cc.Bytes(i.Bytes_retrans)},
					}
				}
			}
		}
		return nil
	})
	return all, err
}
