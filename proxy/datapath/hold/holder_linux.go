// Package hold keeps forwarded packets in the kernel until the congestion window of the host that they go to has room.
//
// An nftables rule sends the packets of clients into a netfilter queue. This package reads the first bytes of each
// packet, and gives the verdict "accept" when the host's window has room: a verdict is a departure. Packets wait by
// flow in a fair queue (RFC 8290), so addresses, ports, ICMP errors and encrypted content stay as they are.
//
// The kernel lets packets pass by themselves when the queue is full, and when its process is gone. A process that is
// gone loses what waited.
//
//	Queue      the kernel's queue: packets in, verdicts out
//	Copies     copies of what clients send, for the server names of QUIC
//	Holder     one goroutine on a thread of its own: receives, decides, gives verdicts
//	client     an address with held packets
//	lane       the packets of one client under the same terms: a fair queue before a part of a window
package hold

import (
	"context"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Bounds of what a Holder keeps. Beyond those of flows a client's further ones are decided packet by packet, and wait
// in one queue. Beyond that of clients packets pass and are counted. Beyond those of waiting packets the flow that has
// most waiting loses its oldest (RFC 8290 §4.1).
const (
	maxFlows         = 65_536
	maxClientFlows   = 1024
	maxClients       = 10_000
	maxLanesOfAll    = 1 << 16 // a lane has an identifier of 16 bits
	maxLanePackets   = 1024
	maxLaneBytes     = cc.Bytes(1 << 20)
	maxWaitingBytes  = cc.Bytes(32 << 20) // of all clients
	kernelQueueLimit = 16_384             // packets that wait in the kernel at once
	// IdleQueueLimit replaces kernelQueueLimit while no packets come: if this process stands still then, others pass at
	// once. One batch shows that the queue was full.
	IdleQueueLimit = receiveBatch
)

const (
	flowIdleTime   = 60 * time.Second // a flow is decided anew after this
	clientIdleTime = 30 * time.Second // a client gives its part of a window back after this
	sweepEvery     = 10 * time.Millisecond
	sweepTime      = time.Second // each flow and client is checked for idleness as often as this, on average
	statesEvery    = time.Second
	checkEvery     = 5 * time.Millisecond // while a client has packets
	activeTime     = 3 * time.Second      // a client has none after this
	// Packets that come more often than once in crowdedTime are received together, every mergeTime.
	crowdedTime = 400 * time.Microsecond
	mergeTime   = 200 * time.Microsecond
	// Several segments of a flow stay in one packet (GSO) while the windows of all busy clients allow this rate, at which
	// 64 KiB take 10 ms.
	gsoRate = cc.Rate(50e6)
	// ServeQueue wakes up this often while packets come. A wait that is longer than asked for by maxPause is a pause of
	// this process.
	watchEvery = 250 * time.Millisecond
	maxPause   = 2 * time.Second
	// Packets come into the queue for servedBusy after each serveBusyEvery, and for servedIdle after each serveIdleEvery.
	servedBusy     = 2 * time.Second
	serveBusyEvery = 500 * time.Millisecond
	servedIdle     = time.Minute
	serveIdleEvery = servedIdle / 3
	serveAnewEvery = 100 * time.Millisecond // at most, however often rules change
)

// Verdicts gives packets their verdicts. *Queue implements it.
type Verdicts interface {
	Accept(id uint32)
	AcceptWithMark(id, mark uint32)
	Drop(id uint32)
	// SetGSO says whether several segments of a flow stay in one packet, or come one by one.
	SetGSO(on bool)
	// Flush carries out the verdicts so far.
	Flush() error
}

// Echoes sends requests that clients answer. *EchoSocket implements it.
type Echoes interface {
	Send(to netip.Addr, id, sequence uint16) // an ICMP echo request
	// FindNeighbour returns the neighbour at an address; false: there is none that can be asked.
	FindNeighbour(netip.Addr) (Neighbour, bool)
	AskNeighbour(n *Neighbour, marked bool)
}

// Decision is what policy says of a flow.
type Decision struct {
	Refuse bool       // its packets are dropped
	Manage bool       // its packets wait for room as Terms say; otherwise they pass
	Terms  flow.Terms // of Manage
	// Acknowledged: answers to requests acknowledge the packets. Otherwise nothing does, and Terms bound only their rate.
	Acknowledged bool
}

// Config is what a Holder needs. Uplink, EchoTo, NeedsName, ReadName, CongestionMark and Log may
// be left out.
type Config struct {
	Flows  *flow.Manager
	Clock  func() cc.Time
	Decide func(f FlowKey, serverName string) Decision
	// Uplink says that the packets come from clients. Names in this package are those of the other direction: what they
	// call a client is the address that packets go to, here a server.
	Uplink bool
	// EchoTo returns the host that answers echo requests about packets to an address. Not valid: none does. nil: the
	// address does.
	EchoTo func(netip.Addr) netip.Addr
	// NeedsName reports whether Decide looks at the server name of a flow. ReadName returns the name in a ClientHello,
	// empty if there is none. A flow is decided anew when its name becomes known later. Both nil: no names are read.
	NeedsName func(FlowKey) bool
	ReadName  func(clientHello []byte) string
	// CongestionMark are the bits by which the rules that hold packets know those that are to say CE; 0: there is no
	// such rule, and packets are dropped instead.
	CongestionMark uint32
	// KeepServed makes packets come into the queue for that time from now; 0: no longer. So packets wait no longer than
	// that if this process stands still. It reports whether rules are installed that send packets into the queue.
	KeepServed func(time.Duration) (isInstalled bool, err error)
	Log        *slog.Logger
}

// Stats counts packets and bytes since the start.
type Stats struct {
	AcceptedPackets, AcceptedBytes uint64 // let go, at once or after a wait
	HeldPackets                    uint64 // had to wait
	LateDrops                      uint64 // dropped by CoDel, or after a pause of the process
	OverflowDrops                  uint64 // dropped since their queue was full
	MarkedPackets                  uint64 // CE in place of a drop
	RefusedPackets                 uint64 // dropped by a rule
	PassedPackets                  uint64 // let go unmanaged: unreadable, or above a bound
	UnmanagedPackets               uint64 // let go unmanaged, as rules say
	Waiting                        int    // packets now
	WaitingBytes                   uint64
	Echoes, EchoAnswers            uint64
	Clients, Flows                 int
}

// ClientState is the state of the held packets of one client under the same terms.
type ClientState struct {
	Address        netip.Addr
	Group          string
	Waiting        int // packets
	WaitingBytes   cc.Bytes
	BusyFlows      int
	AcknowledgedBy string // echo, neighbour; share: by the acknowledgements of the client's TCP; none: there is none
	EchoTrouble    string // why echo requests do not acknowledge, though the client answers; empty: no reason is known
	Flow           *flow.Snapshot
}

// Holder decides about the packets of a queue. New starts nothing; ServeQueue serves the queue.
//
//	field                          used by
//	mu, woken, outdated, wake      any goroutine, under mu; a lane's isWoken too
//	stats, states                  any goroutine
//	all others                     the goroutine of ServeQueue alone
type Holder struct {
	cfg    Config
	queue  Verdicts
	echoes Echoes
	stats  counters
	states atomic.Pointer[[]ClientState]

	clients      map[netip.Addr]*client
	active       []*client // those with isListed: they had packets at the last checkActive
	gsoOn        bool      // the last argument of SetGSO
	flows        map[FlowKey]*flowState
	names        nameTable
	lanes        map[uint16]*lane // by the identifier of their echo requests
	lastID       uint16
	waitingBytes cc.Bytes // of all lanes
	lastSweep    cc.Time
	lastStates   cc.Time // when states were published last
	lastNames    cc.Time // when names were forgotten last
	lastCheck    cc.Time
	lastCount    cc.Time // when busy flows were counted last
	lastPacket   cc.Time // when one came last
	lastServed   cc.Time // when KeepServed was called last; 0: never
	servedAsBusy bool    // it was called for the short time, because packets come
	isInstalled  bool    // the last result of KeepServed
	servedError  string  // the last error of KeepServed; empty: none

	mu       sync.Mutex
	woken    []*lane // the window of these may have room by now
	outdated bool    // Reconsider was called
	wake     func()  // makes ServeQueue look at woken and outdated; nil: it does not run
}

type counters struct {
	acceptedPackets, acceptedBytes, held, late, overflow, refused, passed, unmanaged atomic.Uint64
	marked, echoes, answers                                                          atomic.Uint64
	waiting, waitingBytes, clients, flows                                            atomic.Int64
}

// flowState is the decision about a flow.
type flowState struct {
	lane    *lane // nil: its packets do not wait
	refused bool
	used    cc.Time // when a packet came last
	// isCrowded reports whether the client has too many flows: this one shares a queue with others.
	isCrowded bool
	name      *knownName // nil: none was known when it was decided
	// outdated reports that the decision was made under another name. The flow is decided anew once none of its packets
	// waits, so that they keep their order.
	outdated bool
}

// New returns a Holder that answers through queue and asks clients through echoes.
func New(cfg Config, queue Verdicts, echoes Echoes) *Holder {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Holder{
		cfg: cfg, queue: queue, echoes: echoes,
		clients: map[netip.Addr]*client{}, flows: map[FlowKey]*flowState{}, lanes: map[uint16]*lane{},
		names: nameTable{map[FlowKey]*knownName{}, map[FlowKey]*pendingHandshake{}},
	}
}

// ServeQueue serves a netfilter queue until ctx is done, and then lets all waiting packets go.
// It returns an error if the queue fails; the packets that waited are lost then.
func (h *Holder) ServeQueue(ctx context.Context, q *Queue, echoes *EchoSocket, copies *Copies) error {
	// The thread blocks in poll by itself, which keeps the scheduler's network poller out of each packet's way.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer context.AfterFunc(ctx, h.wakeServer)() // it may run after this function has returned, and q is closed
	h.setWake(q.Wake)
	defer h.setWake(nil)
	defer h.closeClients()
	others := append(echoes.descriptors(), copies.socket)
	lastRound := h.cfg.Clock()
	h.keepServed(q, lastRound)
	for ctx.Err() == nil {
		timeout := h.nextRound(q)
		hasOthers, err := q.Wait(timeout, others...)
		if err != nil {
			return err
		}
		now := h.cfg.Clock()
		if err := h.dropAfterPause(q, now.Sub(lastRound), timeout); err != nil {
			return err
		}
		if hasOthers {
			echoes.Receive(func(from netip.Addr, id, sequence uint16) { h.ReceiveEcho(now, from, id, sequence) })
			echoes.neighbourSocket.receiveAnswers(func(a neighbourAnswer) { h.receiveNeighbour(now, a) })
			// Copies come first: the answer to a ClientHello is decided by the name in it.
			if err := copies.Receive(func(packet []byte) { h.HandleCopy(now, packet) }); err != nil {
				return err
			}
		}
		received, err := q.Receive()
		if err != nil {
			return err
		}
		if received == IdleQueueLimit && !h.servedAsBusy { // the queue was full, so later packets have passed these
			q.ForEach(func(p Packet) { h.dropLate(now, p) })
		} else {
			q.ForEach(func(p Packet) { h.HandlePacket(now, p) })
		}
		sinceLast := now.Sub(lastRound)
		lastRound = h.cfg.Clock()
		if err := h.dropAfterPause(q, lastRound.Sub(now), 0); err != nil { // before any of them is let go
			return err
		}
		h.runDueWork(lastRound)
		h.keepServed(q, lastRound)
		if err := q.Flush(); err != nil {
			return err
		}
		if sinceLast < time.Duration(received)*crowdedTime && received < receiveBatch {
			nap := unix.NsecToTimespec(mergeTime.Nanoseconds())
			_ = unix.Nanosleep(&nap, nil) // interrupted: the next round comes sooner
		}
	}
	if _, err := h.cfg.KeepServed(0); err != nil {
		h.cfg.Log.Warn("hold: packets come into a queue that is not served", "err", err)
	}
	h.releaseWaiting()
	return q.Flush()
}

// keepServed makes packets come into the queue for a while longer: for a short while if some come now. It logs when
// the rules that send them come and go.
func (h *Holder) keepServed(q *Queue, now cc.Time) {
	busy := h.isBusy(now)
	every, lasts, length := serveIdleEvery, servedIdle, uint32(IdleQueueLimit)
	if busy {
		every, lasts, length = serveBusyEvery, servedBusy, kernelQueueLimit
	}
	if q.hasNewTables {
		every = serveAnewEvery
	}
	wasServed, wasBusy := h.lastServed != 0, h.servedAsBusy
	if wasServed && now.Sub(h.lastServed) < every && (!busy || wasBusy) {
		return
	}
	h.lastServed, h.servedAsBusy, q.hasNewTables = now, busy, false
	if busy != wasBusy {
		q.SetLength(length)
	}
	isInstalled, err := h.cfg.KeepServed(lasts)
	switch {
	case err != nil:
		if err.Error() != h.servedError {
			h.servedError = err.Error()
			h.cfg.Log.Warn("hold: packets pass the queue", "err", err)
		}
		return
	case isInstalled && !h.isInstalled:
		h.cfg.Log.Info("UDP is held: rules send it into the queue")
	case !isInstalled && (h.isInstalled || !wasServed):
		h.cfg.Log.Warn("UDP passes: no rules send it into the queue; rules apply --udp (up: --udp-up) installs them")
	}
	h.isInstalled, h.servedError = isInstalled, ""
}

// nextRound returns for how long ServeQueue may wait for packets.
func (h *Holder) nextRound(q *Queue) time.Duration {
	switch {
	case len(h.active) > 0:
		return checkEvery
	case q.hasNewTables:
		return serveAnewEvery
	case h.servedAsBusy:
		return watchEvery
	}
	return serveIdleEvery
}

// dropLate drops a packet that later ones have passed.
func (h *Holder) dropLate(now cc.Time, p Packet) {
	h.lastPacket = now
	h.stats.late.Add(1)
	h.queue.Drop(p.ID)
}

// dropAfterPause drops what waits here and in the kernel if a step took longer than allowed by maxPause, because this
// process stood still then. Later packets have passed, so those that waited would arrive out of order.
func (h *Holder) dropAfterPause(q *Queue, took, allowed time.Duration) error {
	if took <= allowed+maxPause {
		return nil
	}
	h.cfg.Log.Warn("hold: this process stood still; packets that waited are dropped", "for", took)
	for _, c := range h.clients {
		for _, l := range c.lanes {
			l.clearQueue(false)
		}
	}
	for left, received := kernelQueueLimit, receiveBatch; received == receiveBatch && left > 0; left -= received {
		var err error
		if received, err = q.Receive(); err != nil {
			return err
		}
		q.ForEach(func(p Packet) { h.dropLate(h.cfg.Clock(), p) })
	}
	return q.Flush()
}

// setWake sets what makes ServeQueue look at woken lanes.
func (h *Holder) setWake(wake func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wake = wake
}

// wakeServer wakes ServeQueue, if it runs.
func (h *Holder) wakeServer() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.wake != nil {
		h.wake()
	}
}

