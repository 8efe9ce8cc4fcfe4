//go:build linux

package e2e

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/test/agents/nonsense"
)

// eachAgent runs a test under our own Reno and, on one tier, under the authors'.
func eachAgent(t *testing.T, test func(t *testing.T, s *scene, a *steering)) {
	for name, place := range map[string]func(*scene) *steering{
		"ours":         (*scene).ownAgent,
		"the authors'": func(s *scene) *steering { return s.agentOf("reno") },
	} {
		if name != "ours" && present.envelope != kernel.EBPF {
			continue
		}
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.shapeLinkTo(8 * shapedRate)
			test(t, s, place(s))
		})
	}
}

// decided is what is in force towards the client, out of /flows.
func decided(flow map[string]any) map[string]any {
	return flow["down"].(map[string]any)["control"].(map[string]any)
}

// load is several downloads that go on.
type load []*underWay

func (w way) load(s *scene, n int) (all load) {
	for range n {
		client, server := w.pair(s)
		all = append(all, downloading(s.t, client, server))
	}
	return all
}

// progress waits for so many more bytes of each.
func (l load) progress(bytes int64) {
	for _, d := range l {
		d.t.Helper()
		d.progress(bytes)
	}
}

// wide is a rate for a shaped link at which what has piled up before it is soon through.
const wide = 100 * shapedRate

func (l load) finish() {
	for _, d := range l {
		d.t.Helper()
		d.finish()
	}
}

func TestAnAgentsFaultsCostNoByte(t *testing.T) {
	const flows, more = 4, megabyte / 2
	eachAgent(t, func(t *testing.T, s *scene, a *steering) {
		w := present.way()
		a.start()
		s.start(w.yaml(a.yaml()))
		s.capture(w)
		downloads := w.load(s, flows)
		a.decides(flows)
		downloads.progress(more)

		a.kill()
		a.decides(0)
		downloads.progress(more)
		// On a busy machine a process that is killed stops some time before its socket is closed.
		stalled := a.metric("fallbacks_total", `reason="stalled"`)
		assert.Positive(t, stalled+a.metric("fallbacks_total", `reason="gone"`))
		a.start()
		a.decides(flows)
		downloads.progress(more)

		require.NoError(t, a.cmd.Process.Signal(syscall.SIGSTOP))
		a.decides(0)
		downloads.progress(more)
		assert.Positive(t, a.metric("fallbacks_total", `reason="stalled"`))
		require.NoError(t, a.cmd.Process.Signal(syscall.SIGCONT))
		a.decides(flows)
		downloads.progress(more)

		second := *a
		second.start() // takes the path; the first is still the one that is talked to
		downloads.progress(more)
		assert.EqualValues(t, 2, a.metric("connects_total"))
		a.kill()
		require.Eventually(t, func() bool { return a.metric("connects_total") == 3 }, patience, 10*time.Millisecond)
		a.decides(flows)
		downloads.progress(more)
		s.shapeLinkTo(wide)
		downloads.finish()
	})
}

// TestAnAgentLosesItsFlowsWithinThreeRoundTrips is of a link of 100 ms. It takes a round
// trip until the agent would have heard of the flow, and three more.
func TestAnAgentLosesItsFlowsWithinThreeRoundTrips(t *testing.T) {
	if present.envelope != kernel.EBPF {
		t.Skip("the relay reports too rarely for that: the round trip changes meanwhile")
	}
	const trials = 3 // of which the machine may disturb all but one
	w := present.way()
	s, path := newCellular(t, sim.LinkConfig{Rate: 20e6, Delay: 50 * time.Millisecond, QueuePackets: 100})
	a := s.ownAgent()
	a.start()
	p := s.start(w.yaml(a.yaml()))
	s.capture(w)
	path.StartOnData()
	d := w.load(s, 1)
	for name, fault := range map[string]struct{ begin, end func() }{
		"killed": {a.kill, a.start},
		"stopped": {
			func() { require.NoError(t, a.cmd.Process.Signal(syscall.SIGSTOP)) },
			func() { require.NoError(t, a.cmd.Process.Signal(syscall.SIGCONT)) },
		},
	} {
		watch, worst := newWatch(), []string(nil)
		within := false
		for range trials {
			a.decides(1)
			d.progress(megabyte / 2)
			rtt := time.Duration(decided(p.relaying(1)[0])["srtt_seconds"].(float64) * 1e9)
			began := time.Now()
			fault.begin()
			a.decides(0)
			took := time.Since(began)
			fault.end()
			worst = append(worst, fmt.Sprintf("%v at a round trip of %v", took, rtt))
			if within = took < 4*rtt; within {
				break
			}
		}
		still := watch.stop()
		if !within && still > 40*time.Millisecond {
			d.finish()
			t.Skipf("the machine is too busy: it stood still for %v", still)
		}
		assert.True(t, within, "%s: it took %v", name, worst)
	}
	d.finish()
}

