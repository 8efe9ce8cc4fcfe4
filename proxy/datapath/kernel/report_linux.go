package kernel

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Values of tcpi_state (include/net/tcp_states.h).
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

// timestamped is the bit of tcpi_options for a connection with timestamps (TCPI_OPT_TIMESTAMPS).
const timestamped = 1

// Lengths of TCP_INFO up to the end of a field. Kernels append fields, so a shorter answer lacks it.
const (
	uptoSndWnd   = unsafe.Offsetof(unix.TCPInfo{}.Snd_wnd) + 4   // Linux 5.4; required
	uptoRcvWnd   = unsafe.Offsetof(unix.TCPInfo{}.Rcv_wnd) + 4   // Linux 6.2
	uptoTotalRTO = unsafe.Offsetof(unix.TCPInfo{}.Total_rto) + 2 // Linux 6.7
	wholeTCPInfo = unsafe.Sizeof(unix.TCPInfo{})
)

// missingFields names the useful fields that a TCP_INFO of size bytes lacks. err: it lacks a required one.
func missingFields(size uintptr, release string) (words []string, err error) {
	switch {
	case size < uptoSndWnd:
		return nil, fmt.Errorf("this kernel is Linux %s, and Linux 5.4 or later is needed (TCP_INFO has %d of %d "+
			"bytes)", release, size, uptoSndWnd)
	case size < uptoTotalRTO:
		return []string{"TCP_INFO has no total_rto before Linux 6.7: timeouts are inferred from the recovery " +
			"state"}, nil
	}
	return nil, nil
}

// tcpi_delivery_rate_app_limited is the first bit of a bit field that unix.TCPInfo leaves unnamed behind Options and
// the window scales.
const appLimitedAt = unsafe.Offsetof(unix.TCPInfo{}.Options) + 2

// appLimitedBit is that bit on little-endian processors; others are not supported.
const appLimitedBit = 1

// appLimited reports whether tcpi_delivery_rate understates the path.
func appLimited(i *unix.TCPInfo) bool {
	bits := *(*uint8)(unsafe.Add(unsafe.Pointer(i), appLimitedAt))
	return bits&appLimitedBit != 0
}

// microseconds converts a time of TCP_INFO, or of a cell.
func microseconds(us uint32) time.Duration { return time.Duration(us) * time.Microsecond }

// tcpStatus is the part of a TCP_INFO that a leg remembers.
type tcpStatus struct {
	closed        bool   // the connection is no more: by a reset, a timeout, or both FINs
	unacked       uint32 // packets
	unsent        uint32 // bytes
	retransmits   uint32 // segments
	cwnd          cc.Bytes
	retransmitted cc.Bytes
	delivered     cc.Bytes
	srtt          uint32  // microseconds
	minRTT        uint32  // microseconds; 0: none yet
	deliveryRate  cc.Rate // 0: unknown, since it would understate the path
}

// statusOf returns the status that a TCP_INFO describes.
func statusOf(i *unix.TCPInfo) tcpStatus {
	s := tcpStatus{
		closed: i.State == tcpClose, unacked: i.Unacked, unsent: i.Notsent_bytes,
		retransmits: i.Total_retrans,
		cwnd:        cc.Bytes(i.Snd_cwnd) * cc.Bytes(i.Snd_mss), retransmitted: cc.Bytes(i.Bytes_retrans),
		delivered: cc.Bytes(i.Bytes_acked), srtt: i.Rtt,
	}
	if i.Min_rtt != noMinRTT {
		s.minRTT = i.Min_rtt
	}
	if !appLimited(i) {
		s.deliveryRate = cc.Rate(i.Delivery_rate) * 8
	}
	return s
}

// isDrained reports whether nothing more will happen to what was written.
func (s *tcpStatus) isDrained() bool { return s.unacked == 0 && s.unsent == 0 || s.closed }

// position is where a socket stands in the stream that it sends, and what the kernel counts of what is underway.
//
//	offset  0 ........ una ............................ nxt ......... end
//	        acked      on the wire: acked out of order, unsent
//	                   lost, or underway
type position struct {
	una, nxt, end int64 // stream offsets: up to which all is acknowledged, sent, accepted from the writer
	unsent        int64 // bytes

	packets               int64 // between una and nxt
	sacked, lost, retrans int64 // packets among them; retrans: lost and sent again

	// Bytes below nxt that no packet counts: the limit has let them out since the packets were counted.
	released int64
}

// outstandingBytes returns the bytes that were sent and are not acknowledged cumulatively.
func (p position) outstandingBytes() int64 { return p.nxt - p.una }

// bytesOf converts a number of outstanding packets to bytes at their mean size. That is the MSS in bulk, and less
// where small writes left one by one.
func (p position) bytesOf(packets int64) int64 {
	if p.packets == 0 {
		return 0
	}
	return (p.outstandingBytes() - p.released) * packets / p.packets
}

// pipeBytes returns the bytes in flight: sent, and neither known to have arrived nor marked as lost.
func (p position) pipeBytes() int64 {
	return p.bytesOf(p.packets-p.sacked-p.lost+p.retrans) + p.released
}