// Reconsider makes the Holder ask for all decisions again, since rules have changed.
// Packets that wait go at once, in their order. Any goroutine may call it.
func (h *Holder) Reconsider() {
	h.mu.Lock()
	h.outdated = true
	h.mu.Unlock()
	h.wakeServer()
}

// HandlePacket lets a packet go, drops it, or keeps it waiting, by the decision about its flow.
func (h *Holder) HandlePacket(now cc.Time, p Packet) {
	h.lastPacket = now
	head, ok := parseHeader(p.Content)
	if !ok {
		h.stats.passed.Add(1)
		h.queue.Accept(p.ID)
		return
	}
	state := h.flowOf(now, head.flow)
	switch {
	case state == nil:
		h.stats.passed.Add(1)
		h.queue.Accept(p.ID)
	case state.refused:
		h.stats.refused.Add(1)
		h.queue.Drop(p.ID)
	case state.lane == nil:
		h.stats.unmanaged.Add(1)
		h.queue.Accept(p.ID)
	default:
		c := state.lane.client
		c.used = now
		if !c.isListed {
			c.isListed = true
			h.active = append(h.active, c)
		}
		held := heldPacket{id: p.ID, size: cc.Bytes(p.Length), mark: p.Mark}
		if h.cfg.CongestionMark != 0 {
			held.ecn = head.ecn
		}
		key := head.flow
		if state.isCrowded {
			key = FlowKey{}
		}
		state.lane.handlePacket(now, key, held)
	}
}

