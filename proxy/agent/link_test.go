package agent

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/need"
)

// patience bounds every wait; only a hang reaches it.
const patience = time.Minute

const text = `(def (Report (volatile acked 0)))
	(when true (:= Report.acked (+ Report.acked Ack.bytes_acked)) (report))`

// peer is an agent by hand.
type peer struct {
	t     *testing.T
	sock  *net.UnixConn
	from  *net.UnixAddr
	ready bool // it has heard that the proxy is there
}

func listenAt(path string) (*net.UnixConn, error) {
	return net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
}

func listen(t *testing.T, path string) *peer {
	t.Helper()
	sock, err := listenAt(path)
	require.NoError(t, err)
	p := &peer{t: t, sock: sock}
	t.Cleanup(p.die)
	return p
}

// die closes the socket and leaves its path behind, as a process does that is killed.
func (p *peer) die() { _ = p.sock.Close() }

// next is the next message.
func (p *peer) next() ccp.Message {
	p.t.Helper()
	buf := make([]byte, 2*ccp.MaxToAgent)
	require.NoError(p.t, p.sock.SetReadDeadline(time.Now().Add(patience)))
	n, from, err := p.sock.ReadFromUnix(buf)
	require.NoError(p.t, err)
	require.LessOrEqual(p.t, n, ccp.MaxToAgent)
	p.from = from
	m, rest, err := ccp.Next(buf[:n])
	require.NoError(p.t, err)
	require.Empty(p.t, rest)
	return m
}

func (p *peer) say(b []byte) {
	p.t.Helper()
	_, err := p.sock.WriteToUnix(b, p.from)
	require.NoError(p.t, err)
}

// greet answers a Ready with a program and a Create with a change to it, and returns
// the flow.
func (p *peer) greet() uint32 {
	p.t.Helper()
	code, err := ccp.Compile(text)
	require.NoError(p.t, err)
	for {
		switch m := p.next(); {
		case m.Kind == ccp.KindReady:
			p.say(code.Install(1).Append(nil))
			p.ready = true
		case m.Kind == ccp.KindCreate && p.ready: // it may come before, and again
			p.say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
			return m.Flow
		}
	}
}

// subject is a link with one flow, as a group drives it.
type subject struct {
	t    *testing.T
	link *Link
	path string
	flow cc.Algorithm
	told chan func() // calls of the flow, one after the other
	now  func() cc.Time
	srtt time.Duration // three of them is what an agent may leave a report unread
}

func start(t *testing.T) *subject {
	t.Helper()
	return startWith(t, Config{Socket: filepath.Join(t.TempDir(), "portus")})
}

func startWith(t *testing.T, cfg Config) *subject {
	t.Helper()
	began := time.Now()
	s := &subject{
		t: t, path: cfg.Socket, told: make(chan func(), 64),
		now: func() cc.Time { return cc.Time(time.Second + time.Since(began)) }, srtt: patience,
	}
	cfg.Name, cfg.Clock = "x", s.now
	link, err := Start(cfg)
	require.NoError(t, err)
	s.link = link
	spec := link.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(t, err)
	s.flow = spec.New(cc.Config{
		MSS: 1448, InitialCwnd: 14480, Params: params,
		Wake: func(cc.Time) { s.told <- func() { s.flow.OnTick(s.state()) } },
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		clock := time.NewTicker(5 * time.Millisecond)
		defer clock.Stop()
		for {
			select {
			case f, more := <-s.told:
				if !more {
					return
				}
				f()
			case <-clock.C:
				s.flow.OnTick(s.state())
			}
		}
	}()
	t.Cleanup(func() {
		require.NoError(t, link.Close())
		close(s.told)
		<-done
	})
	return s
}

func (s *subject) state() cc.State {
	return cc.State{Now: s.now(), MSS: 1448, SRTT: s.srtt, MinRTT: time.Millisecond}
}

// ack has the flow hear of an acknowledgement, and returns its phase.
func (s *subject) ack() string {
	phase := make(chan string, 1)
	s.told <- func() {
		s.flow.OnAck(cc.Ack{State: s.state(), Acked: 1448, RTT: time.Millisecond, DeliveryRate: 1e6})
		phase <- s.flow.Control().Phase
	}
	return <-phase
}

// decided waits for some decisions of the agent and returns the window then.
func (s *subject) decided() cc.Bytes {
	require.Eventually(s.t, func() bool {
		s.ack()
		return s.link.Info().Decisions > 20
	}, patience, time.Millisecond)
	cwnd := make(chan cc.Bytes, 1)
	s.told <- func() { cwnd <- s.flow.Control().Cwnd }
	return <-cwnd
}

// until acknowledges until the flow is in a phase.
func (s *subject) until(phase string) {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return s.ack() == phase }, patience, 2*time.Millisecond)
}

