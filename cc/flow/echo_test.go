package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// echoBed is an EchoFlow over a path that answers after a round trip, one segment for each packet.
type echoBed struct {
	*testbed
	*EchoFlow
	woken int
}

func openEchoBed(t *testing.T, terms Terms) *echoBed {
	b := &echoBed{testbed: newTestbed(t)}
	var err error
	b.EchoFlow, err = b.mgr.OpenEcho(b.now, terms, ByEcho, func() { b.woken++ })
	require.NoError(t, err)
	return b
}

// pour sends packets of a segment until one is refused, at most 1000, with the echo requests that are due, and returns
// the number of packets and the requests.
func (b *echoBed) pour() (packets int, requests []uint16) {
	for packets < 1000 && b.EchoFlow.Take(b.now, mss, false) {
		packets++
		if b.NextEcho() <= b.now {
			requests = append(requests, b.SendEcho(b.now))
		}
	}
	return packets, requests
}

func TestAnEchoFlowKeepsToItsWindow(t *testing.T) {
	b := openEchoBed(t, static(10))
	packets, requests := b.pour()
	assert.Equal(t, 10, packets)
	assert.Len(t, requests, 3, "one for each three packets")

	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[1])
	assert.Equal(t, 1, b.woken)
	packets, _ = b.pour()
	assert.Equal(t, 6, packets, "the second request acknowledges all that had left before it")
	assert.Equal(t, 20*time.Millisecond, b.Snapshot().SRTT)
	b.ReceiveEcho(b.now, requests[0])
	b.ReceiveEcho(b.now, 77)
	packets, _ = b.pour()
	assert.Zero(t, packets, "late and unknown answers say nothing")
}

// TestAWindowThatShrinksHasARequestForEachPacket empties the queue: the least round trip is behind one packet.
func TestAWindowThatShrinksHasARequestForEachPacket(t *testing.T) {
	b := openEchoBed(t, static(40))
	packets, requests := b.pour()
	require.Len(t, requests, packets/3)
	b.wait(20 * time.Millisecond)
	require.NoError(t, b.flow.Move(b.now, static(10)))
	b.ReceiveEcho(b.now, requests[len(requests)-1])
	packets, requests = b.pour()
	assert.Len(t, requests, packets)

	b.wait(time.Millisecond)
	late := b.SendEcho(b.now)
	b.wait(15 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[0])
	b.ReceiveEcho(b.now, late)
	assert.Equal(t, 16*time.Millisecond, b.Snapshot().MinRTT, "a request that follows late did not wait behind a packet")
}

func TestTheEndOfABurstHasARequest(t *testing.T) {
	b := openEchoBed(t, static(10))
	assert.Equal(t, cc.Never, b.NextEcho(), "nothing is in flight")
	b.pour()
	assert.Equal(t, b.now.Add(echoAtEndOfBurst), b.NextEcho(), "packets wait for the answer")

	b = openEchoBed(t, static(10))
	require.True(t, b.EchoFlow.Take(b.now, 200, false))
	assert.Equal(t, b.now.Add(echoAtEnd), b.NextEcho(), "none waits")
}

func TestWhatIsNotAnsweredCountsAsGone(t *testing.T) {
	b := openEchoBed(t, static(9))
	b.pour()
	b.wait(echoTimeout)
	assert.LessOrEqual(t, b.NextTimeout(), b.now)
	b.Expire(b.now)
	assert.Equal(t, 3*stallWeight, b.lost)
	assert.Zero(t, b.Snapshot().SRTT, "a request that is lost shows no round trip")
	packets, requests := b.pour()
	assert.Equal(t, 9, packets)
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[0])
	assert.Zero(t, b.lost)
}