// acceptPacket lets a packet go.
func (h *Holder) acceptPacket(p heldPacket) {
	h.stats.acceptedPackets.Add(1)
	h.stats.acceptedBytes.Add(uint64(p.size))
	if p.marked {
		h.stats.marked.Add(1)
		h.queue.AcceptWithMark(p.id, p.mark|h.cfg.CongestionMark)
		return
	}
	h.queue.Accept(p.id)
}

// sendRequest calls send for a request that must follow the packets which have been let go. So it flushes their
// verdicts first.
func (h *Holder) sendRequest(send func()) {
	if err := h.queue.Flush(); err != nil {
		return // the end of this round reports an error that lasts
	}
	h.stats.echoes.Add(1)
	send()
}

// receiveNeighbour takes in a neighbour's answer. It ignores those of other hosts, and those without a request.
func (h *Holder) receiveNeighbour(now cc.Time, a neighbourAnswer) {
	c := h.clients[a.from]
	if c == nil {
		return
	}
	ok, marked := a.matchRequest(&c.neighbour)
	if !ok {
		return
	}
	request, ok := c.numbering.Answer(now, marked)
	if !ok || now < request.lane.byNeighbour.barredUntil {
		return
	}
	h.stats.answers.Add(1)
	request.lane.receiveAnswer(now, &request.lane.byNeighbour, request.sequence)
}