func TestAnAgentIsFoundWheneverItIsThere(t *testing.T) {
	s := start(t)
	assert.Equal(t, "fallback", s.ack())
	first := listen(t, s.path)
	flow := first.greet()
	s.until("agent")
	assert.True(t, s.link.Info().Up)
	assert.EqualValues(t, 1, s.link.Info().Steered)

	first.die()
	s.until("fallback")
	assert.NotZero(t, s.link.Info().Fallbacks["gone"])
	require.Eventually(t, func() bool { return !s.link.Info().Up }, patience, time.Millisecond)

	require.NoError(t, os.Remove(s.path))
	second := listen(t, s.path)
	assert.NotEqual(t, flow, second.greet())
	s.until("agent")
	assert.EqualValues(t, 2, s.link.Info().Connects)
}

// Its program reports nothing, so no message finds out that the agent is another one.
func TestAnAgentThatIsStartedAgainWhileNothingIsSentIsFound(t *testing.T) {
	s := start(t)
	code, err := ccp.Compile("(def (x 0)) (when true (:= x (+ x Ack.bytes_acked)))")
	require.NoError(t, err)
	p := listen(t, s.path)
	require.Equal(t, ccp.KindReady, p.next().Kind)
	p.say(code.Install(1).Append(nil))
	for m := p.next(); ; m = p.next() {
		if m.Kind == ccp.KindCreate {
			p.say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
			break
		}
	}
	s.until("agent")

	p.die()
	require.NoError(t, os.Remove(s.path))
	second := listen(t, s.path)
	require.NoError(t, os.Chtimes(s.path, time.Time{}, time.Now().Add(time.Hour))) // made at another time, for certain
	second.greet()
	s.until("agent")
	assert.EqualValues(t, 2, s.link.Info().Connects)
}

func TestAnAgentThatDoesNotReadLosesItsFlowsAndGetsThemBack(t *testing.T) {
	s := start(t)
	p := listen(t, s.path)
	flow := p.greet()
	s.until("agent")
	s.told <- func() { s.srtt = time.Millisecond }
	s.until("fallback") // nobody reads the reports
	info := s.link.Info()
	assert.EqualValues(t, 1, info.Fallbacks["stalled"])
	assert.True(t, info.Up)

	s.told <- func() { s.srtt = patience }
	report := p.next()
	require.Equal(t, ccp.KindMeasure, report.Kind, "the flow is not announced again")
	p.say(ccp.Change{Flow: report.Flow}.Append(nil))
	s.until("agent")
	for range 20 {
		s.ack()
		m := p.next()
		require.Equal(t, ccp.KindMeasure, m.Kind)
		require.Equal(t, flow, m.Flow)
	}
}

func TestAnAgentThatHangsGivesWayToOneInItsPlace(t *testing.T) {
	s := start(t)
	listen(t, s.path).greet()
	s.until("agent")
	s.told <- func() { s.srtt = time.Millisecond }
	s.until("fallback") // it reads no reports, and has its socket still
	s.told <- func() { s.srtt = patience }
	require.NoError(t, os.Remove(s.path)) // as portus does when it starts
	listen(t, s.path).greet()
	s.until("agent")
	assert.EqualValues(t, 2, s.link.Info().Connects)
}

func TestNonsenseEndsAConnection(t *testing.T) {
	s := start(t)
	p := listen(t, s.path)
	p.greet()
	for range maxMalformed - 1 {
		p.say([]byte{1, 2, 3})
	}
	p.say(ccp.Ready{Datapath: 1}.Append(nil)) // of the wrong direction, but a message
	for range maxMalformed - 2 {
		p.say(make([]byte, ccp.MaxFromAgent+1))
	}
	require.Eventually(t, func() bool { return s.link.Info().Malformed == 2*maxMalformed-3 }, patience, time.Millisecond)
	assert.True(t, s.link.Info().Up)
	p.say(nil)
	p.say(nil)
	require.Eventually(t, func() bool { return s.link.Info().Connects == 2 }, patience, time.Millisecond)
}