func TestAHostThatAnswersNoMoreIsKnownByItsSilenceWhileItIsAsked(t *testing.T) {
	b := openEchoBed(t, static(9))
	_, requests := b.pour()
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[2])
	b.pour()
	for range 2 { // all requests of both are lost
		b.wait(time.Hour)
		b.Expire(b.now)
		b.pour()
		assert.Equal(t, NoTrouble, b.Trouble(), "an idle host was not asked")
	}
	for began := b.now; b.now.Sub(began) <= maxSilence; {
		assert.Equal(t, NoTrouble, b.Trouble())
		b.pour()
		b.wait(echoTimeout)
		b.Expire(b.now)
	}
	_, requests = b.pour()
	assert.Equal(t, Silent, b.Trouble())
	b.ReceiveEcho(b.now, requests[0])
	assert.Equal(t, NoTrouble, b.Trouble())
}

// TestALateAnswerLengthensTheTimeout has a host answer all requests after its first one has timed out.
func TestALateAnswerLengthensTheTimeout(t *testing.T) {
	const rtt = 2 * time.Second
	b := openEchoBed(t, static(9))
	_, requests := b.pour()
	sent := b.now
	b.wait(echoTimeout)
	b.Expire(b.now)
	b.pour()
	b.wait(rtt - echoTimeout)
	b.ReceiveEcho(b.now, requests[0])
	assert.Zero(t, b.lost)
	assert.Equal(t, sent.Add(echoTimeout+echoTimeoutRTTs*rtt), b.NextTimeout())
	b.ReceiveEcho(b.now, requests[0])
	assert.Equal(t, rtt, b.srtt, "of a copy nothing is learned")
}

// TestRequestsBecomeAsRareAsAnswers has a host answer so many requests in each second.
func TestRequestsBecomeAsRareAsAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		perSecond   int
		least, most int // requests in the last of thirty seconds
		trouble     Trouble
	}{
		"all of them":   {10_000, 450, 550, NoTrouble},
		"250, as macOS": {250, 100, 250, NoTrouble},
		"60":            {60, 45, 75, NoTrouble},
		"10":            {10, 10, 60, RareAnswers},
	} {
		t.Run(name, func(t *testing.T) {
			b := openEchoBed(t, static(200))
			requests, trouble := 0, NoTrouble
			answers := map[cc.Time]uint16{} // by when they come
			for range 30 {
				requests = 0
				for range 1000 {
					b.wait(time.Millisecond)
					if sequence, ok := answers[b.now]; ok {
						b.ReceiveEcho(b.now, sequence)
					}
					b.Expire(b.now)
					for range 6 {
						b.EchoFlow.Take(b.now, mss, false)
					}
					if b.NextEcho() > b.now {
						continue
					}
					requests++
					if sequence := b.SendEcho(b.now); requests <= c.perSecond {
						answers[b.now.Add(20*time.Millisecond)] = sequence
					}
				}
				trouble = max(trouble, b.Trouble())
			}
			assert.InDelta(t, (c.least+c.most)/2, requests, float64(c.most-c.least+1)/2)
			assert.Equal(t, c.trouble, trouble)
		})
	}
}

// TestAnswersThatAreFasterThanATransportDoNotCrossItsQueue has a TCP flow beside measure another round trip.
func TestAnswersThatAreFasterThanATransportDoNotCrossItsQueue(t *testing.T) {
	for name, c := range map[string]struct {
		echo, transport time.Duration
		inflight        cc.Bytes // of the transport
		want            Trouble
	}{
		"they see the same queue":              {80 * time.Millisecond, 84 * time.Millisecond, 10 * mss, NoTrouble},
		"a router answers":                     {5 * time.Millisecond, 84 * time.Millisecond, 10 * mss, BesideThePath},
		"its only segment waits at the client": {5 * time.Millisecond, 84 * time.Millisecond, mss, NoTrouble},
		"the difference is small":              {time.Millisecond, 9 * time.Millisecond, 10 * mss, NoTrouble},
	} {
		t.Run(name, func(t *testing.T) {
			b := openEchoBed(t, static(40))
			l := b.open(static(40))
			for range 200 {
				l.r.RTT = c.transport
				l.send(c.inflight - l.r.Pipe)
				b.wait(compareEvery)
				l.ack(l.r.Pipe)
				l.send(c.inflight)
				b.EchoFlow.Take(b.now, mss, false)
				b.ReceiveEcho(b.now.Add(c.echo), b.SendEcho(b.now))
			}
			assert.Equal(t, c.want, b.Trouble())
		})
	}
}

