package kernel

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// TCP states in tcpi_state that matter here (include/net/tcp_states.h).
const (
	tcpFinWait1 = 4
	tcpFinWait2 = 5
	tcpClose    = 7
	tcpLastAck  = 9
	tcpClosing  = 11
)

// tcpCALoss is tcpi_ca_state while the kernel recovers from a timeout.
const tcpCALoss = 4

// noMinRTT is tcpi_min_rtt before the first sample.
const noMinRTT = 1<<32 - 1

// Lengths of TCP_INFO up to the end of a field. Kernels append fields, so a shorter answer lacks it.
const (
	uptoSndWnd   = unsafe.Offsetof(unix.TCPInfo{}.Snd_wnd) + 4   // Linux 5.4; required
	uptoTotalRTO = unsafe.Offsetof(unix.TCPInfo{}.Total_rto) + 2 // Linux 6.7
	wholeTCPInfo = unsafe.Sizeof(unix.TCPInfo{})
)

// tcpi_delivery_rate_app_limited is the first bit of a bit field that
// unix.TCPInfo leaves unnamed behind Options and the window scales.
const appLimitedAt = unsafe.Offsetof(unix.TCPInfo{}.Options) + 2

// appLimitedBit is that bit. The processors that are supported are little-endian.
const appLimitedBit = 1

// account turns successive TCP_INFO readings of one socket into reports.
//
//	offset  0 ........ una ............................ nxt ......... end
//	        acked      on the wire: acked out of order, not sent
//	                   lost, or underway
//
// The kernel counts acknowledged bytes exactly (bytes_acked) and unsent ones
// too (notsent_bytes). Between them lie bytes_sent − bytes_retrans − una bytes,
// which is exact but for transmissions that a local queue refused: those are in
// bytes_sent and will be again. Such drift is taken out as soon as the packets
// in flight could not hold that many bytes.
type infoReporter struct {
	reportCounter
	info      unix.TCPInfo // the last reading
	infoSize  uintptr      // length of TCP_INFO on this kernel
	synOffset int64        // bytes_acked counts the SYN of a dialled connection

	// A FIN may be queued. tcpi_state alone does not say: the kernel reads it
	// before it takes the socket's lock, so it can lag behind the numbers.
	finQueued bool

	recounted int64
	maxMSS    int64 // no packet in flight is larger

	// TCP_INFO's counters when observation began.
	retransBase uint64

	ce          uint32
	rto         uint16
	caState     uint8
	backoff     uint8
	rwndLimited uint64
}

// findSYNOffset finds out whether bytes_acked counts the SYN: by the counters where nothing is in
// flight, and otherwise by whether the connection was dialled.
func (a *infoReporter) findSYNOffset(i *unix.TCPInfo, dialled bool) {
	if dialled {
		a.synOffset = 1
	}
	if i.Unacked == 0 {
		a.synOffset = min(max(0, int64(i.Bytes_acked)-int64(i.Bytes_sent-i.Bytes_retrans)), 1)
	}
}

// startCounting sets all counters to zero: what was written before is not reported,
// though while it is in flight it is part of the gauges.
func (a *infoReporter) startCounting(i *unix.TCPInfo) {
	a.startAt(a.positionOf(i))
	a.retransBase = i.Bytes_retrans
	a.ce, a.rto = i.Delivered_ce, i.Total_rto
	a.caState, a.backoff = i.Ca_state, i.Backoff
	a.rwndLimited = i.Rwnd_limited
}

func (a *infoReporter) positionOf(i *unix.TCPInfo) position {
	p := position{
		una: int64(i.Bytes_acked) - a.synOffset, unsent: int64(i.Notsent_bytes),
		packets: int64(i.Unacked), sacked: int64(i.Sacked), lost: int64(i.Lost), retrans: int64(i.Retrans),
	}
	if i.State == tcpClose {
		p.unsent = 0 // thrown away, though the kernel goes on counting it
	}
	fin := a.finQueued || hasQueuedFIN(i.State)
	if fin && p.unsent > 0 {
		p.unsent-- // the FIN takes a sequence number, and goes last
	}
	a.maxMSS = max(a.maxMSS, int64(i.Snd_mss))
	most := p.packets * a.maxMSS
	p.nxt = int64(i.Bytes_sent-i.Bytes_retrans) - a.recounted
	switch beyond := p.nxt - p.una; {
	case beyond > most:
		a.recounted += beyond - most
		p.nxt = p.una + most
	case beyond < 0 && fin:
		p.una = p.nxt // the FIN has been acknowledged
	case beyond < 0:
		a.recounted += beyond
		p.nxt = p.una
	}
	p.end = p.nxt + p.unsent
	return p
}

