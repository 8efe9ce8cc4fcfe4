package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Sizes on the wire.
const (
	// HeaderBytes are 20 of IPv4 and 32 of TCP with timestamps.
	HeaderBytes cc.Bytes = 52
	ackBytes             = HeaderBytes
)

// sendBatch is how much a sender asks its flow for at once.
const sendBatch = 64 * cc.DefaultMSS

// sender is a transport below a flow, packet by packet: it keeps no window of
// its own for new data, which is the flow's to grant, and retransmits within
// the limit that the flow's last answer named. Its acknowledgements are those
// of TCP with selective acknowledgement and as many blocks as it takes.
type sender struct {
	sending
	flow *flow.Flow // nil before it opens
	rcv  receiver
	win  *window // that the receiver advertises; nil: more than is ever in flight
	ask  *client // nil: no client asks
	held bool    // the transport keeps the flow's window

	waking  alarm    // a pump, because the flow called
	resumes cc.Time  // when the application will have something again, or the pace allows it
	limit   cc.Bytes // the flow's newest: for retransmissions, and for all that a leg sends which enforces the window
	pace    cc.Rate  // the pacing rate, for a leg that enforces the window; 0: none
	paced   cc.Time  // not to send before

	board Scoreboard
	looks alarm    // at the clock
	sent  cc.Bytes // stream offset of what comes next
	wrote cc.Bytes // stream offset up to which a transport that holds the window was given bytes
	edge  cc.Bytes // stream offset up to which the receiver lets send
	heard cc.Time  // when the newest acknowledgement that came was sent

	forecasts   *forecasts // of the receiver; nil: none
	transmitted cc.Bytes   // retransmissions included

	telling  alarm    // of what has left
	toldSent cc.Bytes // sent, as last reported

	report flow.Report
}

func newSender(w *world, cfg FlowConfig, i int) *sender {
	s := &sender{
		sending: newSending(w, cfg, i), limit: cc.InitialCwndPackets * cc.DefaultMSS, edge: cc.MaxCwnd,
	}
	s.waking, s.looks, s.telling = w.alarm(s.pump), w.alarm(s.look), w.alarm(s.tellOfSent)
	s.held = cfg.Upload || cfg.Hold != "" || w.scenario.Transport != Relay
	if cfg.hasClient() {
		s.ask = &client{Client: NewClient(cfg.Bytes, cfg.Every, cfg.Video), s: s}
	}
	s.rcv = receiver{every: w.scenario.AckEvery, delay: w.scenario.AckDelay, clock: w.clock(i)}
	s.report.MSS, s.report.L4S = cc.DefaultMSS, cfg.ECN.codepoint(cfg.Algorithm) == ECT1
	return s
}

func (s *sender) open() {
	t := s.w.terms(int(s.number))
	f, err := s.w.manager.Open(s.w.now, t, flow.Leg{Enforces: s.held, Apply: s.apply, Wake: s.wake})
	if err != nil {
		s.w.err = err
		return
	}
	s.flow = f
	if s.w.scenario.Forecasts {
		s.forecasts = s.newForecasts(t.Algorithm, t.Params)
	}
	if s.cfg.Hold != "" {
		s.hold = s.w.holdingEdge(int(s.number))
	}
	if s.cfg.Upload {
		s.edge = 0 // until it is connected
	}
	if s.cfg.Receive != "" {
		s.advertise()
	}
	if s.ask != nil {
		s.ask.ask()
	}
	if s.held {
		s.tell(0) // and hear of the window
	}
	if s.cfg.Upload {
		s.connect()
		return
	}
	s.pump()
}

func (s *sender) underWay() bool { return s.flow != nil && !s.closed }

// move gives the flow other terms.
func (s *sender) move(t flow.Terms) {
	if s.flow == nil || s.closed {
		return
	}
	if err := s.flow.Move(s.w.now, t); err != nil {
		s.w.err = err
	}
}

// close ends the flow; what is still on the wire is no longer listened for.
func (s *sender) close() {
	if s.closed || s.flow == nil {
		return
	}
	s.noteEnd()
	s.sending.close()
	s.flow.Close(s.w.now)
	if s.win != nil {
		s.win.flow.Close(s.w.now)
	}
}

