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
	sendQueue    = 256 << 10 // bytes that Write has taken and that have not been handed over
	receiveQueue = 4 << 20   // bytes that Read has not taken; with more the socket is not read
	maxBatch     = 32 << 10  // bytes handed over in one write
	batchTime    = 2 * time.Millisecond
	// linger bounds how long Close waits for the peer to acknowledge the end of the data.
	linger = 5 * time.Second
)

// framed is a leg between two ends that both use package frame. Its receiver acknowledges data when it comes from the
// stream below, whether or not the application reads it, so a slow reader does not look like a slow path.
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
	fed    bool         // forecasts are wanted of the peer
	cwnd   atomic.Int64 // the flow's limit

	reading, writing            sync.Mutex // one call at a time
	readDeadline, writeDeadline *datapath.Deadline

	arrived chan struct{} // there is something to read, or an end
	taken   chan struct{} // the application has read
	freed   chan struct{} // the send queue has room, or sending has failed
	work    chan struct{} // sendLoop has something to do
	ended   chan struct{} // the peer has acknowledged the end of our data, or the stream has failed
	done    chan struct{} // closed by Close
	closing sync.Once
	loops   sync.WaitGroup

	mu      sync.Mutex
	in      byteQueue
	readErr error // what Read returns once in is empty; nil: nothing yet
	// discards: Close was called, so the application will not read what comes. It is still acknowledged.
	discards bool
	out      byteQueue
	sendErr  error // what Write returns; nil: it may write
	finSent  bool
	fin      bool // no data follows

	credit cc.Bytes // granted by the flow and not used
	report flow.Report
	acked  cc.Bytes   // by the peer; what came behind a hole is not
	handed cc.Bytes   // to the stream below; what it has not taken yet is not
	sent   []handover // not acknowledged yet, the oldest first
	filled cc.Time    // when what is handed over was taken from the queue
	srtt   time.Duration
	minRTT time.Duration

	// forecaster infers the path's rate from what comes; nil: the peer wants no forecasts. One is due at forecastAt, if
	// that is above 0.
	forecaster           *cc.SproutReceiver
	forecast, forecastAt cc.Time
	overtaken            cc.Bytes // behind holes, at the newest forecast
	idleSent             bool     // the peer knows that the flight has ended

	ackDue   bool
	received frame.Acknowledgement // what is to be acknowledged; Held and Clock are set when it is sent
	newest   cc.Time               // when the newest data came
	answered cc.Time               // newest, as the acknowledgement before had it
	gap      time.Duration         // about the median between arrivals
}

// handover is data that was given to the stream below in one piece.
type handover struct {
	end cc.Bytes // offset behind it
	at  cc.Time
	// isLate: at is when the stream below was seen to have taken it, which may have been long before.
	isLate bool
}