// reportCounter turns successive positions into the counters of reports.
type reportCounter struct {
	origin int64       // stream offset at which observation began
	report flow.Report // the last one; its counters only grow
	newest cc.Bytes    // the largest Newest so far
}

// startAt sets all counters to zero. What was written before is not counted, but is part of the gauges while it is in
// flight.
func (t *reportCounter) startAt(p position) { *t = reportCounter{origin: p.end} }

// countedSince returns how many bytes of an observation end at a stream offset.
func (t *reportCounter) countedSince(offset int64) cc.Bytes { return cc.Bytes(max(0, offset-t.origin)) }

// updateReport brings the last report up to date with p, and returns it.
func (t *reportCounter) updateReport(p position, mss cc.Bytes, at cc.Time) *flow.Report {
	r := &t.report
	r.At = at
	r.MSS = mss
	r.Unsent = cc.Bytes(p.unsent)
	r.Pipe = cc.Bytes(max(0, p.pipeBytes()))
	r.Written = max(r.Written, t.countedSince(p.end))
	r.Acked = max(r.Acked, t.countedSince(min(p.una+p.bytesOf(p.sacked), p.nxt)))
	r.Sacked = r.Acked - t.countedSince(min(p.una, p.nxt))
	return r
}

// raiseNewest is called when something up to offset has arrived, although there may be holes below it. It returns the
// largest such offset since observation began.
func (t *reportCounter) raiseNewest(offset int64) cc.Bytes {
	t.newest = max(t.newest, t.report.Acked, t.countedSince(offset))
	return t.newest
}

// infoReporter turns successive TCP_INFO readings of one socket into reports.
//
// The kernel counts acknowledged bytes exactly (bytes_acked) and unsent ones too (notsent_bytes). Between them lie
// bytes_sent − bytes_retrans − una bytes. That is exact but for transmissions that a local queue refused: bytes_sent
// has them, and will have them again. The surplus is taken out once the packets in flight could not hold that many
// bytes.
type infoReporter struct {
	reportCounter
	info      unix.TCPInfo // the last reading
	infoSize  uintptr      // length of TCP_INFO on this kernel
	synOffset int64        // 1 if bytes_acked counts the SYN, as it does on a dialled connection

	// A FIN may be queued. tcpi_state alone does not say so: the kernel reads it before it takes the socket's lock, so
	// it can lag behind the counters.
	finQueued bool

	recounted int64 // bytes that bytes_sent has twice
	maxMSS    int64 // no packet in flight is larger

	peer *peerReading // timestamps of the peer; nil: none are read

	retransBase uint64 // bytes_retrans when observation began

	// Fields of the last reading that were reported.
	ce          uint32
	rto         uint16
	caState     uint8
	backoff     uint8
	rwndLimited uint64
}

// findSYNOffset finds out whether bytes_acked counts the SYN. The counters show it while nothing is in flight.
// Otherwise it is what the caller says: a dialled connection's does.
func (a *infoReporter) findSYNOffset(i *unix.TCPInfo, dialled bool) {
	if dialled {
		a.synOffset = 1
	}
	if i.Unacked == 0 {
		a.synOffset = min(max(0, int64(i.Bytes_acked)-int64(i.Bytes_sent-i.Bytes_retrans)), 1)
	}
}

// startCounting sets all counters to zero at a reading.
func (a *infoReporter) startCounting(i *unix.TCPInfo) {
	a.startAt(a.positionOf(i))
	a.retransBase = i.Bytes_retrans
	a.rememberReported(i)
}

// rememberReported remembers the fields that the next report is compared with.
func (a *infoReporter) rememberReported(i *unix.TCPInfo) {
	a.ce, a.rto = i.Delivered_ce, i.Total_rto
	a.caState, a.backoff = i.Ca_state, i.Backoff
	a.rwndLimited = i.Rwnd_limited
}

// positionOf returns where a reading puts the socket. It updates recounted.
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

// hasQueuedFIN reports whether the FIN has its place in the send queue.
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
		// The kernel marks most holes below the highest selectively acknowledged byte as lost, so both together reach
		// up to about that byte. After a timeout everything is marked, which says nothing.
		r.Newest = a.raiseNewest(min(p.una+p.bytesOf(p.sacked+p.lost), p.nxt))
	}
	r.Lost = max(r.Lost, cc.Bytes(i.Bytes_retrans-a.retransBase))
	r.Marked = min(r.Marked+cc.Bytes(i.Delivered_ce-a.ce)*r.MSS, r.Acked)
	r.Timeouts += a.newTimeouts(i)
	r.RwndFull = a.rwndFull(i, p)
	a.rememberReported(i)
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

// rwndFull reports whether bytes wait because of the peer's receive window.
func (a *infoReporter) rwndFull(i *unix.TCPInfo, p position) bool {
	if p.unsent == 0 {
		return false
	}
	// The window counts from una, so what the peer has out of order fills it, too.
	return i.Rwnd_limited > a.rwndLimited || p.outstandingBytes()+int64(i.Snd_mss) > int64(i.Snd_wnd)
}