func TestOnlyTheAgentIsListenedTo(t *testing.T) {
	s := start(t)
	p := listen(t, s.path)
	p.greet()
	other := listen(t, s.path+".other")
	_, err := other.sock.WriteToUnix([]byte{1}, p.from)
	assert.True(t, errors.Is(err, os.ErrPermission), "%v", err)
}

func TestTheAgeOfWhatIsUnreadIsThatOfTheOldest(t *testing.T) {
	var l ledger
	l.learnGrowth(100, 768)
	assert.Zero(t, l.unreadSince(0, 0))
	for i := range 3000 {
		l.addMessage(message{make([]byte, 100), cc.Time(i + 1)})
	}
	assert.EqualValues(t, 2977, l.unreadSince(0, 24*768))
	assert.EqualValues(t, 2977, l.unreadSince(0, 24*768))
	l.unread = 0
	assert.EqualValues(t, 1977, l.unreadSince(0, 2000*768), "as far as is known")
}

func TestItIsKnownHowLongDecisionsTake(t *testing.T) {
	a := newOpenReports()
	report := func(flow uint32, fields ...uint64) []byte {
		return ccp.Measure{Flow: flow, Program: uint32(min(len(fields), 1)), Fields: fields}.Append(nil)
	}
	decision := func(flow uint32) []byte { return ccp.Change{Flow: flow}.Append(nil) }
	ms := cc.Time(time.Millisecond)
	a.noteDecision(1*ms, decision(1)) // that nobody asked for
	a.noteSent(2*ms, report(1, 5))
	a.noteSent(3*ms, report(1, 5))                        // the first counts
	a.noteSent(3*ms, ccp.Create{Flow: 2}.Append(nil))     // which is no report
	a.noteDecision(4*ms, ccp.Ready{}.Append(decision(2))) // nor is this a decision
	a.noteDecision(6*ms, append(decision(1), 1, 2, 3))
	a.noteDecision(7*ms, decision(1))
	a.noteSent(8*ms, report(3, 5))
	a.noteSent(9*ms, report(3)) // it is closed
	a.noteDecision(10*ms, decision(3))
	assert.EqualValues(t, 1, a.took.Snapshot().Count())
	assert.InDelta(t, 0.004, a.took.Snapshot().Sum, 1e-9)
	a.noteSent(11*ms, report(1, 5))
	a.noteSent(12*ms, report(2, 5))
	a.noteSent(13*ms, report(3, 5))
	a.noteDecision(14*ms, decision(2)) // and nothing about the first, which it has read before
	a.noteDecision(90*ms, decision(1)) // of its own accord
	a.noteDecision(16*ms, decision(3))
	assert.EqualValues(t, 3, a.took.Snapshot().Count())
	assert.InDelta(t, 0.004+0.002+0.003, a.took.Snapshot().Sum, 1e-9)
	a.noteSent(91*ms, ccp.Measure{Flow: 4, Program: 1}.Append(nil)) // of a program that reports no field
	a.noteDecision(92*ms, decision(4))
	assert.EqualValues(t, 4, a.took.Snapshot().Count())
	for i := range cc.Time(10_000) { // flows that come and go under an agent that says nothing
		a.noteSent((100+i)*ms, report(uint32(i), 5))
		a.noteSent((100+i)*ms, report(uint32(i)))
	}
	assert.Less(t, len(a.order), 100)

	s := start(t)
	p := listen(t, s.path)
	flow := p.greet()
	s.until("agent")
	require.Equal(t, ccp.KindMeasure, p.next().Kind)
	p.say(decision(flow))
	require.Eventually(t, func() bool { return s.link.Info().Took.Count() == 1 }, patience, time.Millisecond)
}