// newFramed begins to speak the framing over inner, which it takes over.
func newFramed(e *engine, inner net.Conn, s *settings) (*framed, error) {
	f := &framed{
		inner: inner, engine: e, fed: s.forecasts,
		readDeadline: datapath.NewDeadline(), writeDeadline: datapath.NewDeadline(),
		arrived: make(chan struct{}, 1), taken: make(chan struct{}, 1), freed: make(chan struct{}, 1),
		work: make(chan struct{}, 1), ended: make(chan struct{}, 1), done: make(chan struct{}),
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
				opened.Observe(f.takeKernelReport)
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
		f.in.take(n)
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
		case f.discards:
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

// receiveLoop takes in what the peer sends, until the stream ends.
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
	for _, c := range []chan struct{}{f.arrived, f.freed, f.ended, f.work} {
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
		rest, bad := f.takeRecords(buffer[:kept+n])
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

// takeRecords takes in all whole records of b and returns the rest.
func (f *framed) takeRecords(b []byte) (rest []byte, err error) {
	now := f.engine.now()
	f.mu.Lock()
	defer f.mu.Unlock()
	data := 0 // records
	defer func() { f.noteArrivals(now, data) }()
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
			if !f.discards {
				f.in.push(body)
			}
			f.noteForForecast(now, cc.SproutPacket{Seq: cc.Bytes(f.received.Offset), Size: cc.Bytes(len(body))})
			f.received.Offset += uint64(len(body))
			data++
		case frame.Idle:
			pause, err := frame.ParseIdle(body)
			if err != nil {
				return nil, err
			}
			f.noteForForecast(now, cc.SproutPacket{Seq: cc.Bytes(f.received.Offset), Pause: pause})
		case frame.Forecast:
			forecast, err := frame.ParseForecast(body)
			if err != nil {
				return nil, err
			}
			if f.flow != nil && f.fed {
				f.flow.TakeForecast(now, f.report.Written+f.credit, forecast)
			}
		case frame.Fin:
			f.received.Fin, f.readErr, f.ackDue = true, io.EOF, true
		case frame.Ack:
			a, err := frame.ParseAck(body)
			if err == nil {
				err = f.takeAck(now, a)
			}
			if err != nil {
				return nil, err
			}
		}
	}
}

// Sprout's times.
const (
	forecastEvery = 20 * time.Millisecond // between two forecasts: a tick
	forecastAfter = time.Second           // since the newest data; an outage is forecast for so long
	pauseAtEnd    = time.Hour             // for how long a sender that has no data may be silent
)

// noteForForecast takes in what came, and has a forecast sent. mu is held.
func (f *framed) noteForForecast(now cc.Time, p cc.SproutPacket) {
	if f.forecaster == nil {
		return
	}
	f.forecaster.OnPacket(now, p)
	if f.forecastAt == 0 {
		f.forecastAt = max(now, f.forecast.Add(forecastEvery))
		notify(f.work)
	}
}

// noteOvertaken counts what has come behind a hole since the newest forecast. Data that has come in order since then
// has closed the hole, if nothing comes behind one. mu is held.
func (f *framed) noteOvertaken(now cc.Time) {
	total := readOvertaken(f.inner)
	switch {
	case total > f.overtaken:
		f.forecaster.OnEarly(now, total-f.overtaken)
		f.overtaken = total
	case f.newest > f.forecast:
		f.forecaster.ForgetEarly()
	}
}

// burst is how many records that come together after a pause are taken for what a repaired hole has held back.
const burst = 4

// noteArrivals notes that data records came, and has them acknowledged. mu is held.
func (f *framed) noteArrivals(now cc.Time, records int) {
	if records > 0 {
		if f.newest > 0 {
			gap := now.Sub(f.newest)
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
		f.newest = now
		f.received.Records += uint64(records)
		f.received.Full = f.in.length() >= receiveQueue
		f.ackDue = true
	}
	if f.ackDue {
		notify(f.work)
		notify(f.arrived)
	}
}

// awaitReader waits while the application has more to read than fits, and tells the peer when that has ended.
func (f *framed) awaitReader() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.received.Full {
		return nil
	}
	for f.in.length() > receiveQueue/2 && !f.discards {
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

// takeAck takes in an acknowledgement. mu is held.
func (f *framed) takeAck(now cc.Time, a frame.Acknowledgement) error {
	if a.Offset > uint64(f.report.Written) || a.Offset < uint64(f.acked) {
		return fmt.Errorf("%w: acknowledged %d of %d bytes after %d", frame.ErrFormat, a.Offset, f.report.Written,
			f.acked)
	}
	var newest handover // of them
	for len(f.sent) > 0 && f.sent[0].end <= cc.Bytes(a.Offset) {
		newest = f.sent[0]
		f.sent = f.sent[1:]
	}
	if a.Fin {
		notify(f.ended)
	}
	f.acked = cc.Bytes(a.Offset)
	r := &f.report
	r.RwndFull = a.Full
	r.Peer = flow.PeerClock{At: now, Value: uint32(a.Clock)} //nolint:gosec // it wraps around, as TSval does
	// Without a sample the newest one stays, as in TCP_INFO: what waited for its reader, or for a hole before it, shows
	// another delay than the path's.
	// A late time makes a round trip too short, which would lower the least one for good.
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

// takeKernelReport takes in what the kernel below says. Its window is open: only it sees losses and marks, and what
// has come behind a hole, which the peer acknowledges once the hole is filled. It is called with the leg's lock held.
func (f *framed) takeKernelReport(k flow.Report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &f.report
	switch {
	case k.Sacked > 0:
		// Records have headers: no less data than that has arrived.
		r.Acked = max(r.Acked, f.handed-(k.Written-k.Acked))
		if k.RTT > 0 {
			r.RTT = k.RTT
		}
	case k.Lost == r.Lost && k.Timeouts == r.Timeouts && k.Marked == r.Marked:
		return
	}
	r.Lost, r.Timeouts, r.Marked = k.Lost, k.Timeouts, k.Marked
	f.sendReport(k.At)
}

// sendReport tells the flow what has become of what was handed over. mu is held.
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
	buffer := frame.AppendHello(nil, f.fed)
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
				_ = f.inner.Close() // so that the peer learns of it
			case <-f.done:
			}
			return
		}
		if _, err := f.inner.Write(buffer); err != nil {
			f.failSending(err)
			return
		}
		f.noteHandover(f.engine.now())
		buffer = buffer[:0]
	}
}