func TestAPacketAloneAlwaysLeaves(t *testing.T) {
	b := openEchoBed(t, static(2))
	assert.True(t, b.EchoFlow.Take(b.now, 60_000, false), "one of several segments is larger than the window")
	assert.False(t, b.EchoFlow.Take(b.now, mss, false))
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, b.SendEcho(b.now.Add(-20*time.Millisecond)))
	for range 1000 { // what was lent is paid back by answers, however small the packets are
		if b.EchoFlow.Take(b.now, 1250, false) {
			b.ReceiveEcho(b.now.Add(1), b.SendEcho(b.now))
		}
		b.wait(20 * time.Millisecond)
	}
	assert.Greater(t, b.Snapshot().Delivered, 500*cc.Bytes(1250))
}

func TestSparseFlowsAreLentRoom(t *testing.T) {
	b := openEchoBed(t, static(10))
	_, requests := b.pour()
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[2])
	b.pour()
	assert.False(t, b.EchoFlow.Take(b.now, 200, false))
	assert.True(t, b.EchoFlow.Take(b.now, 200, true))
}

func TestAnEchoFlowSharesByItsNumberOfFlows(t *testing.T) {
	b := openEchoBed(t, static(40))
	require.NoError(t, b.SetFlows(b.now, 3))
	l := b.open(static(40))
	b.pour()
	l.send(100 * mss)
	b.waitForDivision()
	assert.Equal(t, 10*mss, l.limit.Cwnd, "a quarter")
}

func TestTermsOfSeveralFlows(t *testing.T) {
	one := Terms{Algorithm: "static", Class: Guarantee, Target: 4e6, MinRate: 2e6, ConnectionRate: 5e6, MaxRate: 7e6}
	for name, c := range map[string]struct {
		n    int
		want Terms
	}{
		"one flow": {1, Terms{Weight: 1, Target: 4e6, MinRate: 2e6, ConnectionRate: 5e6}},
		"three, with as much as the group may have": {3, Terms{
			Weight: 3, Target: 12e6, MinRate: 6e6, ConnectionRate: 15e6,
		}},
		"more than have room": {5000, Terms{Weight: MaxWeight, Target: 20e9, MinRate: 7e6, ConnectionRate: 25e9}},
	} {
		c.want.Algorithm, c.want.Class, c.want.MaxRate = one.Algorithm, one.Class, one.MaxRate
		assert.Equal(t, c.want, one.multiply(c.n), name)
		assert.NoError(t, c.want.checkClass(), name)
	}
}

// TestALargePacketLeavesBesideASmallFlow has a packet larger than the window wait while a call never lets it be empty.
func TestALargePacketLeavesBesideASmallFlow(t *testing.T) {
	b := openEchoBed(t, static(10))
	large := 20 * mss
	type sent struct {
		at       cc.Time
		sequence uint16
	}
	var requests []sent
	left := false
	for range 200 { // a call's packet each 10 ms, answers after 40 ms
		b.EchoFlow.Take(b.now, 200, true)
		requests = append(requests, sent{b.now, b.SendEcho(b.now)})
		if left = b.EchoFlow.Take(b.now, large, false); left {
			break
		}
		b.wait(10 * time.Millisecond)
		for len(requests) > 0 && b.now.Sub(requests[0].at) >= 40*time.Millisecond {
			b.ReceiveEcho(b.now, requests[0].sequence)
			requests = requests[1:]
		}
	}
	assert.True(t, left)
}

