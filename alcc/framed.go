package alcc

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/alcc/frame"
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Bounds of a framed connection.
const (
	sendQueue    = 256 << 10 // bytes that Write has taken and that were not handed over to the stream below
	receiveQueue = 4 << 20   // bytes that Read has not taken; with more the stream below is not read
	maxBatch     = 32 << 10  // bytes handed over in one write
	batchTime    = 2 * time.Millisecond
	// linger bounds how long Close waits for the peer to acknowledge the end of the data.
	linger = 5 * time.Second
)

// framed is a leg between two ends that both use package frame. Its receiver acknowledges data as soon as it comes
// from the stream below, so that an application that reads slowly does not look like a slow path.
//
// # Concurrency
//
// receiveLoop alone reads the stream below, sendLoop alone writes to it, so that a blocked write does not keep
// acknowledgements of the other direction from being read. mu guards the fields below it. Locks are taken in this
// order: reading or writing, mu, a group's. The flow calls Apply and Wake under its group's lock; they only set an
// atomic and a channel.
type framed struct {
	inner  net.Conn
	engine *engine
	flow   *flow.Flow
	cwnd   atomic.Int64 // the flow's limit

	wantsForecasts bool // the peer has to send forecasts, because the algorithm needs them

	reading, writing            sync.Mutex // one call at a time
	readDeadline, writeDeadline *datapath.Deadline

	arrived chan struct{} // there is something to read, or an end
	taken   chan struct{} // the application has read
	freed   chan struct{} // the send queue has room, or sending has failed
	work    chan struct{} // sendLoop has something to do
	done    chan struct{} // closed by Close
	closing sync.Once
	loops   sync.WaitGroup

	finAcked chan struct{} // the peer has acknowledged the end of our data, or the stream has failed

	mu      sync.Mutex
	in      byteQueue
	readErr error // what Read returns once in is empty; nil: nothing yet
	closed  bool  // Close was called. Data that comes is dropped, but still acknowledged.
	out     byteQueue
	sendErr error // what Write returns; nil: it may write
	finSent bool
	fin     bool // no data follows

	credit     cc.Bytes // granted by the flow and not used
	report     flow.Report
	acked      cc.Bytes   // acknowledged by the peer, which does not acknowledge data behind a hole
	handedOver cc.Bytes   // data that the stream below has taken
	sent       []handover // not acknowledged yet, the oldest first
	filledAt   cc.Time    // when the newest data in sent left the send queue
	srtt       time.Duration
	minRTT     time.Duration

	// forecaster infers the path's rate from what comes; nil: the peer wants no forecasts.
	forecaster     *cc.SproutReceiver
	forecastSentAt cc.Time  // of the newest forecast
	forecastDueAt  cc.Time  // of the next one; 0: none is due
	outOfOrder     cc.Bytes // readOutOfOrder at the newest forecast
	idleSent       bool     // the peer knows that no data is in flight behind what it has

	ackDue        bool
	received      frame.Acknowledgement // the next acknowledgement; Held and Clock are set when it is sent
	newestAt      cc.Time               // when the newest data came
	lastAckNewest cc.Time               // newestAt at the last acknowledgement
	gap           time.Duration         // about the median between arrivals
}

// handover is data that was handed over to the stream below in one record.
type handover struct {
	end cc.Bytes // offset behind it
	at  cc.Time
	// isLate reports that at may be later than the time at which the stream below took the data, which is not known.
	isLate bool
}

