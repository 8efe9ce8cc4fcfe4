package cc

import (
	"bytes"
	"compress/gzip"
	_ "embed" // the built-in models
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// MDI (comnetsAD/MDI) imitates another algorithm. Every 5 ms it draws the change of its window from a table that was
// learned from runs of that algorithm, given the newest change of the delay, the window's change before, and the level
// of the delay. As published a state has the delay's change before in place of its level. A chain of changes alone has
// nothing that holds the queue to a length: it is a random walk, which its authors held together by constants for what
// lies beyond the table's edges. With levels the table itself does:
//
//	delay rises by more than a table without levels has ──▶ window · down
//	otherwise ──▶ drawn
//	falls by more than a table without levels has ──▶ window + up

// mdiNamed is a model by its name.
type mdiNamed struct {
	name  string
	model *MDIModel
}

//go:embed mdi/verus.csv.gz
var mdiVerus []byte

// mdiModels are the choices of mdi's parameter "model", in its order. They do
// not change once there are flows.
var mdiModels = []mdiNamed{{"verus", mustReadMDI(mdiVerus)}}

// mdiBuiltIn is how many of them are built in.
var mdiBuiltIn = len(mdiModels)

func mustReadMDI(packed []byte) *MDIModel {
	text, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		panic(err)
	}
	m, err := ReadMDI(text)
	if err != nil {
		panic(err)
	}
	return m
}

func init() { Register(mdiSpec()) }

func mdiSpec() Spec {
	var names []string
	for _, m := range mdiModels {
		names = append(names, m.name)
	}
	return Spec{
		Name:   "mdi",
		About:  "MDI: imitates another algorithm with a table learned from its runs.",
		Source: "comnetsAD/MDI",
		Params: []Param{
			{Name: "model", Choices: names, About: "which one to imitate"},
			{Name: "down", Max: 1, About: "what is left of the window when the delay rises " +
				"beyond a table without levels; 0: as learned, or 0.95"},
			{
				Name: "up_packets", Unit: "packets", Default: 0, Min: 0, Max: 1000,
				About: "what is added to it when the delay falls beyond such a table; 0: as learned, or 20",
			},
		},
		New: func(cfg Config) Algorithm { return newMDI(cfg, mdiModels[int(cfg.Params["model"])].model) },

		Needs: []Signal{NeedsRTT, NeedsLoss, NeedsSent, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "window_packets", About: "window that the table's draws have led to"},
			{Name: "delay_ms", About: "longest round trip of the last epoch"},
			{Name: "delay_change", About: "its change since the one before, in percent times the delay's decimal " +
				"logarithm"},
			{Name: "window_change", About: "the same of the window"},
		},
	}
}

// Spec returns the algorithm mdi with this model, whatever its parameter "model" is.
func (m *MDIModel) Spec() Spec {
	s := mdiSpec()
	s.New = func(cfg Config) Algorithm { return newMDI(cfg, m) }
	return s.Answering()
}

// LoadMDI adds a model to mdi's choices, or replaces one that was added before.
// It is for the start of a program: flows must not exist yet.
func LoadMDI(name string, r io.Reader) error {
	if name == "" || strings.ContainsAny(name, ",:= \t\n") {
		return fmt.Errorf("cc: %q is not a name for an mdi model: it has to be a word without , : and =", name)
	}
	i := slices.IndexFunc(mdiModels, func(m mdiNamed) bool { return m.name == name })
	if i >= 0 && i < mdiBuiltIn {
		return fmt.Errorf("cc: the mdi model %s is built in: choose another name", name)
	}
	m, err := ReadMDI(r)
	if err != nil {
		return err
	}
	if i >= 0 {
		mdiModels[i].model = m
		return nil
	}
	mdiModels = append(mdiModels, mdiNamed{name, m})
	registry["mdi"] = mdiSpec().Answering()
	return nil
}

const (
	mdiEpoch     = 5 * time.Millisecond
	mdiStart     = 10.0    // packets; gmcc2 has no slow start
	mdiMaxWindow = 40000.0 // packets; gmcc2
	mdiDown      = 0.95    // gmcc2, set by hand for highwayGold and rapidGold
	mdiUp        = 20.0    // packets; gmcc2, set by hand from 9.5 to 22
	mdiLossCut   = 0.5     // a loss is not part of the model
	mdiBaseStep  = 1.0     // ms, by which a lone packet lengthens the least round trip; Verus has 10
)

