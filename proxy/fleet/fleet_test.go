package fleet

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/fleet/division"
)

const limit = cc.Rate(20_000_000)

func testKey(seed byte) Key {
	raw := make([]byte, keySize)
	for i := range raw {
		raw[i] = byte(i)*7 + seed
	}
	return Key(base64.StdEncoding.EncodeToString(raw))
}

// edge is a Fleet with flows that send all they may.
type edge struct {
	*Fleet
	flows  *flow.Manager
	log    *syncBuffer
	stop   context.CancelFunc
	drain  chan struct{}
	ended  chan struct{}
	killed bool
}

type syncBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.String()
}

func freePort(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

func start(t *testing.T, name, at string, key Key, join ...string) *edge {
	began := time.Now()
	clock := func() cc.Time { return cc.Time(time.Second).Add(time.Since(began)) }
	e := &edge{flows: &flow.Manager{}, log: &syncBuffer{}, drain: make(chan struct{}), ended: make(chan struct{})}
	s := Settings{Listen: at, Name: name, Key: key, Join: join}
	require.NoError(t, s.Validate())
	var err error
	e.Fleet, err = NewFleet(Config{
		Settings: s, Flows: e.flows, Clock: clock, Start: began,
		Log: slog.New(slog.NewTextHandler(e.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	require.NoError(t, err)
	require.NoError(t, e.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	e.stop = func() {
		if !e.killed { // it cannot leave any more
			cancel()
			<-e.ended
		}
	}
	go func() { defer close(e.ended); e.RunEdge(ctx, e.drain) }()
	t.Cleanup(e.stop)
	return e
}

// send has a flow of the shared group take all it may.
func (e *edge) send(t *testing.T) {
	f, err := e.flows.Open(e.cfg.Clock(), flow.Terms{Group: "host", Algorithm: "none", MaxRate: limit, Shared: true},
		flow.Leg{})
	require.NoError(t, err)
	stop, done := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(stop); <-done })
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
				for f.Take(e.cfg.Clock(), 100_000).Bytes > 0 {
				}
			}
		}
	}()
}

// rate returns the part that is in force in flows.
func (e *edge) rate() cc.Rate {
	for _, l := range e.flows.SharedLimits(e.cfg.Clock()) {
		return l.Rate
	}
	return 0
}

func sees(e *edge, n int) func() bool {
	return func() bool {
		live := 0
		for _, m := range e.Status().Members {
			if m.Live {
				live++
			}
		}
		return live == n
	}
}

const patience, poll = 20 * time.Second, 20 * time.Millisecond

func TestEdgesShareARate(t *testing.T) {
	at := freePort(t)
	a := start(t, "a", at, testKey(1))
	b := start(t, "b", freePort(t), testKey(1), at)
	c := start(t, "c", freePort(t), testKey(1), at)
	for _, e := range []*edge{a, b, c} {
		require.Eventually(t, sees(e, 3), patience, poll)
	}
	a.send(t)
	require.Eventually(t, func() bool { return a.rate() == limit }, patience, poll, "one alone has all")
	b.send(t)
	half := func() bool {
		sum := a.rate() + b.rate()
		return sum > limit*9/10 && sum <= limit && a.rate() < limit*6/10 && b.rate() < limit*6/10
	}
	require.Eventually(t, half, patience, poll, "two have a half each")

	wrong := start(t, "wrong", freePort(t), testKey(2), at)
	require.Eventually(t, func() bool {
		return bytes.Contains([]byte(a.log.String()), []byte("no installed keys could decrypt"))
	}, patience, poll)
	assert.Len(t, wrong.Status().Members, 1)
	assert.Len(t, a.Status().Members, 3)
	for _, e := range []*edge{a, b, c, wrong} {
		assert.NotContains(t, e.log.String(), string(testKey(1)))
	}

	// Keys and addresses change one edge after another, and nobody misses another edge.
	old, next := testKey(1), testKey(3)
	for _, step := range []Settings{{Key: old, OtherKey: next}, {Key: next, OtherKey: old}, {Key: next}} {
		for _, e := range []*edge{a, b, c} {
			require.NoError(t, e.Reload(&step))
		}
		time.Sleep(2 * division.Lease)
		for _, e := range []*edge{a, b, c} {
			assert.True(t, sees(e, 3)())
		}
	}

	// One that ends without a word is found out by its port, and the other has all.
	b.killed = true
	require.NoError(t, b.list.Shutdown())
	began := time.Now()
	require.Eventually(t, func() bool { return a.rate() == limit }, patience, poll)
	t.Logf("all is had %v after the other edge has ended", time.Since(began).Round(time.Millisecond))
	c.stop() // and one that leaves says so
	require.Eventually(t, func() bool { return len(a.Status().Members) == 1 }, patience, poll)
}

func TestMemoriesGoWhereHostsGo(t *testing.T) {
	at := freePort(t)
	a, b := start(t, "a", at, testKey(1)), start(t, "b", freePort(t), testKey(1), at)
	require.Eventually(t, sees(a, 2), patience, poll)
	known := flow.Memory{
		Terms:  flow.Terms{Group: "192.0.2.1", Host: netip.MustParseAddr("192.0.2.1"), Algorithm: cc.Default},
		Window: flow.Dormant{Cwnd: 200_000, BaseRTT: 40 * time.Millisecond, Rate: limit, MSS: 1448},
	}
	require.NoError(t, a.flows.Remember(a.cfg.Clock(), known))
	close(a.drain)
	require.Eventually(t, func() bool { return len(b.flows.Memories(b.cfg.Clock())) == 1 }, patience, poll)
	got := b.flows.Memories(b.cfg.Clock())[0]
	assert.Equal(t, known.Window, got.Window)
	assert.Equal(t, known.Terms.Host, got.Terms.Host)
	assert.EqualValues(t, 1, b.Status().Remembered)
}

// TestAnEdgeThatIsKilledComesBack starts an edge again at once, with its name and address. memberlist does not notice.
func TestAnEdgeThatIsKilledComesBack(t *testing.T) {
	atA, atB := freePort(t), freePort(t)
	a, b := start(t, "a", atA, testKey(1)), start(t, "b", atB, testKey(1), atA)
	require.Eventually(t, sees(a, 2), patience, poll)
	b.killed = true
	require.NoError(t, b.list.Shutdown())
	require.Eventually(t, func() bool { return len(a.Status().Members) == 1 }, patience, poll)
	again := start(t, "b", atB, testKey(1), atA)
	require.Eventually(t, sees(a, 2), patience, poll)
	require.Eventually(t, sees(again, 2), patience, poll)
}

// TestEdgesThatAreForgottenAreToldNothing has an edge hear of others that memberlist finds dead.
func TestEdgesThatAreForgottenAreToldNothing(t *testing.T) {
	a := start(t, "a", freePort(t), testKey(1))
	for i := range 2 * division.MaxMembers {
		n := &memberlist.Node{Name: fmt.Sprintf("pod-%d", i), Addr: net.IPv4(127, 0, 0, 1), Port: 1}
		a.NotifyJoin(n)
		n.State = memberlist.StateDead
		a.NotifyLeave(n)
		a.mu.Lock()
		a.edge.RemoveMember(a.readClock(), n.Name)
		a.mu.Unlock()
	}
	a.exchangeMessages()
	a.mu.Lock()
	defer a.mu.Unlock()
	assert.Empty(t, a.nodes)
}

// TestAnEdgeEndsInTimeThoughOthersDoNotAnswer drains an edge that knows a silent one and tries to join another.
func TestAnEdgeEndsInTimeThoughOthersDoNotAnswer(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it accepts and says nothing
	require.NoError(t, err)
	defer silent.Close()
	join := make([]string, maxJoin)
	for i := range join {
		join[i] = silent.Addr().String()
	}
	atA := freePort(t)
	a := start(t, "a", atA, testKey(1), join...)
	b := start(t, "b", freePort(t), testKey(1), atA)
	require.Eventually(t, sees(a, 2), patience, poll)
	silentPort := silent.Addr().(*net.TCPAddr).Port
	a.NotifyJoin(&memberlist.Node{Name: "silent", Addr: net.IPv4(127, 0, 0, 1), Port: uint16(silentPort)})
	known := flow.Memory{
		Terms:  flow.Terms{Algorithm: cc.Default},
		Window: flow.Dormant{Cwnd: 200_000, BaseRTT: 40 * time.Millisecond, Rate: limit, MSS: 1448},
	}
	const hosts = 600
	for i := range hosts {
		known.Terms.Host = netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
		known.Terms.Group = known.Terms.Host.String()
		require.NoError(t, a.flows.Remember(a.cfg.Clock(), known))
	}
	close(a.drain)
	ended := make(chan struct{})
	go func() { defer close(ended); a.stop() }()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the edge waits for others")
	}
	assert.Len(t, b.flows.Memories(b.cfg.Clock()), hosts)
}