// setForecastTimer sets the timer to when the next forecast is due.
func (f *framed) setForecastTimer(timer *time.Timer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.forecastAt > 0 {
		timer.Reset(max(0, f.forecastAt.Sub(f.engine.now())))
	}
}

// fillBuffer appends what may be handed over now: an acknowledgement, which must not wait behind data, and data as far
// as the window allows.
func (f *framed) fillBuffer(b []byte, now cc.Time) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ackDue {
		b = f.appendAck(now, b)
	}
	if f.forecastAt > 0 && f.forecastAt <= now {
		f.noteOvertaken(now)
		b = frame.AppendForecast(b, f.forecaster.Forecast(now))
		next := max(f.forecastAt.Add(forecastEvery), now.Add(forecastEvery/2))
		if f.forecast, f.forecastAt = now, 0; now.Sub(f.newest) < forecastAfter {
			f.forecastAt = next // a late one must not make all others late: the sender then takes each for older
		}
	}
	n := f.takeRoom(now)
	if n > 0 {
		notify(f.freed)
	}
	for f.filled = now; n > 0; f.idleSent = false {
		data := f.out.first(min(n, frame.DataBytes))
		b = frame.AppendData(b, data)
		f.report.Written += cc.Bytes(len(data))
		f.sent = append(f.sent, handover{end: f.report.Written, at: now})
		n -= len(data)
		f.out.take(len(data))
	}
	if f.fed && !f.idleSent && f.credit == 0 {
		pause := cc.SproutPause(f.srtt)
		if f.out.length() == 0 {
			pause = pauseAtEnd
		}
		b = frame.AppendIdle(b, pause)
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
		a.Held = max(0, now.Sub(f.newest)) // it may have come just after now
		if f.answered > 0 {
			a.Gap = f.newest.Sub(f.answered)
		}
		f.answered = f.newest
	}
	f.ackDue, f.received.Records, f.received.Repaired = false, 0, false
	return frame.AppendAck(b, a)
}

// takeRoom returns how many bytes of the send queue may be handed over now. It asks the flow for all of the queue, so
// that the flow knows what the application wants. mu is held.
func (f *framed) takeRoom(now cc.Time) int {
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

// batchBytes returns how much is handed over in one write: what leaves within batchTime, so that an acknowledgement
// does not wait for longer behind data that the stream below has not taken. It is whole records, which fill the packets
// of TCP. mu is held.
func (f *framed) batchBytes() int {
	if f.srtt == 0 {
		return frame.DataBytes
	}
	batch := float64(f.cwnd.Load()) * float64(batchTime) / float64(f.srtt)
	return int(min(max(batch, frame.DataBytes), maxBatch)) / frame.DataBytes * frame.DataBytes
}

// noteHandover corrects when the newest data was handed over, if the stream below took its time: what waits there is
// not in flight yet. Some of it may have been acknowledged by now.
func (f *framed) noteHandover(now cc.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handed = f.report.Written
	if now.Sub(f.filled) < batchTime {
		return
	}
	for i := len(f.sent) - 1; i >= 0 && f.sent[i].at == f.filled; i-- {
		f.sent[i].at, f.sent[i].isLate = now, true
	}
}

// hasFailed reports whether sending has failed.
func (f *framed) hasFailed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sendErr != nil
}

// failSending ends sending.
func (f *framed) failSending(err error) {
	f.mu.Lock()
	if f.sendErr == nil {
		f.sendErr = err
	}
	f.mu.Unlock()
	notify(f.freed)
	notify(f.ended)
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

// closeAfter ends the stream below by end, after the peer has acknowledged the end of the data if waits.
func (f *framed) closeAfter(waits bool, end func() error) error {
	err := net.ErrClosed
	f.closing.Do(func() {
		f.mu.Lock()
		f.discards, f.fin = true, true
		waits = waits && f.sendErr == nil
		f.mu.Unlock()
		notify(f.taken)
		notify(f.freed)
		notify(f.work)
		if waits {
			timer := time.NewTimer(linger) //nolint:forbidigo // deadlines of net.Conn are of the real clock
			select {
			case <-f.ended:
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