// ReceiveEcho takes in the answer to an echo request. Answers that nothing asked for are ignored.
func (h *Holder) ReceiveEcho(now cc.Time, from netip.Addr, id, sequence uint16) {
	l := h.lanes[id]
	if l == nil || !l.acknowledged || now < l.byEcho.barredUntil ||
		l.client.echoTo.WithZone("") != from.Unmap().WithZone("") {
		return
	}
	h.stats.answers.Add(1)
	l.receiveAnswer(now, &l.byEcho, sequence)
}

// assignID returns an identifier for a lane's echo requests. There must be fewer than maxLanesOfAll lanes.
func (h *Holder) assignID(l *lane) uint16 {
	for {
		h.lastID++
		if h.lanes[h.lastID] == nil {
			h.lanes[h.lastID] = l
			return h.lastID
		}
	}
}

// flowOf returns the decision about a flow; nil: there is no room for another client. Where there is no room for
// another flow, the decision is not kept.
func (h *Holder) flowOf(now cc.Time, key FlowKey) *flowState {
	state := h.flows[key]
	if state != nil && !state.isClosed() && (!state.outdated || state.hasPackets(key)) {
		state.used = now
		state.name.markUsed(now)
		return state
	}
	old, isNew := state, state == nil
	name := h.names.nameOf(now, h.swapUnlessUplink(key))
	decision := h.cfg.Decide(key, name.text())
	state = &flowState{refused: decision.Refuse, used: now, name: name}
	if decision.Manage && !decision.Refuse {
		c := h.clients[key.Target.Addr()]
		if c == nil {
			if len(h.clients) >= maxClients {
				return nil
			}
			c = h.newClient(now, key.Target.Addr())
			h.clients[c.address] = c
		}
		if isNew && (len(h.flows) >= maxFlows || c.flows >= maxClientFlows) {
			c.isCrowded = true
		}
		state.isCrowded = isNew && c.isCrowded
		var err error
		if state.lane, err = c.laneFor(now, decision); err != nil {
			h.cfg.Log.Debug("hold: packets of a flow pass unmanaged", "client", key.Target, "server", key.Source, "err", err)
		}
	}
	if !state.isCrowded && (!isNew || len(h.flows) < maxFlows) {
		old.countFlow(-1)
		state.countFlow(1)
		h.flows[key] = state
	}
	return state
}