// TestWhatIsKnownOfHostsIsTakenOneByOne has another edge know an algorithm that this one lacks, and windows out of
// bounds.
func TestWhatIsKnownOfHostsIsTakenOneByOne(t *testing.T) {
	a := start(t, "a", freePort(t), testKey(1))
	good := func(host string) flow.Memory {
		return flow.Memory{
			Terms:  flow.Terms{Group: host, Host: netip.MustParseAddr(host), Algorithm: cc.Default},
			Window: flow.Dormant{Cwnd: 200_000, BaseRTT: 40 * time.Millisecond, Rate: limit, MSS: 1448},
		}
	}
	newer, huge := good("192.0.2.1"), good("192.0.2.2")
	newer.Terms.Algorithm, huge.Window.Cwnd = "of-a-later-version", cc.MaxCwnd+1
	body, err := json.Marshal([]flow.Memory{newer, huge, good("192.0.2.3"), good("2001:db8::1")})
	require.NoError(t, err)
	a.NotifyMsg(a.wrapMessage(kindMemories, body))
	assert.Len(t, a.flows.Memories(a.cfg.Clock()), 2)
	assert.EqualValues(t, 2, a.Status().Remembered)
	assert.EqualValues(t, 1, a.Status().Refused)
}

// TestTwoEdgesOfOneNameAreLoggedOnce has memberlist find them with each message.
func TestTwoEdgesOfOneNameAreLoggedOnce(t *testing.T) {
	a := start(t, "a", freePort(t), testKey(1))
	for range 100 {
		a.NotifyConflict(&memberlist.Node{Name: "b"}, &memberlist.Node{Name: "b"})
	}
	assert.Equal(t, 1, strings.Count(a.log.String(), "two edges have one name"))
}