// follow opens packets that the group's other flows acknowledge, and counts their wakes.
func (p *testbed) follow(terms Terms) (e *EchoFlow, woken *int) {
	p.t.Helper()
	woken = new(int)
	e, err := p.mgr.OpenEcho(p.now, terms, ByTransport, func() { *woken++ })
	require.NoError(p.t, err)
	return e, woken
}

// pourInto takes packets of a segment until one is refused, at most 1000.
func (p *testbed) pourInto(e *EchoFlow) (n int) {
	for n < 1000 && e.Take(p.now, mss, false) {
		n++
	}
	return n
}

func TestFollowersPassWhereNoOtherMemberWantsTheWindow(t *testing.T) {
	p := newTestbed(t)
	e, woken := p.follow(static(10))
	assert.Equal(t, 1000, p.pourInto(e), "without any flow")
	l := p.open(static(10))
	assert.Equal(t, 3*mss, l.send(3*mss))
	assert.Equal(t, 1000, p.pourInto(e), "beside one that has all it wants")
	l.send(64 * mss)
	assert.Less(t, p.pourInto(e), 10)
	l.Close(p.now)
	p.wait(time.Second)
	assert.Equal(t, 1, *woken)
	assert.Equal(t, 1000, p.pourInto(e))
	assert.Zero(t, e.Snapshot().Inflight)
}

func TestAnotherMembersAcknowledgementIsTheFollowers(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	e, woken := p.follow(static(10))
	trip := func() {
		p.wait(20 * time.Millisecond)
		l.ack(l.r.Pipe)
		l.send(64 * mss)
	}
	l.send(64 * mss)
	p.pourInto(e)
	trip()
	p.pourInto(e)
	trip()
	for range 20 {
		p.wait(time.Millisecond) // paced to its part
		p.pourInto(e)
	}
	assert.Equal(t, 4*mss, e.Snapshot().Inflight, "half the window, in pairs")
	before := *woken
	l.ack(mss)
	assert.Equal(t, before, *woken, "that byte had left before them")
	p.wait(20 * time.Millisecond)
	l.send(64 * mss)
	p.wait(20 * time.Millisecond)
	l.ack(l.r.Pipe)
	assert.Greater(t, *woken, before)
	assert.Equal(t, 1000*mss, 1000*mss+e.Snapshot().Inflight, "all had left before the newest byte")
}

// TestFlowsHaveTheWindowBackFromFollowers has an enforcing leg, which asks for nothing.
func TestFlowsHaveTheWindowBackFromFollowers(t *testing.T) {
	for name, end := range map[string]func(*testbed, *EchoFlow){
		"that close":                  func(p *testbed, e *EchoFlow) { e.Close(p.now) },
		"that echoes acknowledge now": func(p *testbed, e *EchoFlow) { e.AcknowledgeBy(p.now, ByEcho) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newTestbed(t)
			l := p.openEnforced(static(10))
			l.write(mss, mss)
			l.report()
			p.wait(20 * time.Millisecond)
			l.ack(mss)
			e, _ := p.follow(static(10))
			l.fill()
			p.pourInto(e)
			p.waitForDivision()
			require.Less(t, l.limit.Cwnd, 10*mss)
			end(p, e)
			p.wait(time.Second)
			p.wait(0)
			assert.Equal(t, 10*mss, l.limit.Cwnd)
		})
	}
}