// rogue is an agent in the test, which says what a test wants it to.
type rogue struct {
	t    *testing.T
	code *ccp.Code
	sock *net.UnixConn
	done chan struct{}

	mu     sync.Mutex
	wrong  func(message []byte) (datagrams [][]byte)
	limits [][2]uint64 // windows and rates, in turn
	turn   int
}

// talks begins to serve at a path.
func talks(t *testing.T, path string) *rogue {
	t.Helper()
	r := &rogue{t: t, done: make(chan struct{})}
	r.behave(nil, nil)
	var err error
	r.code, err = ccp.Compile(`(def (Report (volatile acked 0)) (every 5000))
		(when true (:= Report.acked (+ Report.acked Ack.bytes_acked)) (fallthrough))
		(when (> Micros every) (report) (:= Micros 0))`)
	require.NoError(t, err)
	r.sock, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = r.sock.Close()
		<-r.done
	})
	go r.serve()
	return r
}

// behave has it change its messages from now on; nil: to none but good ones, and a window
// of 40 packets.
func (r *rogue) behave(wrong func([]byte) [][]byte, limits [][2]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if wrong == nil {
		wrong = func(m []byte) [][]byte { return [][]byte{m} }
	}
	if limits == nil {
		limits = [][2]uint64{{40 * segment, 0}}
	}
	r.wrong, r.limits = wrong, limits
}

func (r *rogue) serve() {
	defer close(r.done)
	buf := make([]byte, 2*ccp.MaxToAgent)
	for {
		n, from, err := r.sock.ReadFromUnix(buf)
		if err != nil {
			return
		}
		m, _, err := ccp.Next(buf[:n])
		if !assert.NoError(r.t, err) {
			return
		}
		r.mu.Lock()
		var datagrams [][]byte
		for _, answer := range r.answer(m) {
			datagrams = append(datagrams, r.wrong(answer)...)
		}
		r.mu.Unlock()
		for _, b := range datagrams {
			if _, err := r.sock.WriteToUnix(b, from); err != nil { // the proxy has closed the connection, or is full
				break
			}
		}
	}
}

func (r *rogue) answer(m ccp.Message) [][]byte {
	install := r.code.Install(1).Append(nil)
	switch m.Kind {
	case ccp.KindReady:
		return [][]byte{install}
	case ccp.KindCreate:
		return [][]byte{install, ccp.Change{Flow: m.Flow, Program: 1}.Append(nil)}
	case ccp.KindMeasure:
		l := r.limits[r.turn%len(r.limits)]
		r.turn++
		set := []ccp.Update{{Register: r.code.Registers["Cwnd"], Value: l[0]}}
		if l[1] > 0 {
			set = append(set, ccp.Update{Register: r.code.Registers["Rate"], Value: l[1]})
		}
		return [][]byte{ccp.Change{Flow: m.Flow, Updates: set}.Append(nil)}
	}
	return nil
}