func TestTwoProxiesDoNotTakeOneReply(t *testing.T) {
	path := filepath.Join(t.TempDir(), "portus")
	listen(t, path)
	cfg := Config{Name: "x", Socket: path, Reply: path + ".reply"}
	dial := func() (int, error) {
		fd, _, err := cfg.dialSocket(&socket{})
		return fd, err
	}
	first, err := dial()
	require.NoError(t, err)
	_, err = dial()
	require.ErrorContains(t, err, "another process answers there")
	require.NoError(t, unix.Close(first))
	again, err := dial()
	require.NoError(t, err, "what an earlier process left makes way")
	require.NoError(t, unix.Close(again))
}

// An agent of portus 0.5 sends its programs as it starts, once, to a path that has to be
// there by then.
func TestProgramsThatComeBeforeTheConnectionCount(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Socket: filepath.Join(dir, "in"), Reply: filepath.Join(dir, "out")}
	s := startWith(t, cfg)
	code, err := ccp.Compile(text)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return unixConnect(cfg.Reply) == nil }, patience, time.Millisecond)

	early, err := listenAt(filepath.Join(dir, "early")) // as it is bound before there is an agent
	require.NoError(t, err)
	defer early.Close()
	_, err = early.WriteToUnix(code.Install(1).Append(nil), &net.UnixAddr{Name: cfg.Reply, Net: "unixgram"})
	require.NoError(t, err)
	p := listen(t, cfg.Socket)
	for {
		if m := p.next(); m.Kind == ccp.KindCreate {
			p.say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
			break
		}
	}
	s.until("agent")
	assert.EqualValues(t, 1, s.link.Info().Programs)
}

func TestAReplyThatIsRemovedIsMadeAgain(t *testing.T) {
	s := start(t)
	reply := s.path + ".penstock-x"
	require.Eventually(t, func() bool { return unixConnect(reply) == nil }, patience, time.Millisecond)
	require.NoError(t, os.Remove(reply))
	p := listen(t, s.path)
	p.greet()
	s.until("agent")
}

func TestAReplyThatIsTakenAwayFromAConnectionIsMadeAgain(t *testing.T) {
	s := start(t)
	reply := s.path + ".penstock-x"
	p := listen(t, s.path)
	p.greet()
	s.until("agent")
	require.NoError(t, os.Remove(reply)) // now the agent hears us, and cannot answer
	p.greet()
	s.until("agent")

	require.NoError(t, os.Remove(reply))
	other := listen(t, reply)
	require.NoError(t, os.Chtimes(reply, time.Time{}, time.Now().Add(time.Hour))) // made at another time, for certain
	s.until("fallback")
	require.Eventually(t, func() bool { return !s.link.Info().Up }, patience, time.Millisecond)
	require.NoError(t, unixConnect(reply), "it stays who has it now")
	other.die()
	p.greet()
	s.until("agent")
	assert.EqualValues(t, 3, s.link.Info().Connects)
}

func TestWhatIsInTheWayOfAReplyIsNamed(t *testing.T) {
	const cure = "; remove it, or give this agent another reply"
	path := filepath.Join(t.TempDir(), "reply")
	bind := func() (err error) {
		_, _, err = Config{Name: "x", Socket: path + ".agent", Reply: path}.dialSocket(&socket{})
		return err
	}
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.EqualError(t, bind(), `agent "x": binding `+path+": a file is there that is no socket"+cure)

	require.NoError(t, os.Remove(path))
	listen(t, path).die()
	require.NoError(t, os.Chmod(path, 0))
	require.EqualError(t, need.Unprivileged(bind), `agent "x": binding `+path+": another user has a socket there"+cure)
	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o555))
	err := need.Unprivileged(bind)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o755)) // to be removed
	require.EqualError(t, err, `agent "x": binding `+path+": an earlier process left a socket there: remove "+path+
		": permission denied"+cure)
}

// Who owns the directory may put a link in the place of the socket that the agent answers at.
func TestTheReplyOpensNoOtherFile(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	require.NoError(t, os.WriteFile(secret, nil, 0o600))
	c := Config{Reply: filepath.Join(dir, "reply")}
	require.NoError(t, os.Symlink(secret, c.Reply))
	require.Error(t, c.admitSenders())
	info, err := os.Stat(secret)
	require.NoError(t, err)
	assert.EqualValues(t, 0o600, info.Mode())
}
