package telemetry

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

const (
	// maxSignalReaders bounds those that read signals at once, because each reads all flows.
	maxSignalReaders = 4
	// The shortest and the longest time between two readings, and the default.
	minSignalPeriod, maxSignalPeriod = 100 * time.Millisecond, time.Minute
	signalPeriod                     = time.Second
	// routesPeriod is the time after which rates of links and routes to hosts are read again.
	routesPeriod = 10 * time.Second
)

// Signal is what an interface of this machine carried since the last reading, and how long it was queued. Shapers read
// it from /v1/signals.
type Signal struct {
	// Time is when it was read, in Unix time.
	Time      float64 `json:"time"`
	Interface string  `json:"interface"`
	// QueueingDelay is the median of what connections that sent through the interface saw, weighted by their bytes.
	// Absent: none of them sent.
	QueueingDelay *float64 `json:"queueing_delay_seconds,omitempty"`
	// QueueingDelay95 is their 95th percentile.
	QueueingDelay95 *float64 `json:"queueing_delay_p95_seconds,omitempty"`
	// ReceiveQueueingDelay is the median of received bytes. Absent: no receive window is managed there.
	ReceiveQueueingDelay *float64 `json:"receive_queueing_delay_seconds,omitempty"`
	// Sent and Received are the rates of all traffic, ProxySent and ProxyReceived those of the proxy's payload.
	Sent          cc.Rate `json:"sent_bits_per_second"`
	Received      cc.Rate `json:"received_bits_per_second"`
	ProxySent     cc.Rate `json:"proxy_sent_bits_per_second"`
	ProxyReceived cc.Rate `json:"proxy_received_bits_per_second"`
	// Capacity is the rate of the queue or the cable. Absent: neither has one.
	Capacity cc.Rate `json:"capacity_bits_per_second,omitempty"`
	// Load is the part of Capacity that is sent. Absent: it is unknown.
	Load *float64 `json:"load,omitempty"`
	// Connections are those that moved bytes through the interface.
	Connections int `json:"connections"`
}

// LinkReader reads interfaces; *linkstat.Links is one. One goroutine uses it at a time.
type LinkReader interface {
	ReadTraffic(withRates bool) ([]linkstat.Traffic, error)
	FindInterface(host netip.Addr) string
	Close()
}

// signalReader computes signals from what changes between two readings. An Observer calls addClosed, because short
// connections begin and end between two readings. addClosed may be called on any goroutine; one goroutine calls the
// rest.
type signalReader struct {
	source  Source
	links   LinkReader
	at      time.Time                   // of the last reading; zero: there was none
	traffic map[string]linkstat.Traffic // by interface, at the last reading
	routes  map[netip.Addr]string       // the interface to a host
	// routesAt is when routes and the rates of links were read.
	routesAt time.Time
	// moved is what the legs of open flows had sent and received at the last reading. gone is the same for flows that
	// were no longer open at that reading, until addClosed has their last state.
	moved, gone map[uint64][2]legBytes

	mu     sync.Mutex
	closed [][2]legState // since the last reading, maxClosed at most
}

// maxClosed bounds the connections that end between two readings and count, of about 200 bytes each.
const maxClosed = 16 << 10

// legBytes is what a leg has sent and received so far.
type legBytes struct{ sent, received cc.Bytes }

// legState is the state of a leg: what it has moved, and how long that was queued.
type legState struct {
	legBytes
	flow uint64
	// host is where the leg leads. Not valid: a tunnel ends in this program, and no route leads to addresses inside it.
	host netip.Addr
	// sending and arrival are the queueing delays of what is sent and received. Below 0: unknown.
	sending, arrival time.Duration
}

// legsOf returns the states of the client's and the server's leg.
func legsOf(f *proxy.FlowInfo) [2]legState {
	return [2]legState{
		legOf(f.ID, f.Source.Addr(), &f.Client, &f.Down, &f.Up),
		legOf(f.ID, f.Target.Addr(), &f.Server, &f.Up, &f.Down),
	}
}

