package kernel

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Advertiser = (*Conn)(nil)

// uptoRcvWnd is how long TCP_INFO must be for what a receiver wants to know (Linux 6.2).
const uptoRcvWnd = unsafe.Offsetof(unix.TCPInfo{}.Rcv_wnd) + 4

// timestamped is the bit of tcpi_options for a connection with timestamps (TCPI_OPT_TIMESTAMPS).
const timestamped = 1

// Why a peer's queue cannot be seen.
var (
	errOldTCPInfo   = errors.New("kernel: TCP_INFO tells nothing of the receive window before Linux 6.2")
	errNoTimestamps = errors.New("kernel: the peer sends no TCP timestamps, so that its round trips are not known")
)

// advertising is what bounds the window that a socket advertises.
type advertisedWindow struct {
	window     cc.Bytes // 0: as the kernel likes
	savedClamp int      // the clamp that the socket had before
	info       unix.TCPInfo
	asked      bool // by Arrivals
	holes      int
	oooPackets uint32
}

// advertisingState is c.advertising, made by the first who asks.
func (c *Conn) advertisingState() *advertisedWindow {
	if c.advertised == nil {
		c.advertised = &advertisedWindow{}
	}
	return c.advertised
}

// Arrivals implements datapath.Advertiser. The kernel's estimate of a receiver's round
// trips falls at once to a shorter one, rises by an eighth of the difference, and has the
// resolution of timestamps, a millisecond. Before the first it is that of the handshake.
func (c *Conn) Arrivals() (flow.Arrivals, error) {
	a := c.advertisingState()
	size, err := c.readInfo(&a.info)
	switch i := &a.info; {
	case err != nil:
		return flow.Arrivals{}, err
	case size < uptoRcvWnd:
		return flow.Arrivals{}, errOldTCPInfo
	case i.Options&timestamped == 0:
		return flow.Arrivals{}, errNoTimestamps
	default:
		first := !a.asked
		a.asked = true
		if i.Rcv_ooopack != a.oooPackets {
			a.oooPackets = i.Rcv_ooopack
			a.holes++
		}
		rtt := microseconds(i.Rcv_rtt)
		if first && i.Min_rtt != noMinRTT && i.Min_rtt > 0 {
			rtt = microseconds(i.Min_rtt)
		}
		return flow.Arrivals{
			Received: cc.Bytes(i.Bytes_received), RTT: rtt, Window: cc.Bytes(i.Rcv_wnd), Holes: a.holes,
			MSS: cc.Bytes(i.Rcv_mss),
		}, nil
	}
}

// Advertise implements datapath.Advertiser by TCP_WINDOW_CLAMP, which the kernel raises
// with a buffer that it enlarges by itself; so it is set anew. The kernel rounds a window
// up to a multiple of what its scale allows, and has none below half of its least buffer.
func (c *Conn) Advertise(window cc.Bytes) error {
	a := c.advertisingState()
	clamp := int(min(max(window, 1), math.MaxInt32))
	if c.receiveClamp > 0 {
		clamp = min(clamp, int(c.receiveClamp))
	}
	switch {
	case window == 0 && a.window == 0:
		return nil
	case window == 0 && c.receiveClamp > 0:
		clamp = int(c.receiveClamp)
	case window == 0:
		clamp = max(a.savedClamp, int(a.info.Rcv_wnd))
	case a.window > 0 && closeTo(window, a.window) && cc.Bytes(a.info.Rcv_ssthresh) <= a.window:
		return nil
	}
	err := c.raw.Visit(func(fd int) error {
		if a.window == 0 {
			before, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP)
			if err != nil {
				return err
			}
			a.savedClamp = before
		}
		return setClamp(fd, cc.Bytes(clamp))
	})
	if err != nil {
		return fmt.Errorf("kernel: set TCP_WINDOW_CLAMP to %d: %w", clamp, err)
	}
	a.window = window
	return nil
}

// closeTo spares a system call for a window that differs by less than a sixteenth.
func closeTo(a, b cc.Bytes) bool { return max(a, b)-min(a, b) < b/16 }