// countFlow adds n to the number of the client's flows. A nil state has no client.
func (s *flowState) countFlow(n int) {
	if s != nil && s.lane != nil {
		s.lane.client.flows += n
	}
}

// isClosed reports whether the flow's client has given its part of the window back.
func (s *flowState) isClosed() bool { return s.lane != nil && s.lane.client.closed }

// hasPackets reports whether packets of the flow wait.
func (s *flowState) hasPackets(key FlowKey) bool { return s.lane != nil && s.lane.fair.HasPackets(key) }

// swapUnlessUplink turns the key of held packets into that of what their client sends, and back.
func (h *Holder) swapUnlessUplink(key FlowKey) FlowKey {
	if h.cfg.Uplink {
		return key
	}
	return FlowKey{key.Target, key.Source, key.Protocol}
}

// HandleCopy reads a copy of a packet that a client sends. Once the packets so far show a server name, the flow is
// decided by it.
func (h *Holder) HandleCopy(now cc.Time, packet []byte) {
	head, ok := parseHeader(packet)
	if !ok || len(head.payload) == 0 || h.cfg.ReadName == nil {
		return
	}
	key := h.swapUnlessUplink(head.flow)
	if !h.cfg.NeedsName(key) {
		return
	}
	if hello := h.names.addDatagram(now, head.flow, head.payload); hello != nil {
		h.names.setName(now, head.flow, h.cfg.ReadName(hello))
		if state := h.flows[key]; state != nil {
			state.outdated = state.name != h.names.known[head.flow]
		}
	}
}