func TestSettings(t *testing.T) {
	good := Settings{Listen: "10.0.0.1:7946", Name: "a", Key: testKey(1)}
	require.NoError(t, good.Validate())
	for _, row := range []struct {
		name  string
		wrong func(*Settings)
		want  string
	}{
		{"a fleet needs an address", func(s *Settings) { s.Listen = "" }, "listen"},
		{"which is not every one", func(s *Settings) { s.Listen = ":7946" }, "every address"},
		{"of either family", func(s *Settings) { s.Listen = "[::]:7946" }, "every address"},
		{"nor a name, which memberlist takes for every one", func(s *Settings) {
			s.Listen = "localhost:7946"
		}, "no address"},
		{"nor has a zone, for the same reason", func(s *Settings) { s.Listen = "[fe80::1%eth0]:7946" }, "zone"},
		{"and a port that others know", func(s *Settings) { s.Listen = "10.0.0.1:0" }, "know the port"},
		{"and a key", func(s *Settings) { s.Key = "" }, "openssl rand"},
		{"of 32 bytes", func(s *Settings) { s.Key = "c2hvcnQ=" }, "32 bytes"},
		{"that is random", func(s *Settings) {
			s.Key = Key(base64.StdEncoding.EncodeToString(make([]byte, 32)))
		}, "too regular"},
		{"and others by address", func(s *Settings) { s.Join = []string{"edge"} }, "join[0]"},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := good
			row.wrong(&s)
			assert.ErrorContains(t, s.Validate(), row.want)
		})
	}
	assert.NoError(t, new(Settings).Validate(), "there is none")
	assert.NotEmpty(t, (&Settings{Listen: "0.0.0.0:7946"}).Warnings())
}

func FuzzReceive(f *testing.F) {
	m := &division.Message{At: 1}
	f.Add(append([]byte{messageVersion, kindDivision, 1, 'b'}, m.AppendPackets(nil)[0]...))
	f.Add(fmt.Appendf([]byte{messageVersion, kindMemories, 1, 'b'}, `[{"Window":{"Cwnd":1,"BaseRTT":1,"MSS":1},`+
		`"Terms":{"Host":"192.0.2.1","Algorithm":%q}}]`, cc.Default))
	f.Add([]byte{2, kindDivision, 1, 'b'})
	log := slog.New(slog.DiscardHandler)
	f.Fuzz(func(t *testing.T, message []byte) {
		e, err := NewFleet(Config{
			Settings: Settings{Name: "a", Key: testKey(1)}, Flows: &flow.Manager{},
			Clock: func() cc.Time { return cc.Time(time.Hour) }, Log: log,
		})
		require.NoError(t, err)
		e.NotifyMsg(message)
		assert.LessOrEqual(t, len(e.Status().Members), 2)
	})
}