type mdi struct {
	segments
	model    *MDIModel
	rand     *rand.Rand
	down, up float64 // window's factor, and packets if above 0, beyond the table's edges

	window, before float64 // packets; now and an epoch ago
	clock          mdiClock
	newest         MDIEpoch // the last epoch, without its window
	delay          float64  // ms; of the last epoch
	idle           bool     // the application leaves room in the window
	cut            epoch
	credit         float64 // packets; what may be in flight until the epoch ends
	rate           Rate
	edge           direction // rising or falling: the delay left the table
}

// mdiClock divides time into epochs. None runs while nothing is in flight.
type mdiClock struct {
	next    Time          // end of this epoch; 0: none runs
	heard   Time          // last acknowledgement
	longest time.Duration // longest round trip of this epoch; 0: no sample
	bar     float64       // ms; smoothed round trip, as Verus has it; 0: no sample yet
	least   float64       // ms; least round trip, which lone packets correct as in Verus; 0: no sample yet
	d1, d2  float64       // ms; delays of the last two epochs that had a sample; 0: none yet
}

// addAck takes in a round trip, and begins an epoch if none runs.
func (c *mdiClock) addAck(a Ack) {
	if c.next == 0 {
		c.next = a.Now.Add(mdiEpoch)
	}
	c.heard = a.Now
	c.longest = max(c.longest, a.RTT)
	if a.RTT > 0 {
		d := toMillis(max(a.RTT, minDivisor))
		if c.bar == 0 {
			c.bar, c.least = d, d
		}
		// A packet that left almost alone met no queue of ours, so that the path is as long.
		if a.Sent.At != 0 && a.Sent.Inflight < verusAlone*a.MSS {
			c.least = min(c.least+mdiBaseStep, max(c.least, d))
		}
		c.least = min(c.least, d)
		c.bar += (1 - verusKeep) * (d - c.bar)
	}
}

// isDue reports whether an epoch ends at now.
func (c *mdiClock) isDue(now Time) bool { return c.next != 0 && now >= c.next }

// endEpoch returns the delay of the epoch that ends, in ms, and what it is to the ones before. However many epochs have
// passed, it is one.
func (c *mdiClock) endEpoch(s State) (d0 float64, e MDIEpoch) {
	late := s.Now.Sub(c.next)
	c.next = c.next.Add(late - late%mdiEpoch + mdiEpoch)
	d0 = toMillis(c.longest)
	sampled := c.longest > 0
	c.longest = 0
	if !sampled {
		d0 = max(c.d1, toMillis(s.Now.Sub(c.heard)))
	}
	d0 = max(d0, toMillis(minDivisor))
	if c.d1 == 0 {
		c.d1, c.d2 = d0, d0
	}
	e = MDIEpoch{Change: relativeChange(d0, c.d1), Previous: relativeChange(c.d1, c.d2)}
	if c.least > 0 {
		e.Level = math.Log2(d0 / c.least)
	}
	if sampled {
		c.d1, c.d2 = d0, c.d1
	}
	if s.Inflight <= 0 { // until something is heard again
		c.next = 0
	}
	return d0, e
}

// MDIRecorder lets an algorithm run as it is and records the epochs to learn from.
type MDIRecorder struct {
	Algorithm
	// Window returns the window that the algorithm has in mind, in packets; nil: its Control's.
	Window func() float64
	Epochs []MDIEpoch

	clock mdiClock
}

// OnAck implements Algorithm.
func (r *MDIRecorder) OnAck(a Ack) {
	r.clock.addAck(a)
	r.Algorithm.OnAck(a)
}

// OnTick implements Algorithm. Ticks are the algorithm's and those that end epochs.
func (r *MDIRecorder) OnTick(s State) {
	if next := r.Algorithm.Control().NextTick; next != 0 && s.Now >= next {
		r.Algorithm.OnTick(s)
	}
	if !r.clock.isDue(s.Now) {
		return
	}
	_, e := r.clock.endEpoch(s)
	if e.Window = float64(r.Algorithm.Control().Cwnd) / float64(s.MSS); r.Window != nil {
		e.Window = r.Window()
	}
	r.Epochs = append(r.Epochs, e)
}