// noteEnd notes the flow's last state.
func (s *sender) noteEnd() {
	if s.flow != nil {
		s.Final = s.flow.Snapshot()
	}
	if s.win != nil {
		s.Window = s.win.flow.Snapshot()
	}
}

func (s *sender) result() FlowResult {
	if !s.closed {
		s.noteEnd()
	}
	s.Read = s.rcv.upTo
	f := s.sending.result()
	if s.ask != nil {
		s.ask.result(&f)
	}
	return f
}

// apply has the transport keep to a limit.
func (s *sender) apply(l flow.Limit) {
	if s.w.scenario.Transport == Native {
		s.paced = cc.Repace(s.w.now, s.paced, s.pace, l.PacingRate)
	}
	s.limit, s.pace = l.Cwnd, l.PacingRate
	if l.Now && s.held {
		s.wake()
	}
}

// wake has the sender look at its clock now; the flow calls it.
func (s *sender) wake() {
	if !s.closed {
		s.waking.planBy(s.w.now)
	}
}

// pump sends new data as far as the application and the flow allow.
func (s *sender) pump() {
	if s.held {
		before := s.sent
		if s.pumpHeld(); s.sent > before && !s.cfg.Upload { // a client has no datapath
			s.telling.planBy(s.w.now.Add(datapathTick))
		}
		return
	}
	for !s.closed && !s.pending() {
		n, next := s.src.available(s.w.now)
		if n == 0 {
			s.flow.Take(s.w.now, 0)
			s.resumeAt(next)
			return
		}
		g := s.flow.Take(s.w.now, min(n, sendBatch))
		if g.Bytes == 0 {
			return
		}
		s.src.taken += g.Bytes
		for left := g.Bytes; left > 0; {
			size := min(left, cc.DefaultMSS)
			left -= size
			s.extend(size, left == 0)
		}
		s.report.Written = s.sent
	}
}

// extend sends the next size bytes of the stream in a segment; pushed: no more was
// written.
func (s *sender) extend(size cc.Bytes, pushed bool) {
	s.sent += size
	s.board.Extend(s.sent, size, pushed)
	s.transmit(s.board.End() - 1)
}

// resumeAt plans to go on when the application has something again, or the pace allows it.
func (s *sender) resumeAt(at cc.Time) {
	if at == cc.Never || at == s.resumes {
		return
	}
	s.resumes = at
	s.w.at(at, func() {
		if s.paced > 0 {
			s.repair(0)
		}
		s.pump()
	})
}

// transmit puts segment number n on the wire.
func (s *sender) transmit(n int64) {
	now, seg := s.w.now, s.board.at(n)
	s.board.Transmit(now, n)
	a := arrival{n: n, tx: seg.tx, size: seg.size, pushed: seg.pushed, echo: s.heard, stamp: s.rcv.clock.reading(now)}
	if s.forecasts != nil {
		a.forForecast = s.describeForForecast(seg.size)
	}
	s.launch(a.size+HeaderBytes, s.cfg.ECN.codepoint(s.cfg.Algorithm), func(marked bool) {
		a.ce = marked
		s.arrive(a)
	})
	s.setAlarm()
}

// retransmit sends segment number n again.
func (s *sender) retransmit(n int64) {
	size := s.board.at(n).size
	s.report.Lost += size
	s.count(&s.Retransmits)
	s.spend(size)
	s.transmit(n)
}

// spend has what is sent next wait, for the pace, until size bytes have left.
func (s *sender) spend(size cc.Bytes) {
	if s.held && s.pace > 0 {
		s.paced = max(s.paced, s.w.now).Add(s.pace.TimeFor(size))
	}
}

// repair retransmits what is lost as far as the window and the pace allow, and at
// least atLeast segments of it.
func (s *sender) repair(atLeast int) {
	for !s.closed {
		n, ok := s.board.Repair()
		switch {
		case !ok:
			return
		case atLeast > 0:
		case s.board.Probing || s.board.Pipe+s.board.at(n).size > s.limit:
			return
		case s.paced > s.w.now:
			s.resumeAt(s.paced)
			return
		}
		atLeast--
		s.retransmit(n)
	}
}

// pending reports whether something waits to be sent again.
func (s *sender) pending() bool {
	_, ok := s.board.Repair()
	return ok
}