// newFramed begins to speak the framing over inner, which it takes over.
func newFramed(e *engine, inner net.Conn, s *settings) (*framed, error) {
	f := &framed{
		inner: inner, engine: e, wantsForecasts: s.forecasts,
		readDeadline: datapath.NewDeadline(), writeDeadline: datapath.NewDeadline(),
		arrived: make(chan struct{}, 1), taken: make(chan struct{}, 1), freed: make(chan struct{}, 1),
		work: make(chan struct{}, 1), finAcked: make(chan struct{}, 1), done: make(chan struct{}),
	}
	f.report.MSS = frame.DataBytes
	limitUnsent(inner)
	if s.isManaged() {
		leg := flow.Leg{
			Apply: func(l flow.Limit) { f.cwnd.Store(int64(l.Cwnd)) },
			Wake:  func() { notify(f.work) },
		}
		var err error
		terms := s.termsFor(inner.LocalAddr(), inner.RemoteAddr())
		if f.flow, err = e.flows.Open(e.now(), terms, leg); err != nil {
			return nil, fmt.Errorf("alcc: %w", err)
		}
		if tcp, ok := inner.(*net.TCPConn); ok {
			if opened := e.openWindow(tcp, terms); opened != nil {
				f.inner = opened
				opened.Observe(f.processKernelReport)
			}
		}
	}
	f.loops.Go(f.receiveLoop)
	f.loops.Go(f.sendLoop)
	return f, nil
}

// Read implements net.Conn. It returns io.EOF after the peer's CloseWrite or Close, and io.ErrUnexpectedEOF where the
// stream below ended without one.
func (f *framed) Read(b []byte) (int, error) {
	f.reading.Lock()
	defer f.reading.Unlock()
	for {
		select {
		case <-f.done:
			return 0, f.opError("read", net.ErrClosed)
		case <-f.readDeadline.Wait():
			return 0, f.opError("read", os.ErrDeadlineExceeded)
		default:
		}
		f.mu.Lock()
		n, err := copy(b, f.in.first(len(b))), f.readErr
		f.in.removeFirst(n)
		f.mu.Unlock()
		switch {
		case n > 0 || len(b) == 0:
			notify(f.taken)
			return n, nil
		case errors.Is(err, io.EOF):
			return 0, err
		case err != nil:
			return 0, f.opError("read", err)
		}
		select {
		case <-f.arrived:
		case <-f.done:
		case <-f.readDeadline.Wait():
		}
	}
}

// Write implements net.Conn. It returns once all bytes wait in the send queue or have been handed over.
func (f *framed) Write(b []byte) (n int, err error) {
	f.writing.Lock()
	defer f.writing.Unlock()
	for n < len(b) {
		select {
		case <-f.done:
			return n, f.opError("write", net.ErrClosed)
		case <-f.writeDeadline.Wait():
			return n, f.opError("write", os.ErrDeadlineExceeded)
		default:
		}
		f.mu.Lock()
		err := f.sendErr
		switch {
		case f.closed:
			err = net.ErrClosed
		case err == nil && f.fin:
			err = syscall.EPIPE
		}
		k := min(len(b)-n, sendQueue-f.out.length())
		if err == nil && k > 0 {
			f.out.push(b[n : n+k])
			n += k
		}
		f.mu.Unlock()
		if err != nil {
			return n, f.opError("write", err)
		}
		if k > 0 {
			notify(f.work)
			continue
		}
		select {
		case <-f.freed:
		case <-f.done:
		case <-f.writeDeadline.Wait():
		}
	}
	return n, nil
}

// receiveLoop reads and processes what the peer sends, until the stream ends.
func (f *framed) receiveLoop() {
	err := f.receiveRecords()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	f.mu.Lock()
	if f.readErr == nil {
		f.readErr = err
	}
	if f.sendErr == nil {
		f.sendErr = err // nothing more will be acknowledged
	}
	f.mu.Unlock()
	for _, c := range []chan struct{}{f.arrived, f.freed, f.finAcked, f.work} {
		notify(c)
	}
}