func TestAnAgentThatTalksNonsenseCostsNoByte(t *testing.T) {
	const flows, most, more = 2, 100, megabyte / 4
	needsPrivilege(t) // two tiers are enough
	w := present.way()
	s := newScene(t)
	s.shapeLinkTo(8 * shapedRate)
	a := &steering{s: s, name: "rogue", dir: s.meetingPlace()}
	a.socket = filepath.Join(a.dir, "agent")
	r := talks(t, a.socket)
	p := s.start(w.yaml(strings.ReplaceAll(a.yaml(), "fallback=cubic",
		fmt.Sprintf("fallback=cubic,max_window=%d", most))))
	s.capture(w)
	downloads := w.load(s, flows)
	a.decides(flows)
	for _, kind := range nonsense.Kinds() {
		before := a.metric("decisions_total")
		r.behave(kind.Make(), nil)
		downloads.progress(more)
		require.Eventually(t, func() bool { return a.metric("decisions_total") > before+20 }, patience, 5*time.Millisecond, kind.Name)
	}
	assert.EqualValues(t, 1, a.metric("connects_total"), "nothing of that ends the connection")
	assert.Positive(t, a.metric("messages_refused_total"))
	for name, limits := range nonsense.Limits {
		r.behave(nil, limits)
		downloads.progress(more)
		a.decides(flows)
		for _, flow := range p.relaying(flows) {
			cwnd := decided(flow)["cwnd_bytes"].(float64)
			assert.LessOrEqual(t, cwnd, float64(most*segment), name)
			assert.GreaterOrEqual(t, cwnd, float64(segment), name)
		}
	}

	r.behave(func([]byte) [][]byte { return [][]byte{{1, 2, 3}} }, nil) // nothing but that
	a.decides(0)
	downloads.progress(more)
	r.behave(nil, nil)
	a.decides(flows)
	downloads.progress(more)
	s.shapeLinkTo(wide)
	downloads.finish()
}

// TestTwoProxiesShareAnAgent has two of them at one agent, and a third that names the
// reply of the first and is refused it.
func TestTwoProxiesShareAnAgent(t *testing.T) {
	s := newScene(t)
	s.shapeLinkTo(8 * shapedRate)
	a := s.ownAgent()
	a.start()
	w := named("forward")
	first := s.start(w.yaml(a.yaml()))
	one := w.load(s, 1)
	a.decides(1)

	moved := func(config string) string {
		return strings.ReplaceAll(config, fmt.Sprint(port), fmt.Sprint(secondPort))
	}
	second := s.startSecond(moved(strings.ReplaceAll(w.yaml(a.yaml()), "/penstock}", "/second}")))
	other := w
	other.dial = dialSecond
	two := other.load(s, 1)
	a.decides(1) // for the second
	one.progress(megabyte / 2)
	two.progress(megabyte / 2)
	two.finish()
	second.stop()

	s.startSecond(moved(w.yaml(a.yaml())))
	three := other.load(s, 1)
	three.progress(megabyte / 2)
	require.Eventually(t, func() bool {
		return strings.Contains(s.proxy.said.String(), "another process answers "+
			"there")
	},
		patience, 5*time.Millisecond)
	assert.Zero(t, a.metric("up"))
	three.finish()
	s.proxy.stop()

	s.proxy = first
	a.decides(1)
	assert.EqualValues(t, 1, a.metric("connects_total"))
	one.progress(megabyte / 2)
	s.shapeLinkTo(wide)
	one.finish()
}

func TestARuleMovesRunningFlowsToAnAgentAndBack(t *testing.T) {
	if present.envelope != kernel.EBPF {
		t.Skip("moves to and from an agent are the same in each tier")
	}
	eachAgent(t, func(t *testing.T, s *scene, a *steering) {
		w := present.way()
		a.start()
		builtIn := w.yaml(a.declared() + "defaults: {algorithm: copa, group: flow}\n")
		p := s.start(builtIn)
		s.capture(w)
		downloads := w.load(s, 2)
		downloads.progress(megabyte)
		assert.Zero(t, a.metric("flows"))
		for turn := range 2 {
			p.rewrite(w.yaml(a.yaml()))
			p.signal(syscall.SIGHUP)
			p.reloaded(float64(2*turn + 1))
			a.decides(2)
			downloads.progress(megabyte)
			p.rewrite(builtIn)
			p.signal(syscall.SIGHUP)
			p.reloaded(float64(2*turn + 2))
			a.decides(0)
			assert.Equal(t, "copa", p.relaying(2)[0]["down"].(map[string]any)["algorithm"])
			downloads.progress(megabyte)
		}
		s.shapeLinkTo(wide)
		downloads.finish()
	})
}
