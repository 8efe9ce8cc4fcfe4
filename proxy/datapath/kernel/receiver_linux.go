package kernel

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
)

// Why Arrivals knows nothing of a peer's queue.
var (
	errOldTCPInfo   = errors.New("kernel: TCP_INFO tells nothing of the receive window before Linux 6.2")
	errNoTimestamps = errors.New("kernel: the peer sends no TCP timestamps, so that its round trips are not known")
)

// receiveWindow bounds what a leg takes in from its peer: the receive buffer, and the window that the socket
// advertises. Two callers bound the window: LimitReceive for the memory that it costs, and Advertise for the queue in
// front of us. The smaller bound is in force.
//
// Only the goroutine that reads from the leg uses it.
type receiveWindow struct {
	receiveLimit   cc.Bytes          // LimitReceive's bound; 0: never called
	receiveClamp   cc.Bytes          // of the window, by LimitReceive; 0: none
	halvings       int32             // of the window, by memoryPressure, when LimitReceive ran last
	pressureChecks uint32            // memoryPressure.checks then
	advertised     *advertisedWindow // nil: neither Arrivals nor Advertise was called
}

// advertisedWindow is the bound that Advertise sets, and what Arrivals has seen.
type advertisedWindow struct {
	window     cc.Bytes // 0: none
	savedClamp int      // TCP_WINDOW_CLAMP before the first Advertise
	info       unix.TCPInfo
	asked      bool   // Arrivals was called
	holes      int    // times that oooPackets grew
	oooPackets uint32 // tcpi_rcv_ooopack
}

// ensureAdvertised returns w.advertised, and makes it on the first call.
func (w *receiveWindow) ensureAdvertised() *advertisedWindow {
	if w.advertised == nil {
		w.advertised = &advertisedWindow{}
	}
	return w.advertised
}

// underAdvertised returns clamp, or the window that Advertise has set if that is smaller.
func (w *receiveWindow) underAdvertised(clamp cc.Bytes) cc.Bytes {
	if a := w.advertised; a != nil && a.window > 0 {
		return min(clamp, a.window)
	}
	return clamp
}

// limitReceive bounds the receive buffer to n bytes, overhead included. While the kernel's TCP is short of memory the
// window is smaller than n, and the buffer shrinks with what is read from it. limited: there is a bound below the
// kernel's own.
func (w *receiveWindow) limitReceive(
	raw *eventloop.Socket, n cc.Bytes, bounds *receiveBounds, pressure *memoryPressure,
) (limited bool) {
	if bounds.largest == 0 {
		return false
	}
	w.receiveLimit = n
	wasPressed := w.halvings > 0
	w.halvings, w.pressureChecks = pressure.checkMemory()
	err := raw.Visit(func(fd int) error {
		buffer, clamp, isPressed := min(n, bounds.largest), min(n, math.MaxInt32), w.halvings > 0
		if isPressed {
			clamp = max(buffer/2>>w.halvings, minReceive)
			buffer = min(buffer, max(2*clamp, bufferInUse(fd))) // half is overhead
		}
		if n < bounds.largest || isPressed {
			// Under pressure the largest buffer that needs no privilege will do.
			isSet := bounds.setBuffer(fd, buffer) || isPressed && setBuffer(fd, buffer)
			if isSet && setClamp(fd, w.underAdvertised(clamp)) == nil {
				limited, w.receiveClamp = true, clamp
				return nil
			}
		}
		return w.releaseBuffer(fd, min(n, bounds.largest)/2, bounds.largest/2, wasPressed)
	})
	return limited && err == nil
}

// releaseBuffer lets the kernel size the buffer again, and enlarges it for a window. After pressure that is the largest
// one, because the buffer may have been as large before.
func (w *receiveWindow) releaseBuffer(fd int, window, largest cc.Bytes, wasPressed bool) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0); err != nil || w.receiveClamp == 0 {
		return err
	}
	window = max(window, w.receiveClamp)
	if wasPressed {
		window = largest
	}
	if a := w.advertised; a != nil && a.window > 0 {
		a.savedClamp = max(a.savedClamp, int(window))
	}
	w.receiveClamp = 0
	return errors.Join(enlargeBuffer(fd, window), setClamp(fd, w.underAdvertised(window)))
}