// runDueWork lets packets go that have room by now, carries out Reconsider, and does what is due by time.
func (h *Holder) runDueWork(now cc.Time) {
	h.mu.Lock()
	woken, outdated := h.woken, h.outdated
	h.woken, h.outdated = nil, false
	for _, l := range woken {
		l.isWoken = false
	}
	h.mu.Unlock()
	for _, l := range woken {
		l.releaseFitting(now)
	}
	if outdated {
		h.releaseWaiting()
		h.closeClients()
	}
	if now.Sub(h.lastCheck) >= checkEvery {
		h.lastCheck = now
		h.checkActive(now)
	}
	if elapsed := now.Sub(h.lastSweep); elapsed >= sweepEvery {
		h.lastSweep = now
		h.forgetIdle(now, min(1, elapsed.Seconds()/sweepTime.Seconds()))
	}
	if now.Sub(h.lastStates) >= statesEvery {
		h.lastStates = now
		h.publishStates()
	}
	h.stats.clients.Store(int64(len(h.clients)))
	h.stats.flows.Store(int64(len(h.flows)))
}

// checkActive checks the timers of the clients that have packets, and takes the others off the list. Now and then it
// counts busy flows, and decides about GSO.
func (h *Holder) checkActive(now cc.Time) {
	h.active = slices.DeleteFunc(h.active, func(c *client) bool {
		c.isListed = !c.closed && c.isActive(now)
		return !c.isListed
	})
	for _, c := range h.active {
		for _, l := range c.lanes {
			l.checkTimers(now)
		}
	}
	if now.Sub(h.lastCount) < countFlowsTime {
		return
	}
	h.lastCount = now
	isFast, isSlow := false, false
	for _, c := range h.active {
		for _, l := range c.lanes {
			l.countFlows(now)
			isFast = isFast || l.usualRate() >= gsoRate
			isSlow = isSlow || l.busy > 0 && l.usualRate() < gsoRate
		}
	}
	if on := isFast && !isSlow; on != h.gsoOn {
		h.gsoOn = on
		h.queue.SetGSO(on)
	}
}