// receiveRecords reads the hello, then records, until an error.
func (f *framed) receiveRecords() error {
	hello := make([]byte, frame.HelloBytes)
	if _, err := io.ReadFull(f.inner, hello); err != nil {
		return err
	}
	peer, err := frame.ParseHello(hello)
	if err != nil {
		return err
	}
	if peer.Forecasts {
		f.mu.Lock()
		f.forecaster, err = cc.NewSproutReceiver(f.engine.now(), nil)
		f.mu.Unlock()
		if err != nil {
			return err
		}
	}
	buffer, kept := make([]byte, 2*frame.MaxRecord), 0
	for {
		n, err := f.inner.Read(buffer[kept:])
		rest, bad := f.processRecords(buffer[:kept+n])
		if bad != nil {
			return bad
		}
		if err != nil {
			return err
		}
		kept = copy(buffer, rest)
		if err := f.awaitReader(); err != nil {
			return err
		}
	}
}

// processRecords processes all whole records of b and returns the rest.
func (f *framed) processRecords(b []byte) (rest []byte, err error) {
	now := f.engine.now()
	f.mu.Lock()
	defer f.mu.Unlock()
	data := 0 // records
	defer func() { f.countRecords(now, data) }()
	for {
		kind, body, size, err := frame.Parse(b)
		if err != nil || size == 0 {
			return b, err
		}
		b = b[size:]
		switch kind {
		case frame.Data:
			if f.received.Fin {
				return nil, fmt.Errorf("%w: data after the end", frame.ErrFormat)
			}
			if !f.closed {
				f.in.push(body)
			}
			f.addForForecast(now, cc.SproutPacket{Seq: cc.Bytes(f.received.Offset), Size: cc.Bytes(len(body))})
			f.received.Offset += uint64(len(body))
			data++
		case frame.Idle:
			pause, err := frame.ParseIdle(body)
			if err != nil {
				return nil, err
			}
			f.addForForecast(now, cc.SproutPacket{Seq: cc.Bytes(f.received.Offset), Pause: pause})
		case frame.Forecast:
			forecast, err := frame.ParseForecast(body)
			if err != nil {
				return nil, err
			}
			if f.flow != nil && f.wantsForecasts {
				f.flow.TakeForecast(now, f.report.Written+f.credit, forecast)
			}
		case frame.Fin:
			f.received.Fin, f.readErr, f.ackDue = true, io.EOF, true
		case frame.Ack:
			a, err := frame.ParseAck(body)
			if err == nil {
				err = f.processAck(now, a)
			}
			if err != nil {
				return nil, err
			}
		}
	}
}

// addForForecast gives p to the forecaster, and schedules a forecast. mu is held.
func (f *framed) addForForecast(now cc.Time, p cc.SproutPacket) {
	if f.forecaster == nil {
		return
	}
	f.forecaster.OnPacket(now, p)
	if f.forecastDueAt == 0 {
		f.forecastDueAt = max(now, f.forecastSentAt.Add(cc.SproutTick))
		notify(f.work)
	}
}

// countOutOfOrder gives the forecaster the bytes that have come behind a hole since the newest forecast. If there are
// none, but data has come in order, the hole is closed. mu is held.
func (f *framed) countOutOfOrder(now cc.Time) {
	total := readOutOfOrder(f.inner)
	switch {
	case total > f.outOfOrder:
		f.forecaster.OnEarly(now, total-f.outOfOrder)
		f.outOfOrder = total
	case f.newestAt > f.forecastSentAt:
		f.forecaster.ForgetEarly()
	}
}

// burst is the number of records above which those that come together after a pause count as repaired: the stream
// below has held them back behind a hole.
const burst = 4

// countRecords counts data records that came at once, and schedules an acknowledgement. mu is held.
func (f *framed) countRecords(now cc.Time, records int) {
	if records > 0 {
		if f.newestAt > 0 {
			gap := now.Sub(f.newestAt)
			f.received.Repaired = records > burst && gap > 2*f.gap
			switch { // a median goes up as often as down
			case f.gap == 0:
				f.gap = gap
			case gap > f.gap:
				f.gap += f.gap / 8
			default:
				f.gap -= f.gap / 8
			}
		}
		f.newestAt = now
		f.received.Records += uint64(records)
		f.received.Full = f.in.length() >= receiveQueue
		f.ackDue = true
	}
	if f.ackDue {
		notify(f.work)
		notify(f.arrived)
	}
}

