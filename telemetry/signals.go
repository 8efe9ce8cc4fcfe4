package telemetry

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

const (
	// maxSignalReaders bounds those that read signals at once: each looks at all flows.
	maxSignalReaders = 4
	// The shortest and the longest time between two looks, and the one unless asked for another.
	minSignalPeriod, maxSignalPeriod = 100 * time.Millisecond, time.Minute
	signalPeriod                     = time.Second
	// relearnPeriod is the time after which rates of links and routes to hosts are read again.
	relearnPeriod = 10 * time.Second
)

// Signal is what an interface of this machine carried since the last look, and how long it was queued. Shapers read
// it from /v1/signals.
type Signal struct {
	// Time is the end of the look, in Unix time.
	Time      float64 `json:"time"`
	Interface string  `json:"interface"`
	// QueueingDelay is the median of what connections that sent through the interface saw, weighted by their bytes.
	// Absent: none of them sent.
	QueueingDelay *float64 `json:"queueing_delay_seconds,omitempty"`
	// QueueingDelay95 is their 95th percentile.
	QueueingDelay95 *float64 `json:"queueing_delay_p95_seconds,omitempty"`
	// ReceiveQueueingDelay is the median of what comes in. Absent: no receive window is managed there.
	ReceiveQueueingDelay *float64 `json:"receive_queueing_delay_seconds,omitempty"`
	// Sent and Received are those of all traffic, and ProxySent and ProxyReceived of the proxy's payload.
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

// signalReader makes signals of what changes between two looks.
type signalReader struct {
	source  Source
	links   LinkReader
	at      time.Time
	learned time.Time                   // when routes and rates were read
	moved   map[uint64][4]cc.Bytes      // by flow: down written and read, up written and read
	traffic map[string]linkstat.Traffic // by interface
	routes  map[netip.Addr]string
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

// lookAgain returns a signal for each interface, by name, over the time since the last look. The first look returns
// rates of 0.
func (s *signalReader) lookAgain(now time.Time) ([]Signal, error) {
	relearn := now.Sub(s.learned) >= relearnPeriod
	if relearn {
		s.learned, s.routes = now, map[netip.Addr]string{}
	}
	traffic, err := s.links.ReadTraffic(relearn)
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

// sumInterfaces adds up what connections did since the last look. In the first one nothing has moved.
func (s *signalReader) sumInterfaces() map[string]interfaceSums {
	sums, moved := map[string]interfaceSums{}, map[uint64][4]cc.Bytes{}
	first := s.moved == nil
	_, flows := s.source.Flows()
	for f := range flows {
		if !f.Relayed() {
			continue
		}
		is := [4]cc.Bytes{f.Down.Written, f.Down.Read, f.Up.Written, f.Up.Read}
		moved[f.ID] = is
		was := s.moved[f.ID] // 0: it has begun since
		if first {
			was = is
		}
		s.addLeg(sums, f.Source.Addr(), &f.Client, &f.Down, &f.Up, is[0]-was[0], is[3]-was[3])
		s.addLeg(sums, f.Target.Addr(), &f.Server, &f.Up, &f.Down, is[2]-was[2], is[1]-was[1])
	}
	s.moved = moved
	return sums
}

// addLeg adds what a leg has sent to a host, in the direction out, and received from it for the direction in. Legs of
// tunnels that end in this program are left out, because their hosts have addresses of the inside.
func (s *signalReader) addLeg(sums map[string]interfaceSums, host netip.Addr, leg *datapath.Info,
	out, in *proxy.DirectionInfo, sent, received cc.Bytes,
) {
	if sent+received <= 0 || leg.Tier != "kernel" {
		return
	}
	name, known := s.routes[host]
	if !known {
		name = s.links.FindInterface(host)
		s.routes[host] = name
	}
	sum := sums[name]
	sum.connections++
	sum.sent += sent
	sum.received += received
	switch {
	case sent <= 0:
	case out.Managed && out.Flow.LatestRTT > 0:
		sum.sending = append(sum.sending, delaySample{out.Flow.QueueingDelay, sent})
	case leg.SRTT > 0 && leg.MinRTT > 0:
		sum.sending = append(sum.sending, delaySample{max(0, leg.SRTT-leg.MinRTT), sent})
	}
	if r := &in.Receive; received > 0 && r.Held && r.Flow.LatestRTT > 0 {
		sum.arrival = append(sum.arrival, delaySample{r.Flow.QueueingDelay, received})
	}
	sums[name] = sum
}

// delayQuantile returns a quantile in seconds, weighted by bytes; nil of none. It sorts the samples.
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

// serveSignals answers with the signals of a second, or with follow=200ms with a line for each interface each 200 ms
// until the client goes or the server ends. readers has room for those that read at once.
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
	if _, err := reader.lookAgain(p.Wall()); err != nil {
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
		signals, err := reader.lookAgain(p.Wall())
		if err != nil {
			p.logUnsent(r, err)
			return
		}
		signals = slices.DeleteFunc(signals, func(s Signal) bool { return only != "" && s.Interface != only })
		if follow == "" {
			p.serveList(w, r, len(signals), eachOf(signals, func(s *Signal) any { return s }))
			return
		}
		// A client that does not read ends within the time of any answer. Writers without deadlines are those of tests.
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
