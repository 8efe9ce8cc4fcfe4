package bench

import (
	"math"

	"github.com/penstock-net/penstock/cc"
)

// Window says how the kernel under the proxy obeyed the proxy's window, as seen
// from outside through sock_diag.
type Window struct {
	Samples int `json:"samples"`
	// KernelCovers is the share of samples in which the kernel's own window was
	// at least ours: where it is not, the kernel and not the algorithm decided.
	KernelCovers float64 `json:"kernel_cwnd_covers_share"`
	KernelCwnd   Spread  `json:"kernel_cwnd_packets"`
	Cwnd         Spread  `json:"cwnd_packets"` // ours
	Pipe         Spread  `json:"pipe_packets"` // on the wire, lost and SACKed ones left out
	// PipeExcess is the most by which the pipe passed our window, in segments;
	// negative when it never reached it. A window that shrinks is passed by what
	// is out already, so only a static one tells about enforcement.
	PipeExcess float64 `json:"pipe_excess_packets_max"`
}

// socket is one look at the connection towards the client, in segments.
type socket struct {
	cwnd, pipe float64
	mss        cc.Bytes

	sent, resent cc.Bytes // since the connection began
}

// windowSample is one look at both sides of the seam.
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
		KernelCwnd:   spread(kernel), Cwnd: spread(cwnd), Pipe: spread(pipe),
		PipeExcess: excess,
	}
}