// awaitReader waits while the receive queue is full, until it is half empty. Then it schedules an acknowledgement that
// says so.
func (f *framed) awaitReader() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.received.Full {
		return nil
	}
	for f.in.length() > receiveQueue/2 && !f.closed {
		f.mu.Unlock()
		select {
		case <-f.taken:
		case <-f.done:
			f.mu.Lock()
			return net.ErrClosed
		}
		f.mu.Lock()
	}
	f.received.Full, f.ackDue = false, true
	notify(f.work)
	return nil
}

// processAck processes an acknowledgement. mu is held.
func (f *framed) processAck(now cc.Time, a frame.Acknowledgement) error {
	if a.Offset > uint64(f.report.Written) || a.Offset < uint64(f.acked) {
		return fmt.Errorf("%w: acknowledged %d of %d bytes after %d", frame.ErrFormat, a.Offset, f.report.Written,
			f.acked)
	}
	var newest handover // the newest one that a acknowledges
	for len(f.sent) > 0 && f.sent[0].end <= cc.Bytes(a.Offset) {
		newest = f.sent[0]
		f.sent = f.sent[1:]
	}
	if a.Fin {
		notify(f.finAcked)
	}
	f.acked = cc.Bytes(a.Offset)
	r := &f.report
	r.RwndFull = a.Full
	r.Peer = flow.PeerClock{At: now, Value: uint32(a.Clock)} //nolint:gosec // it wraps around, as TSval does
	// Data that waited for its reader, or for a hole before it, is no sample, because it has another delay than the
	// path's. The last sample stays then, as in TCP_INFO. A late handover is no sample if it would lower minRTT, because
	// its round trip may be too short.
	rtt := max(now.Sub(newest.at)-a.Held, time.Microsecond)
	isSample := newest.at > 0 && a.Records > 0 && !a.Full && !a.Repaired && (!newest.isLate || rtt >= f.minRTT)
	if isSample {
		r.RTT = rtt
		if f.srtt == 0 {
			f.srtt, f.minRTT = rtt, rtt
		}
		f.minRTT = min(f.minRTT, rtt)
		f.srtt += (r.RTT - f.srtt) / 8
	}
	f.sendReport(now)
	return nil
}

// processKernelReport processes a report of the kernel's TCP below. Only the kernel sees losses and marks, and what
// has come behind a hole, which the peer acknowledges once the hole is filled. It is called with the leg's lock held.
func (f *framed) processKernelReport(k flow.Report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &f.report
	switch {
	case k.Sacked > 0:
		// The kernel's bytes include headers of records, so at least this much data has arrived.
		r.Acked = max(r.Acked, f.handedOver-(k.Written-k.Acked))
		if k.RTT > 0 {
			r.RTT = k.RTT
		}
	case k.Lost == r.Lost && k.Timeouts == r.Timeouts && k.Marked == r.Marked:
		return
	}
	r.Lost, r.Timeouts, r.Marked = k.Lost, k.Timeouts, k.Marked
	f.sendReport(k.At)
}

// sendReport reports to the flow what has been acknowledged and lost so far. mu is held.
func (f *framed) sendReport(now cc.Time) {
	r := &f.report
	r.At = now
	r.Acked = max(r.Acked, f.acked)
	r.Sacked, r.Pipe = r.Acked-f.acked, r.Written-r.Acked
	if f.flow != nil {
		f.flow.Report(*r)
	}
	notify(f.work)
}

// sendLoop hands over acknowledgements and data, until the stream fails or Close has ended it.
func (f *framed) sendLoop() {
	buffer := frame.AppendHello(nil, f.wantsForecasts)
	timer := time.NewTimer(time.Hour) //nolint:forbidigo // forecasts follow the real clock
	defer timer.Stop()
	for {
		if len(buffer) == 0 {
			buffer = f.fillBuffer(buffer, f.engine.now())
		}
		if len(buffer) == 0 {
			f.setForecastTimer(timer)
			select {
			case <-timer.C:
				continue
			case <-f.work:
				if !f.hasFailed() {
					continue
				}
				_ = f.inner.Close() // the peer reads the end of the stream
			case <-f.done:
			}
			return
		}
		if _, err := f.inner.Write(buffer); err != nil {
			f.failSending(err)
			return
		}
		f.recordHandover(f.engine.now())
		buffer = buffer[:0]
	}
}