// isOutdated reports whether limitReceive has to be called again, since the pressure on TCP's memory has changed.
func (w *receiveWindow) isOutdated(pressure *memoryPressure) bool {
	if w.receiveLimit == 0 {
		return false
	}
	halvings, checks := pressure.checkMemory()
	return halvings != w.halvings || halvings > 0 && checks-w.pressureChecks >= shrinkAfter
}

// makeArrivals returns the arrivals that advertised.info shows, a reading of TCP_INFO with a length of size.
//
// The kernel's estimate of a receiver's round trips falls at once to a shorter one, and rises by an eighth of the
// difference. Its resolution is that of timestamps, a millisecond. Before the first it is the handshake's.
func (w *receiveWindow) makeArrivals(size uintptr) (flow.Arrivals, error) {
	a := w.advertised
	i := &a.info
	switch {
	case size < uptoRcvWnd:
		return flow.Arrivals{}, errOldTCPInfo
	case i.Options&timestamped == 0:
		return flow.Arrivals{}, errNoTimestamps
	}
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

// boundAdvertised bounds the window that the socket advertises by TCP_WINDOW_CLAMP; 0 ends the bound. The kernel raises
// the clamp with a buffer that it enlarges by itself, so it has to be set again. It rounds a window up to a multiple of
// what its scale allows, and advertises at least half of its least buffer.
func (w *receiveWindow) boundAdvertised(raw *eventloop.Socket, window cc.Bytes) error {
	a := w.ensureAdvertised()
	clamp := int(min(max(window, 1), math.MaxInt32))
	if w.receiveClamp > 0 {
		clamp = min(clamp, int(w.receiveClamp))
	}
	switch {
	case window == 0 && a.window == 0:
		return nil
	case window == 0 && w.receiveClamp > 0:
		clamp = int(w.receiveClamp)
	case window == 0:
		clamp = max(a.savedClamp, int(a.info.Rcv_wnd))
	case a.window > 0 && isClose(window, a.window) && cc.Bytes(a.info.Rcv_ssthresh) <= a.window:
		return nil
	}
	err := raw.Visit(func(fd int) error {
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

// isClose reports whether a window differs from b by less than a sixteenth. That is not worth a system call.
func isClose(a, b cc.Bytes) bool { return max(a, b)-min(a, b) < b/16 }

// bufferInUse returns the size of a receive buffer, in bytes, that has room for what waits unread and what the peer may
// have in flight. It is at most the present size. A larger buffer fills up even behind a small window, because each
// read opens the window again while there is room. Before Linux 6.2 the window is not known, and the result is the
// present size.
func bufferInUse(fd int) cc.Bytes {
	has, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		return math.MaxInt64
	}
	var info unix.TCPInfo
	vars, err := memoryInfo(fd)
	size, errInfo := tcpInfo(fd, &info)
	if err != nil || errInfo != nil || size < uptoRcvWnd {
		return cc.Bytes(has)
	}
	return min(cc.Bytes(has), cc.Bytes(vars[receiveUsed])+2*cc.Bytes(info.Rcv_wnd))
}

// reader reads from a socket, and takes memory from room only once bytes are there.
type reader struct {
	mu   sync.Mutex // one call at a time
	room datapath.Room
	n    int
	err  error
}

// tryRead runs inside RawConn.Read.
func (r *reader) tryRead(raw *eventloop.Socket, fd uintptr) bool {
	buf := r.room.Take()
	r.n, r.err = eventloop.Receive(int(fd), buf, 0)
	for tries := 0; raw.Urgent() && errors.Is(r.err, unix.EAGAIN) && hasArrived(int(fd)) &&
		tries < maxFalseEmpty; tries++ {
		r.n, r.err = eventloop.Receive(int(fd), buf, 0)
	}
	if errors.Is(r.err, unix.EAGAIN) {
		r.room.GiveBack()
		return false
	}
	if r.n < len(buf) && raw.Driven() && !raw.Urgent() { // a read ends in front of an urgent byte, too
		raw.Emptied()
	}
	return true
}