// arrive is the packet's arrival at the receiver.
func (s *sender) arrive(a arrival) {
	if s.closed {
		return
	}
	s.count(&s.Arrived)
	if s.rcv.addArrival(s.w.now, a) {
		s.deliver(a.size)
		if s.rcv.upTo == s.cfg.Bytes { // 0: no end
			s.Received = s.w.now.Sub(s.src.started)
		}
	}
	if s.forecasts != nil {
		s.noteForForecast(a.forForecast)
	}
	if s.ask != nil {
		s.ask.took(s.rcv.upTo)
	}
	if s.win != nil {
		s.win.noteArrival(a)
	}
	at, ok := s.rcv.acknowledges(s.w.now)
	if !ok {
		return
	}
	round := s.rcv.round
	s.w.at(at, func() {
		if s.rcv.round != round && s.rcv.delay > 0 { // a later packet acknowledged both
			return
		}
		s.answer()
	})
}

// hear takes in an acknowledgement that tells of the first upTo arrivals, and of the
// receiver's time unless that is nil.
func (s *sender) hear(upTo int, stamp *uint32) {
	if s.closed || upTo <= s.rcv.told {
		return
	}
	if stamp != nil {
		s.report.Peer = flow.PeerClock{At: s.w.now, Value: *stamp}
	}
	raw := time.Duration(0)
	newest := int64(-1)
	for _, a := range s.rcv.takeNews(upTo) {
		if rtt := s.acknowledge(a); rtt > 0 && a.tx > newest {
			raw, newest = rtt, a.tx
		}
	}
	if s.board.Heard(s.w.now, raw) && s.board.Pipe >= s.limit && s.board.LoseNewest() {
		s.repair(1) // else part of it may be lost, and fill the window until the timer fires again
	}
	found := s.board.Detect(s.w.now)
	if s.src.done() && len(s.board.segs) == 0 {
		s.tell(raw)
		s.Completed = s.w.now.Sub(s.src.started)
		s.close()
		return
	}
	atLeast := 0
	if found {
		atLeast = 1 // the flow learns of a loss from what is sent again
	}
	s.repair(atLeast)
	if s.held && s.forecasts == nil { // before anybody hears of the acknowledgement, which makes no room beside forecasts
		s.pumpHeld()
	}
	s.tell(raw)
	s.repair(0)
	s.setAlarm()
	s.pump()
}

// acknowledge notes one arrival and returns the round trip it shows; 0: none.
func (s *sender) acknowledge(a arrival) time.Duration {
	rtt, news := s.board.Arrive(s.w.now, a.n, a.tx)
	if news && a.ce {
		s.report.Marked += a.size
	}
	return rtt
}

// setAlarm plans the next look at the clock.
func (s *sender) setAlarm() {
	if !s.closed {
		s.looks.planBy(s.board.Deadline())
	}
}

// look does what is due by the clock.
func (s *sender) look() {
	if s.closed {
		return
	}
	switch {
	case s.board.Expired(s.w.now):
		s.report.Timeouts++
		s.count(&s.Timeouts)
		s.repair(1)
		s.tell(0)
		s.setAlarm()
	case s.board.Detect(s.w.now):
		s.repair(1)
		s.tell(0)
		s.repair(0)
		s.setAlarm()
		s.pump()
	default:
		s.setAlarm()
	}
}

// tell reports to the flow.
func (s *sender) tell(raw time.Duration) {
	s.report.At = s.w.now
	s.board.Describe(&s.report)
	s.report.RTT = 0
	if s.w.scenario.RawRTT || s.cfg.Upload || s.hold != nil {
		s.report.RTT = raw
	}
	if s.held {
		n, _ := s.src.available(s.w.now)
		s.write(n)
		s.report.Unsent = s.wrote - s.sent
		s.report.Written = s.wrote
		s.report.RwndFull = s.report.Unsent > 0 && s.sent+cc.DefaultMSS > s.edge && s.board.Pipe+cc.DefaultMSS <= s.limit
	}
	s.toldSent = s.sent
	s.flow.Report(s.report)
}

// record samples the flow's state.
func (s *sender) record() {
	if s.flow == nil || s.closed {
		return
	}
	s.sample(s.flow.Snapshot(), s.rcv.upTo)
}