// setForecastTimer sets the timer to when the next forecast is due.
func (f *framed) setForecastTimer(timer *time.Timer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.forecastDueAt > 0 {
		timer.Reset(max(0, f.forecastDueAt.Sub(f.engine.now())))
	}
}

// fillBuffer appends what may be handed over now: an acknowledgement and a forecast first, which must not wait behind
// data, and then data as far as the window allows.
func (f *framed) fillBuffer(b []byte, now cc.Time) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ackDue {
		b = f.appendAck(now, b)
	}
	if f.forecastDueAt > 0 && f.forecastDueAt <= now {
		f.countOutOfOrder(now)
		b = frame.AppendForecast(b, f.forecaster.Forecast(now))
		next := max(f.forecastDueAt.Add(cc.SproutTick), now.Add(cc.SproutTick/2))
		if f.forecastSentAt, f.forecastDueAt = now, 0; now.Sub(f.newestAt) < cc.SproutSilence {
			f.forecastDueAt = next // counts from when this one was due, so that a late one does not delay all that follow
		}
	}
	n := f.takeGrant(now)
	if n > 0 {
		notify(f.freed)
	}
	for f.filledAt = now; n > 0; f.idleSent = false {
		data := f.out.first(min(n, frame.DataBytes))
		b = frame.AppendData(b, data)
		f.report.Written += cc.Bytes(len(data))
		f.sent = append(f.sent, handover{end: f.report.Written, at: now})
		n -= len(data)
		f.out.removeFirst(len(data))
	}
	if f.wantsForecasts && !f.idleSent && f.credit == 0 {
		b = frame.AppendIdle(b, cc.SproutPause(f.srtt, f.out.length() > 0))
		f.idleSent = true
	}
	if f.fin && !f.finSent && f.out.length() == 0 {
		b = frame.AppendFin(b)
		f.finSent = true
	}
	return b
}

// appendAck appends the acknowledgement that is due. mu is held.
func (f *framed) appendAck(now cc.Time, b []byte) []byte {
	a := f.received
	a.Clock = uint64(time.Duration(now).Milliseconds())
	if a.Records > 0 {
		a.Held = max(0, now.Sub(f.newestAt)) // data may have come after now was read
		if f.lastAckNewest > 0 {
			a.Gap = f.newestAt.Sub(f.lastAckNewest)
		}
		f.lastAckNewest = f.newestAt
	}
	f.ackDue, f.received.Records, f.received.Repaired = false, 0, false
	return frame.AppendAck(b, a)
}

// takeGrant returns how many bytes of the send queue may be handed over now. It asks the flow for room for all of the
// queue, so that the flow knows how much waits. mu is held.
func (f *framed) takeGrant(now cc.Time) int {
	queued := cc.Bytes(f.out.length())
	batch := min(queued, cc.Bytes(f.batchBytes()))
	if f.flow == nil {
		return int(batch)
	}
	if queued == 0 || f.credit < queued {
		f.credit += f.flow.Take(now, max(0, queued-f.credit)).Bytes
	}
	n := min(batch, f.credit)
	f.credit -= n
	return int(n)
}

// batchBytes returns how much data is handed over in one write: what leaves within batchTime, so that an
// acknowledgement waits no longer than that behind data. It returns the bytes of whole records, which fill the packets
// of TCP. mu is held.
func (f *framed) batchBytes() int {
	if f.srtt == 0 {
		return frame.DataBytes
	}
	batch := float64(f.cwnd.Load()) * float64(batchTime) / float64(f.srtt)
	return int(min(max(batch, frame.DataBytes), maxBatch)) / frame.DataBytes * frame.DataBytes
}