// Whatever comes: the group counts what its members have in flight, the flow gets its part of the window, and
// packets that wait are woken.
func TestWhateverComesFlowsKeepTheirPartBesideFollowers(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newTestbed(t)
		window := cc.Bytes(rapid.IntRange(4, 100).Draw(rt, "window"))
		terms := static(float64(window))
		terms.MaxRate = cc.Rate(rapid.IntRange(0, 1).Draw(rt, "limited")) * 10e6
		e, woken := p.follow(terms)
		l := p.open(terms)
		source, waits := ByTransport, false
		for range rapid.IntRange(1, 80).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0:
				l.send(cc.Bytes(rapid.IntRange(1, 200_000).Draw(rt, "want")))
			case 1:
				if n := l.r.Pipe; n > 0 {
					l.ack(min(n, mss*cc.Bytes(rapid.IntRange(1, 50).Draw(rt, "acked"))))
				}
			case 2:
				n := cc.Bytes(rapid.IntRange(1, 1500).Draw(rt, "size"))
				waits = !e.Take(p.now, n, rapid.Bool().Draw(rt, "sparse"))
			case 3:
				p.wait(time.Duration(rapid.IntRange(0, 50).Draw(rt, "ms")) * time.Millisecond)
				p.wait(0)
			case 4:
				if rapid.IntRange(0, 5).Draw(rt, "switch") == 0 {
					source = ByEcho - source
					e.AcknowledgeBy(p.now, source)
				}
			}
			g := l.group()
			require.Equal(rt, l.counted+e.flow.counted, g.inflight)
			require.Equal(rt, e.flow.taken-e.flow.last.Acked, e.flow.inflight)
			require.GreaterOrEqual(rt, e.Snapshot().Delivered, cc.Bytes(0))
			require.LessOrEqual(rt, l.inflight(), window*mss)
		}
		e.AcknowledgeBy(p.now, ByTransport)
		before := *woken
		for range 100 {
			p.wait(10 * time.Millisecond)
			p.wait(0)
			if l.r.Pipe > 0 {
				l.ack(l.r.Pipe)
			}
		}
		if waits {
			require.Positive(rt, *woken)
			require.LessOrEqual(rt, *woken-before, 3)
		}
		require.Zero(rt, e.Snapshot().Inflight)
		require.True(rt, e.Take(p.now, mss, false))
	})
}

func TestAskingForPacketsAllocatesNothing(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(100))
	e, _ := p.follow(static(100))
	l.send(200 * mss)
	step := func() {
		e.Take(p.now, mss, false)
		p.wait(time.Millisecond)
	}
	for range 1000 {
		step()
	}
	assert.Zero(t, testing.AllocsPerRun(1000, step))
}

// TestOneAnswerToSeveralPackets has what carries the packets acknowledge each third, and those before it with it.
func TestOneAnswerToSeveralPackets(t *testing.T) {
	b := openEchoBed(t, static(9))
	for range 100 {
		var newest uint16
		n := 0
		for b.EchoFlow.Take(b.now, mss, false) {
			newest = b.SendEcho(b.now)
			n++
		}
		b.wait(45 * time.Millisecond)
		b.ReceiveAck(b.now, newest-uint16(n)+3, 3, 5*time.Millisecond)
		assert.Equal(t, cc.Never, b.NextEcho(), "each packet is a request")
	}
	assert.Equal(t, NoTrouble, b.Trouble(), "all are answered")
	assert.Zero(t, b.spacing)
	assert.Zero(t, b.lost)
	b.wait(time.Second)
	b.ReceiveAck(b.now, b.sequence, 6, 0)
	require.True(t, b.EchoFlow.Take(b.now, mss, false))
	newest := b.SendEcho(b.now)
	b.wait(60 * time.Millisecond)
	b.ReceiveAck(b.now, newest, 1, 10*time.Millisecond)
	assert.Equal(t, 50*time.Millisecond, b.report.RTT, "without the time for which the host kept the answer")
	require.True(t, b.EchoFlow.Take(b.now, mss, false))
	newest = b.SendEcho(b.now)
	b.wait(60 * time.Millisecond)
	b.ReceiveAck(b.now, newest, 1, 50*time.Millisecond)
	assert.Equal(t, 60*time.Millisecond, b.report.RTT, "it cannot have kept it for as long")
}
