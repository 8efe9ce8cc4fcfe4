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

// MDI (comnetsAD/MDI) imitates another algorithm. Every 5 ms it draws the
// change of its window from a table that was learned from runs of that
// algorithm: given the last changes of delay and window, and the newest of the
// delay. Beyond the table's edges it does what the other did there at the
// median, which is what keeps the walk together:
//
//	delay rises by more than the table has ──▶ window · down
//	within it ──▶ drawn
//	falls by more ──▶ window · up

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
			{Name: "down", Default: 0, Min: 0, Max: 1, About: "what is left of the window when the delay rises " +
				"beyond the table; 0: as learned, or 0.95"},
			{
				Name: "up_packets", Unit: "packets", Default: 0, Min: 0, Max: 1000,
				About: "what is added to it when the delay falls beyond the table; 0: as learned, or 20",
			},
		},
		Profiles: []Profile{
			{Name: "held", About: "with the table's edges set by hand, as its authors did for each trace: shorter " +
				"queues on cellular links", Params: Params{"down": 0.95, "up_packets": 5}},
		},
		New: func(cfg Config) Algorithm { return newMDI(cfg) },

		Needs: []Signal{NeedsRTT, NeedsLoss, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "window_packets", About: "window that the table's draws have led to"},
			{Name: "delay_ms", About: "longest round trip of the last epoch"},
			{Name: "delay_change", About: "its change since the one before, in percent times the delay's decimal " +
				"logarithm"},
			{Name: "window_change", About: "the window's, likewise"},
		},
	}
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
)

type mdi struct {
	segments
	model    *MDIModel
	rand     *rand.Rand
	down, up float64 // window's factor, and packets if above 0, beyond the table's edges

	window, before float64 // packets; now and an epoch ago
	d1, d2         float64 // ms; of the last two epochs that had a sample; 0: none yet
	delay, change  float64 // ms, and its change, of the last epoch; for Inspect
	longest        time.Duration
	heard          Time // last acknowledgement
	idle           bool // the application leaves room in the window
	cut            epoch

	next   Time    // end of this epoch; 0: nothing is in flight, so none runs
	credit float64 // packets; what may be in flight until then
	rate   Rate
	edge   direction // rising or falling: the delay left the table
}

func newMDI(cfg Config) *mdi {
	m := &mdi{
		segments: segments{cfg.MSS},
		model:    mdiModels[int(cfg.Params["model"])].model,
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
	if m.next == 0 {
		m.next = a.Now.Add(mdiEpoch)
	}
	m.heard = a.Now
	m.longest = max(m.longest, a.RTT)
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

// OnTick ends an epoch. However many have passed, it is one.
func (m *mdi) OnTick(s State) {
	m.setMSS(s.MSS)
	if m.next == 0 || s.Now < m.next {
		return
	}
	late := s.Now.Sub(m.next)
	m.next = m.next.Add(late - late%mdiEpoch + mdiEpoch)
	d0 := toMillis(m.longest)
	sampled := m.longest > 0
	m.longest = 0
	if !sampled {
		d0 = max(m.d1, toMillis(s.Now.Sub(m.heard)))
	}
	d0 = max(d0, toMillis(minDivisor))
	if m.d1 == 0 {
		m.d1, m.d2 = d0, d0
	}
	window := m.nextWindow(d0)
	if m.idle {
		window = min(window, m.window) // a window that is not used says nothing about the path
	}
	m.before, m.window = m.window, min(max(window, 1), mdiMaxWindow)
	if sampled {
		m.d1, m.d2 = d0, m.d1
	}
	m.allotCredit(s, d0)
}

// nextWindow returns the next window, the newest epoch's delay being d0.
func (m *mdi) nextWindow(d0 float64) float64 {
	g := m.model.Grid
	m.delay, m.change = d0, relativeChange(d0, m.d1)
	m.edge = still
	switch {
	case m.change > g.Delay.Max:
		m.edge = rising
		return m.window * m.down
	case m.change < g.Delay.Min && m.up > 0:
		m.edge = falling
		return m.window + m.up
	case m.change < g.Delay.Min:
		m.edge = falling
		return m.window * max(m.model.Up, 1)
	}
	state := m.model.stateIndex(relativeChange(m.d1, m.d2), relativeChange(m.window, m.before))
	return applyChange(m.model.drawChange(state, m.change, m.rand.Float64()), m.window)
}

// allotCredit sets what the next epoch sends, of the round trip delay in milliseconds.
func (m *mdi) allotCredit(s State, delay float64) {
	if s.Inflight <= 0 { // until something is heard again
		m.next, m.credit = 0, m.window
		m.rate = m.pacingRate(1, m.window, time.Duration(delay*float64(time.Millisecond)))
		return
	}
	inflight := m.toPackets(s.Inflight)
	send := packetsPerEpoch(m.window, inflight, delay)
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
	return Internals{m.window, m.delay, m.change, relativeChange(m.window, m.before)}
}

func (m *mdi) Control() Control {
	phases := [...]string{still: "imitate", rising: "delay_exploding", falling: "delay_collapsing"}
	return Control{Cwnd: m.toBytes(m.credit), PacingRate: m.rate, NextTick: m.next, Phase: phases[m.edge]}
}