// Control implements Algorithm.
func (r *MDIRecorder) Control() Control {
	c := r.Algorithm.Control()
	if c.NextTick == 0 || r.clock.next != 0 && r.clock.next < c.NextTick {
		c.NextTick = r.clock.next
	}
	return c
}

func newMDI(cfg Config, model *MDIModel) *mdi {
	m := &mdi{
		segments: segments{cfg.MSS},
		model:    model,
		rand:     cfg.Rand,
		down:     cfg.Params["down"], up: cfg.Params["up_packets"],
	}
	if m.down == 0 {
		m.down = mdiDown
		if m.model.Down > 0 {
			m.down = min(m.model.Down, 1)
		}
	}
	if m.up == 0 && m.model.Up == 0 {
		m.up = mdiUp
	}
	if m.rand == nil {
		m.rand = rand.New(rand.NewPCG(0, 0))
	}
	m.resetWindow(mdiStart)
	return m
}

// resetWindow sets the window without a change that could be imitated.
func (m *mdi) resetWindow(window float64) {
	m.window = min(max(window, 1), mdiMaxWindow)
	m.before = m.window
	m.credit, m.rate = m.window, 0
}

func (m *mdi) OnAck(a Ack) {
	m.setMSS(a.MSS)
	m.credit = max(0, m.credit-m.toPackets(a.Acked))
	m.clock.addAck(a)
	m.idle = a.Sent.AppLimited
}

func (m *mdi) OnLoss(l Loss) {
	m.setMSS(l.MSS)
	switch {
	case l.Timeout:
		m.cut.reacted = l.Now
		m.resetWindow(mdiStart)
	case m.cut.beginEpoch(l):
		m.resetWindow(mdiLossCut * m.window)
	}
}

// OnTick ends an epoch.
func (m *mdi) OnTick(s State) {
	m.setMSS(s.MSS)
	if !m.clock.isDue(s.Now) {
		return
	}
	m.delay, m.newest = m.clock.endEpoch(s)
	window := m.nextWindow()
	if m.idle {
		window = min(window, m.window) // a window that is not used says nothing about the path
	}
	m.before, m.window = m.window, min(max(window, 1), mdiMaxWindow)
	m.allotCredit(s)
}

// nextWindow returns the next window, in packets.
func (m *mdi) nextWindow() float64 {
	g := m.model.Grid
	m.edge = still
	switch change := m.newest.Change; {
	case change > g.Delay.Max && !g.hasLevels():
		m.edge = rising
		return m.window * m.down
	case change < g.Delay.Min && !g.hasLevels():
		m.edge = falling
		if m.up > 0 {
			return m.window + m.up
		}
		return m.window * max(m.model.Up, 1)
	}
	state := m.model.stateIndex(m.newest, relativeChange(m.window, m.before))
	return applyChange(m.model.drawChange(state, m.newest.Change, m.rand.Float64()), m.window)
}

// allotCredit sets what the next epoch sends.
func (m *mdi) allotCredit(s State) {
	if s.Inflight <= 0 {
		m.credit = m.window
		m.rate = m.pacingRate(1, m.window, time.Duration(m.delay*float64(time.Millisecond)))
		return
	}
	inflight := m.toPackets(s.Inflight)
	send := packetsPerEpoch(m.window, inflight, m.clock.bar)
	m.credit = inflight + send
	m.rate = RateOf(m.toBytes(send), mdiEpoch)
}

// packetsPerEpoch returns how many packets an epoch sends, so that the window is in
// flight a round trip of delay milliseconds from now (Verus, SIGCOMM 2015 eq. 5).
func packetsPerEpoch(window, inflight, delay float64) float64 {
	n := math.Ceil(delay / toMillis(mdiEpoch))
	if n <= 1 {
		return max(0, window-inflight)
	}
	return max(0, window+inflight*(2-n)/(n-1))
}

// Inspect shows what Spec.Internals lists.
func (m *mdi) Inspect() Internals {
	return Internals{m.window, m.delay, m.newest.Change, relativeChange(m.window, m.before)}
}

func (m *mdi) Control() Control {
	phases := [...]string{still: "imitate", rising: "delay_exploding", falling: "delay_collapsing"}
	return Control{Cwnd: m.toBytes(m.credit), PacingRate: m.rate, NextTick: m.clock.next, Phase: phases[m.edge]}
}