// recordHandover records that the stream below has taken the newest data. If its write took longer than batchTime, the
// data counts as sent now, because it was not in flight while it waited. Some of it may have been acknowledged by now.
func (f *framed) recordHandover(now cc.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handedOver = f.report.Written
	if now.Sub(f.filledAt) < batchTime {
		return
	}
	for i := len(f.sent) - 1; i >= 0 && f.sent[i].at == f.filledAt; i-- {
		f.sent[i].at, f.sent[i].isLate = now, true
	}
}

// hasFailed reports whether sending has failed.
func (f *framed) hasFailed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sendErr != nil
}

// failSending stores the error of sending, and wakes those that wait for room or for the end.
func (f *framed) failSending(err error) {
	f.mu.Lock()
	if f.sendErr == nil {
		f.sendErr = err
	}
	f.mu.Unlock()
	notify(f.freed)
	notify(f.finAcked)
}

// opError returns an error in the form that package net has.
func (f *framed) opError(op string, err error) error {
	var known *net.OpError
	if errors.As(err, &known) {
		return err
	}
	return &net.OpError{Op: op, Net: "alcc", Source: f.LocalAddr(), Addr: f.RemoteAddr(), Err: err}
}

// CloseWrite sends what is queued, then the end of the data. It does not wait.
func (f *framed) CloseWrite() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sendErr != nil {
		return f.opError("shutdown", f.sendErr)
	}
	f.fin = true
	notify(f.work)
	return nil
}

// Close implements net.Conn. It waits until the peer has acknowledged all data, for five seconds at most.
func (f *framed) Close() error { return f.closeAfter(true, f.inner.Close) }

// Reset closes the connection at once. The peer reads io.ErrUnexpectedEOF or an error of the stream below.
func (f *framed) Reset() error {
	end := f.inner.Close
	switch inner := f.inner.(type) {
	case interface{ Reset() error }:
		end = inner.Reset
	case *net.TCPConn:
		_ = inner.SetLinger(0)
	}
	return f.closeAfter(false, end)
}

// closeAfter closes the stream below by end. If waits is set, it first waits until the peer has acknowledged the end
// of the data, for linger at most.
func (f *framed) closeAfter(waits bool, end func() error) error {
	err := net.ErrClosed
	f.closing.Do(func() {
		f.mu.Lock()
		f.closed, f.fin = true, true
		waits = waits && f.sendErr == nil
		f.mu.Unlock()
		notify(f.taken)
		notify(f.freed)
		notify(f.work)
		if waits {
			timer := time.NewTimer(linger) //nolint:forbidigo // deadlines of net.Conn are of the real clock
			select {
			case <-f.finAcked:
			case <-timer.C:
			}
			timer.Stop()
		}
		close(f.done)
		if err = end(); f.hasFailed() {
			err = nil // sendLoop may have closed it
		}
		f.loops.Wait()
		if f.flow != nil {
			f.flow.Close(f.engine.now())
		}
		f.readDeadline.Set(time.Time{})
		f.writeDeadline.Set(time.Time{})
	})
	return err
}

// LocalAddr implements net.Conn.
func (f *framed) LocalAddr() net.Addr { return f.inner.LocalAddr() }

// RemoteAddr implements net.Conn.
func (f *framed) RemoteAddr() net.Addr { return f.inner.RemoteAddr() }

// SetDeadline implements net.Conn.
func (f *framed) SetDeadline(t time.Time) error {
	f.readDeadline.Set(t)
	f.writeDeadline.Set(t)
	return nil
}

// SetReadDeadline implements net.Conn.
func (f *framed) SetReadDeadline(t time.Time) error {
	f.readDeadline.Set(t)
	return nil
}

// SetWriteDeadline implements net.Conn.
func (f *framed) SetWriteDeadline(t time.Time) error {
	f.writeDeadline.Set(t)
	return nil
}
