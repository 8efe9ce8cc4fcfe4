package cc

import (
	"math"
	"time"
)

// Sprout between two ends that both speak it (NSDI 2013 §3.2 to §3.5): the
// receiver counts arrivals and forecasts, the sender lets a forecast run down.
// Each has a clock of its own; only ticks are compared.

// SproutPacket is what a packet's header says to the receiver.
type SproutPacket struct {
	Seq  Bytes // bytes sent before it, retransmissions included
	Size Bytes // its own
	// what left longer than the reordering limit ago, below Seq−Behind, has arrived by now or is lost
	Behind Bytes
	Pause  time.Duration // the sender means to be silent for so long
}

// SproutSilence is how long after the newest packet a receiver still forecasts, so that the sender learns of an outage.
const SproutSilence = time.Second

// SproutPause is how long a sender may be silent after its last packet. With more data it waits for a forecast that
// has that packet, which comes after a round trip and a tick; 50 ms are what the authors' program has. Without data
// nothing ends the silence.
func SproutPause(srtt time.Duration, hasData bool) time.Duration {
	if !hasData {
		return time.Hour
	}
	return max(50*time.Millisecond, srtt+SproutTick)
}

// SproutForecast is what the receiver answers.
type SproutForecast struct {
	ReceivedOrLost Bytes // of what the sender has sent
	Counts         [sproutHorizons]int
	// Counts are the units that the link will deliver within 1, 2, … ticks but for
	// the quantile; cumulative.
}

// SproutReceiver infers a link's rate from what arrives. It is driven by
// whoever receives, who serialises the calls.
type SproutReceiver struct {
	model    sproutModel
	unit     float64
	quantile float64
	began    Time    // the tick under way
	came     float64 // bytes in it
	silent   Time    // until then the sender means to be silent
	newest   Bytes   // highest SproutPacket.Seq so far

	early Bytes          // arrived behind a hole, and not counted by OnPacket yet
	below Bytes          // everything before has arrived or is lost
	above []SproutPacket // what arrived behind it
}

// NewSproutReceiver starts at now with sprout's settings; what is missing in
// them is as by default.
func NewSproutReceiver(now Time, over Params) (*SproutReceiver, error) {
	spec, err := Lookup("sprout")
	if err != nil {
		return nil, err
	}
	p, err := spec.Resolve(over)
	if err != nil {
		return nil, err
	}
	return &SproutReceiver{
		model: newSproutModel(sproutTableFor(p)), unit: p["unit_bytes"], quantile: p["quantile"], began: now,
	}, nil
}

// OnPacket takes in a packet.
func (r *SproutReceiver) OnPacket(now Time, p SproutPacket) {
	r.endTicks(now)
	counted := min(p.Size, r.early)
	r.early -= counted
	r.came += float64(p.Size - counted)
	if p.Seq >= r.newest { // an older one's pause is over
		r.newest, r.silent = p.Seq, r.began.Add(p.Pause)
	}
	if p.Seq >= r.below {
		r.above = append(r.above, p)
	}
	if p.Seq-p.Behind <= r.below {
		return
	}
	r.below = p.Seq - p.Behind
	kept := r.above[:0]
	for _, q := range r.above {
		if q.Seq >= r.below {
			kept = append(kept, q)
		}
	}
	r.above = kept
}

// OnEarly takes in that bytes have come behind a hole in the stream. OnPacket will bring them once the hole is filled,
// and counts them no second time. Without OnEarly a hole reads as an outage, and its repair as a burst.
func (r *SproutReceiver) OnEarly(now Time, n Bytes) {
	r.endTicks(now)
	r.early += n
	r.came += float64(n)
}

// ForgetEarly takes the stream to have no hole. What OnEarly counted and OnPacket has not brought came twice.
func (r *SproutReceiver) ForgetEarly() { r.early = 0 }

// Forecast says what the link will deliver from now on.
func (r *SproutReceiver) Forecast(now Time) SproutForecast {
	r.endTicks(now)
	f := SproutForecast{ReceivedOrLost: r.below + r.early}
	for _, p := range r.above {
		f.ReceivedOrLost += p.Size
	}
	c := 0
	for h := range f.Counts {
		c = r.model.forecastUnits(h+1, r.quantile, c)
		f.Counts[h] = c
	}
	return f
}