// legOf returns the state of a leg that sends for the direction out and receives for the direction in.
func legOf(flow uint64, host netip.Addr, leg *datapath.Info, out, in *proxy.DirectionInfo) legState {
	s := legState{legBytes: legBytes{out.Written, in.Read}, flow: flow, host: host, sending: -1, arrival: -1}
	if leg.Tier != "kernel" {
		s.host = netip.Addr{}
	}
	switch {
	case out.Managed && out.Flow.LatestRTT > 0:
		s.sending = out.Flow.QueueingDelay
	case leg.SRTT > 0 && leg.MinRTT > 0:
		s.sending = max(0, leg.SRTT-leg.MinRTT)
	}
	if r := &in.Receive; r.Held && r.Flow.LatestRTT > 0 {
		s.arrival = r.Flow.QueueingDelay
	}
	return s
}

// addClosed stores the last state of a connection for the next reading.
func (s *signalReader) addClosed(f *proxy.FlowInfo) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.closed) < maxClosed {
		s.closed = append(s.closed, legsOf(f))
	}
}

// delaySample is a queueing delay that bytes saw.
type delaySample struct {
	delay time.Duration
	bytes cc.Bytes
}

// interfaceSums is what the connections through an interface did.
type interfaceSums struct {
	connections      int
	sent, received   cc.Bytes
	sending, arrival []delaySample
}

// readSignals returns a signal for each interface, by name, over the time since the last reading. The first reading
// has rates of 0.
func (s *signalReader) readSignals(now time.Time) ([]Signal, error) {
	withRates := now.Sub(s.routesAt) >= routesPeriod
	if withRates {
		s.routesAt, s.routes = now, map[netip.Addr]string{}
	}
	traffic, err := s.links.ReadTraffic(withRates)
	if err != nil {
		return nil, err
	}
	sums, seconds := s.sumInterfaces(), now.Sub(s.at).Seconds()
	rate := func(bytes cc.Bytes) cc.Rate {
		if s.at.IsZero() || seconds <= 0 {
			return 0
		}
		return cc.Rate(8 * float64(bytes) / seconds)
	}
	before := s.traffic
	s.traffic = map[string]linkstat.Traffic{}
	out := make([]Signal, 0, len(traffic))
	for _, t := range traffic {
		s.traffic[t.Name] = t
		was, known := before[t.Name]
		if !known {
			was = t
		}
		sum := sums[t.Name]
		signal := Signal{
			Time: unixSeconds(now), Interface: t.Name, Sent: rate(max(0, t.Sent-was.Sent)),
			Received: rate(max(0, t.Received-was.Received)), ProxySent: rate(sum.sent), ProxyReceived: rate(sum.received),
			Capacity: t.Rate, Connections: sum.connections, QueueingDelay: delayQuantile(sum.sending, .5),
			QueueingDelay95: delayQuantile(sum.sending, .95), ReceiveQueueingDelay: delayQuantile(sum.arrival, .5),
		}
		if t.Rate > 0 {
			signal.Load = new(float64(signal.Sent) / float64(t.Rate))
		}
		out = append(out, signal)
	}
	s.at = now
	slices.SortFunc(out, func(a, b Signal) int { return cmp.Compare(a.Interface, b.Interface) })
	return out, nil
}

// sumInterfaces adds up what connections did since the last reading. In the first one nothing has moved. It reads open
// connections before those that have closed. One that closes in between is in both: the second time only what it has
// moved since the first counts.
func (s *signalReader) sumInterfaces() map[string]interfaceSums {
	sums, moved, first := map[string]interfaceSums{}, map[uint64][2]legBytes{}, s.moved == nil
	_, flows := s.source.Flows()
	for f := range flows {
		if !f.Relayed() {
			continue
		}
		legs := legsOf(f)
		moved[f.ID] = [2]legBytes{legs[0].legBytes, legs[1].legBytes}
		if !first {
			s.addLegs(sums, &legs, s.moved[f.ID]) // absent: it has begun since
		}
	}
	s.mu.Lock()
	closed := s.closed
	s.closed = nil
	s.mu.Unlock()
	for i := range closed {
		id := closed[i][0].flow
		was := cmp.Or(moved[id], s.moved[id], s.gone[id])
		delete(moved, id)
		delete(s.moved, id)
		if !first {
			s.addLegs(sums, &closed[i], was)
		}
	}
	maps.DeleteFunc(s.moved, func(id uint64, _ [2]legBytes) bool { _, open := moved[id]; return open })
	s.moved, s.gone = moved, s.moved
	return sums
}