// finQueued says whether the FIN has its place in the send queue.
func hasQueuedFIN(state uint8) bool {
	switch state {
	case tcpFinWait1, tcpFinWait2, tcpClosing, tcpLastAck, tcpClose:
		return true
	}
	return false
}

// makeReport returns the report of one reading.
func (a *infoReporter) makeReport(i *unix.TCPInfo, at cc.Time) flow.Report {
	p := a.positionOf(i)
	r := a.updateReport(p, cc.Bytes(i.Snd_mss), at)
	r.Newest = 0
	if p.sacked > 0 && i.Ca_state != tcpCALoss {
		// Holes below the highest selectively acknowledged byte are mostly
		// marked lost, so both together reach up to about that byte. After a
		// timeout everything is marked, and it would say nothing.
		r.Newest = a.noteArrived(min(p.una+p.bytesOf(p.sacked+p.lost), p.nxt))
	}
	r.Lost = max(r.Lost, cc.Bytes(i.Bytes_retrans-a.retransBase))
	r.Marked = min(r.Marked+cc.Bytes(i.Delivered_ce-a.ce)*r.MSS, r.Acked)
	r.Timeouts += a.newTimeouts(i)
	r.RwndFull = a.rwndFull(i, p)

	a.ce, a.rto = i.Delivered_ce, i.Total_rto
	a.caState, a.backoff = i.Ca_state, i.Backoff
	a.rwndLimited = i.Rwnd_limited
	return *r
}

// newTimeouts returns how many retransmission timeouts there were since the last reading.
func (a *infoReporter) newTimeouts(i *unix.TCPInfo) int {
	if a.infoSize >= uptoTotalRTO {
		return int(i.Total_rto - a.rto)
	}
	if i.Ca_state == tcpCALoss && (a.caState != tcpCALoss || i.Backoff > a.backoff) {
		return 1
	}
	return 0
}

// rwndFull says whether the peer's receive window holds the sender back, which has bytes unsent then.
func (a *infoReporter) rwndFull(i *unix.TCPInfo, p position) bool {
	if p.unsent == 0 {
		return false
	}
	if i.Rwnd_limited > a.rwndLimited {
		return true
	}
	// The window counts from una, so what the peer has out of order fills it too.
	return p.outstandingBytes()+int64(i.Snd_mss) > int64(i.Snd_wnd)
}

// status is what a leg remembers of a TCP_INFO.
type tcpStatus struct {
	closed          bool
	unacked, unsent uint32 // packets, bytes
	cwnd            cc.Bytes
	retransmitted   cc.Bytes
	srtt, minRTT    time.Duration // minRTT 0: there is none yet
	deliveryRate    cc.Rate       // 0: it would understate the path
}

func statusOf(i *unix.TCPInfo) tcpStatus {
	s := tcpStatus{
		closed: i.State == tcpClose, unacked: i.Unacked, unsent: i.Notsent_bytes,
		cwnd: cc.Bytes(i.Snd_cwnd) * cc.Bytes(i.Snd_mss), retransmitted: cc.Bytes(i.Bytes_retrans),
		srtt: microseconds(i.Rtt),
	}
	if i.Min_rtt != noMinRTT {
		s.minRTT = microseconds(i.Min_rtt)
	}
	if !appLimited(i) {
		s.deliveryRate = cc.Rate(i.Delivery_rate) * 8
	}
	return s
}

// isDrained says whether nothing more will happen to what was written.
func (s *tcpStatus) isDrained() bool { return s.unacked == 0 && s.unsent == 0 || s.closed }

// appLimited says whether tcpi_delivery_rate understates the path.
func appLimited(i *unix.TCPInfo) bool {
	bits := *(*uint8)(unsafe.Add(unsafe.Pointer(i), appLimitedAt))
	return bits&appLimitedBit != 0
}

func microseconds(us uint32) time.Duration { return time.Duration(us) * time.Microsecond }