// forgetIdle forgets flows and clients that have had no packets for a while. It checks a share of them, in the random
// order of maps, because checking all at once would take tens of milliseconds.
func (h *Holder) forgetIdle(now cc.Time, share float64) {
	left := 1 + int(share*float64(len(h.clients)))
	for address, c := range h.clients {
		if now.Sub(c.used) >= clientIdleTime && c.isEmpty() {
			c.closeLanes(now)
			delete(h.clients, address)
		}
		// While packets wait in the shared queue, later ones of the same flows must not get a queue of their own.
		c.isCrowded = c.isCrowded && (c.flows >= maxClientFlows || !c.isEmpty())
		if left--; left == 0 {
			break
		}
	}
	left = 1 + int(share*float64(len(h.flows)))
	for key, s := range h.flows {
		if now.Sub(s.used) >= flowIdleTime || s.isClosed() {
			s.countFlow(-1)
			delete(h.flows, key)
		}
		if left--; left == 0 {
			break
		}
	}
	if share == 1 || now.Sub(h.lastNames) >= sweepTime {
		h.lastNames = now
		h.names.forgetIdle(now)
	}
}

// closeClients gives all shares of windows back and forgets all decisions.
func (h *Holder) closeClients() {
	now := h.cfg.Clock()
	for _, c := range h.clients {
		c.closeLanes(now)
	}
	clear(h.clients)
	clear(h.flows)
	h.active = nil
}

// isBusy reports whether packets wait, or came a moment ago.
func (h *Holder) isBusy(now cc.Time) bool {
	return h.waitingBytes > 0 || h.lastPacket != 0 && now.Sub(h.lastPacket) < activeTime
}

// publishStates makes the clients' states visible to other goroutines. Those of idle clients have not changed.
func (h *Holder) publishStates() {
	states := make([]ClientState, 0, len(h.clients))
	for _, c := range h.clients {
		for _, l := range c.lanes {
			if c.isListed || !c.isPublished {
				l.published = l.describeLane()
			}
			states = append(states, l.published)
		}
		c.isPublished = !c.isListed
	}
	h.states.Store(&states)
}

// States returns the state of each client's packets, up to a second old. Any goroutine may call it.
func (h *Holder) States() []ClientState {
	if states := h.states.Load(); states != nil {
		return *states
	}
	return nil
}

// releaseWaiting lets all waiting packets go, each flow's in its order.
func (h *Holder) releaseWaiting() {
	for _, c := range h.clients {
		for _, l := range c.lanes {
			l.clearQueue(true)
		}
	}
}

// Stats returns the counts. Any goroutine may call it.
func (h *Holder) Stats() Stats {
	c := &h.stats
	return Stats{
		AcceptedPackets: c.acceptedPackets.Load(), AcceptedBytes: c.acceptedBytes.Load(), HeldPackets: c.held.Load(),
		LateDrops: c.late.Load(), OverflowDrops: c.overflow.Load(), RefusedPackets: c.refused.Load(),
		MarkedPackets: c.marked.Load(), Echoes: c.echoes.Load(), EchoAnswers: c.answers.Load(),
		PassedPackets: c.passed.Load(), UnmanagedPackets: c.unmanaged.Load(),
		Waiting: int(c.waiting.Load()), WaitingBytes: uint64(c.waitingBytes.Load()),
		Clients: int(c.clients.Load()), Flows: int(c.flows.Load()),
	}
}