// addLegs adds what the legs of a connection have moved beyond was.
func (s *signalReader) addLegs(sums map[string]interfaceSums, legs *[2]legState, was [2]legBytes) {
	for i := range legs {
		leg := &legs[i]
		sent, received := leg.sent-was[i].sent, leg.received-was[i].received
		if sent+received <= 0 || !leg.host.IsValid() {
			continue
		}
		name, known := s.routes[leg.host]
		if !known {
			name = s.links.FindInterface(leg.host)
			s.routes[leg.host] = name
		}
		sum := sums[name]
		sum.connections++
		sum.sent += sent
		sum.received += received
		if sent > 0 && leg.sending >= 0 {
			sum.sending = append(sum.sending, delaySample{leg.sending, sent})
		}
		if received > 0 && leg.arrival >= 0 {
			sum.arrival = append(sum.arrival, delaySample{leg.arrival, received})
		}
		sums[name] = sum
	}
}

// delayQuantile returns the quantile p in seconds, weighted by bytes; nil: there are no samples. It sorts the samples.
func delayQuantile(samples []delaySample, p float64) *float64 {
	total := cc.Bytes(0)
	for _, s := range samples {
		total += s.bytes
	}
	slices.SortFunc(samples, func(a, b delaySample) int { return cmp.Compare(a.delay, b.delay) })
	left := p * float64(total)
	for _, s := range samples {
		if left -= float64(s.bytes); left <= 0 {
			return new(s.delay.Seconds())
		}
	}
	return nil
}

// serveSignals answers with the signals of one second. With follow=200ms it writes a line for each interface each 200
// ms, until the client goes or the server ends. readers bounds how many read at once.
func (p Pages) serveSignals(w http.ResponseWriter, r *http.Request, readers chan struct{}) {
	period, follow, only := signalPeriod, r.URL.Query().Get("follow"), r.URL.Query().Get("interface")
	if follow != "" {
		var err error
		if period, err = time.ParseDuration(follow); err != nil || period < minSignalPeriod || period > maxSignalPeriod {
			http.Error(w, fmt.Sprintf("follow is %q, but must be a time from %v to %v, such as 200ms", follow,
				minSignalPeriod, maxSignalPeriod), http.StatusBadRequest)
			return
		}
	}
	select {
	case readers <- struct{}{}:
		defer func() { <-readers }()
	default:
		http.Error(w, fmt.Sprintf("%d read signals already, and no more may; end one of them", maxSignalReaders),
			http.StatusServiceUnavailable)
		return
	}
	links, err := p.Links()
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	defer links.Close()
	reader := &signalReader{source: p.Source, links: links}
	if p.Observer != nil {
		defer p.Observer.addReader(reader.addClosed)()
	}
	if _, err := reader.readSignals(p.Wall()); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	tick := time.NewTicker(period)
	defer tick.Stop()
	control, out := http.NewResponseController(w), json.NewEncoder(w)
	for {
		select {
		case <-r.Context().Done():
			return
		case <-p.ending:
			return
		case <-tick.C:
		}
		signals, err := reader.readSignals(p.Wall())
		if err != nil {
			p.logUnsent(r, err)
			return
		}
		signals = slices.DeleteFunc(signals, func(s Signal) bool { return only != "" && s.Interface != only })
		if follow == "" {
			p.serveList(w, r, len(signals), eachOf(signals, func(s *Signal) any { return s }))
			return
		}
		// Each reading extends the deadline, which would otherwise end the answer. Only writers of tests have none.
		_ = control.SetWriteDeadline(p.Wall().Add(answerTimeout))
		for i := range signals {
			if err := out.Encode(&signals[i]); err != nil {
				p.logUnsent(r, err)
				return
			}
		}
		_ = control.Flush()
	}
}