// endTicks takes in the ticks that have ended. Where the sender has said that it would be silent until the end of one,
// the link may be faster than what came: taken for all that the link delivers, it would hold the sender to the few
// packets of a round trip that it sends already.
func (r *SproutReceiver) endTicks(now Time) {
	if now.Sub(r.began) >= sproutRest {
		r.model.resetToUniform()
		r.began, r.came = now, 0
	}
	for ; r.began.Add(SproutTick) < now; r.began = r.began.Add(SproutTick) {
		r.model.evolveTick()
		if r.came == 0 && r.began < r.silent {
			continue
		}
		n := int(math.Round(r.came / r.unit))
		if r.came > 0 {
			n = max(n, 1)
		}
		if r.silent > r.began.Add(SproutTick) {
			r.model.addAtLeast(n)
		} else {
			r.model.addArrivals(n)
		}
		r.came = 0
	}
}

// Forecaster is an algorithm that may be fed by a receiver's forecasts.
type Forecaster interface {
	Algorithm
	// OnForecast takes in a forecast that has arrived. next is what the sender has sent, as SproutPacket.Seq counts it.
	// From the first forecast on they alone decide: Control.Cwnd is what is in flight and what may follow at once.
	OnForecast(s State, next Bytes, f SproutForecast)
}

// TakesForecasts reports whether an algorithm is one that a receiver's forecasts may feed.
func TakesForecasts(name string, params Params) bool {
	a, err := New(name, Config{Params: params})
	return err == nil && FindForecaster(a) != nil
}

// FindForecaster returns the part of an algorithm that takes forecasts; nil: it takes none.
func FindForecaster(a Algorithm) Forecaster {
	if i, ok := a.(inspected); ok {
		f, _ := i.Inspector.(Forecaster)
		return f
	}
	f, _ := a.(Forecaster)
	return f
}

// sproutDrainer estimates what is queued from what was sent and what the
// forecast says has left since.
type sproutDrainer struct {
	unit       float64 // bytes
	target     int     // ticks
	cumulative bool

	forecast [sproutHorizons + 1]int // units; of no tick: none
	came     Time                    // when it did; 0: none has
	tick     int                     // since then
	sent     Bytes                   // by the sender, at the last event
	queue    float64                 // bytes
	inflight Bytes                   // at the last event
}

// hasForecast reports whether there is a forecast.
func (d *sproutDrainer) hasForecast() bool { return d.came != 0 }

// setForecast adopts a forecast.
func (d *sproutDrainer) setForecast(st State, next Bytes, f SproutForecast) {
	copy(d.forecast[1:], f.Counts[:])
	d.came, d.tick = max(st.Now, 1), 0
	d.sent, d.inflight = st.Delivered+st.Inflight, st.Inflight
	d.queue = float64(max(0, next-f.ReceivedOrLost))
}

// tickEnd is when the tick does; 0: the forecast goes no further.
func (d *sproutDrainer) tickEnd() Time {
	if d.tick == sproutHorizons-1 {
		return 0
	}
	return d.came.Add(time.Duration(d.tick+1) * SproutTick)
}

// drainQueue lets the queue fill by what has been sent, and drain.
func (d *sproutDrainer) drainQueue(st State) {
	sent := st.Delivered + st.Inflight
	d.queue += float64(max(0, sent-d.sent))
	d.sent, d.inflight = sent, st.Inflight
	for d.tickEnd() != 0 && d.tickEnd() <= st.Now {
		d.tick++
		left := d.forecast[d.tick]
		if !d.cumulative {
			left -= d.forecast[d.tick-1]
		}
		d.queue = max(0, d.queue-d.unit*float64(left))
	}
}

// roomBytes is what may be sent at once, in bytes.
func (d *sproutDrainer) roomBytes() float64 {
	from := d.tick
	if d.cumulative {
		from++
	}
	to := min(from+d.target, sproutHorizons)
	return max(0, d.unit*float64(d.forecast[to]-d.forecast[from])-d.queue)
}

// currentLimits is the algorithm's while it is fed. Nothing is paced: a burst that fills a tick shows the receiver a
// rate above what was sent before, and only so can the rate rise. A part of a segment counts as one, and its excess is
// in the queue from then on.
func (d *sproutDrainer) currentLimits(seg segments) Control {
	room := Bytes(math.Ceil(d.roomBytes() / float64(seg.mss)))
	return Control{Cwnd: max(d.inflight+room*seg.mss, seg.mss), NextTick: d.tickEnd(), Phase: "fed"}
}
