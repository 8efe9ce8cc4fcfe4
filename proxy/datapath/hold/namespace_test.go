package hold

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) { os.Exit(need.Run(m)) }

// enterNamespace moves the test's goroutine, on a thread of its own, to a network namespace with its loopback up.
func enterNamespace(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // for good: the thread ends with the test's goroutine
	_, err := netns.New()
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(lo))
}

// queueUDP sends UDP that this namespace sends to a port into a netfilter queue, unless nobody serves it.
func queueUDP(t *testing.T, port, queue uint16) {
	t.Helper()
	c, err := nftables.New()
	require.NoError(t, err)
	table := c.AddTable(&nftables.Table{Name: "test", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{
		Name: "output", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput,
		Priority: nftables.ChainPriorityFilter,
	})
	target := make([]byte, 8) // queue, number of queues, flags (linux/netfilter/xt_NFQUEUE.h)
	binary.NativeEndian.PutUint16(target, queue)
	binary.NativeEndian.PutUint16(target[2:], 1)
	binary.NativeEndian.PutUint16(target[4:], 1)
	unknown := xt.Unknown(target)
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Target{Name: "NFQUEUE", Rev: 3, Info: &unknown},
	}})
	require.NoError(t, c.Flush())
}

// openCopies binds a group of the namespace's log.
func openCopies(t *testing.T) *Copies {
	t.Helper()
	copies, err := OpenCopies(77)
	require.NoError(t, err)
	t.Cleanup(copies.Close)
	return copies
}

// connectUDP returns two sockets, of which the first sends to the other, at a port of the loopback.
func connectUDP(t *testing.T, port int) (sender, receiver *net.UDPConn) {
	t.Helper()
	receiver, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	require.NoError(t, err)
	t.Cleanup(func() { _ = receiver.Close() })
	sender, err = net.DialUDP("udp4", nil, receiver.LocalAddr().(*net.UDPAddr))
	require.NoError(t, err)
	t.Cleanup(func() { _ = sender.Close() })
	return sender, receiver
}

func TestThePacketsOfAKernelQueueGoOnWithTheirVerdicts(t *testing.T) {
	enterNamespace(t)
	queueUDP(t, 9, 5)
	sender, receiver := connectUDP(t, 9)
	received := func(text string) {
		t.Helper()
		buffer := make([]byte, 100)
		require.NoError(t, receiver.SetReadDeadline(time.Now().Add(5*time.Second)))
		n, err := receiver.Read(buffer)
		require.NoError(t, err)
		assert.Equal(t, text, string(buffer[:n]))
	}
	send := func(text string) {
		t.Helper()
		_, err := sender.Write([]byte(text))
		require.NoError(t, err)
	}
	send("nobody serves the queue")
	received("nobody serves the queue")

	q, err := OpenQueue(5, 8)
	require.NoError(t, err)
	_, err = OpenQueue(5, 8)
	assert.ErrorContains(t, err, "no other program may have that number")

	var held []Packet
	collect := func(p Packet) { held = append(held, p) }
	for _, text := range []string{"dropped", "accepted", "marked"} {
		send(text)
	}
	for len(held) < 3 {
		_, err := q.Wait(5 * time.Second)
		require.NoError(t, err)
		_, err = q.Receive()
		require.NoError(t, err)
		q.ForEach(collect)
	}
	head, ok := parseHeader(held[0].Content)
	require.True(t, ok)
	assert.Equal(t, uint16(9), head.flow.Target.Port())
	assert.Equal(t, 28+len("dropped"), held[0].Length)
	q.Drop(held[0].ID)
	q.Accept(held[1].ID)
	q.AcceptWithMark(held[2].ID, 0x100)
	require.NoError(t, q.Flush())
	received("accepted")
	received("marked")

	setSegment := func(bytes int) {
		t.Helper()
		raw, err := sender.SyscallConn()
		require.NoError(t, err)
		require.NoError(t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, bytes)
		}))
		require.NoError(t, err)
	}
	setSegment(4)
	for _, whole := range []bool{true, false} {
		q.SetGSO(whole)
		require.NoError(t, q.Flush())
		held = nil
		send("one-two-last")
		for bytes := 0; bytes < 12; {
			_, err := q.Wait(5 * time.Second)
			require.NoError(t, err)
			_, err = q.Receive()
			require.NoError(t, err)
			q.ForEach(collect)
			bytes = 0
			for _, p := range held {
				bytes += p.Length - 28
			}
		}
		assert.Len(t, held, map[bool]int{true: 1, false: 3}[whole])
		for _, p := range held {
			q.Accept(p.ID)
		}
		require.NoError(t, q.Flush())
		for _, segment := range []string{"one-", "two-", "last"} {
			received(segment)
		}
	}
	setSegment(0)

	for range 9 { // the ninth finds the queue full
		send("held")
	}
	received("held")
	q.Close()
	send("nobody serves the queue any more")
	received("nobody serves the queue any more")
}

// serveQueue holds what comes into a queue of the kernel until end, in windows of algorithm window.
func serveQueue(t *testing.T, number uint16) (h *Holder, end func()) {
	t.Helper()
	q, err := OpenQueue(number, 1024)
	require.NoError(t, err)
	t.Cleanup(q.Close)
	echoes, err := OpenEchoSocket()
	require.NoError(t, err)
	t.Cleanup(echoes.Close)
	began := time.Now()
	h = New(Config{
		Flows: &flow.Manager{}, Clock: func() cc.Time { return cc.Time(time.Since(began)) + 1 },
		KeepServed: func(time.Duration) (bool, error) { return true, nil },
		Decide:     func(FlowKey, string) Decision { return Decision{Manage: true, Acknowledged: true, Terms: window} },
	}, q, echoes)
	ctx, stop := context.WithCancel(t.Context())
	copies := openCopies(t) // here: a goroutine of its own is not in the namespace
	ended := make(chan error, 1)
	go func() { ended <- h.ServeQueue(ctx, q, echoes, copies) }()
	return h, func() {
		stop()
		require.NoError(t, <-ended)
	}
}

func TestAKernelQueueIsServedUntilItsEnd(t *testing.T) {
	enterNamespace(t)
	queueUDP(t, 9, 6)
	sender, receiver := connectUDP(t, 9)
	h, end := serveQueue(t, 6)
	for h.Stats().EchoAnswers == 0 || h.Stats().AcceptedPackets < 10 {
		_, err := sender.Write([]byte("datagram"))
		require.NoError(t, err)
		require.NoError(t, receiver.SetReadDeadline(time.Now().Add(5*time.Second)))
		_, err = receiver.Read(make([]byte, 100))
		require.NoError(t, err)
	}
	end()
	assert.Zero(t, h.Stats().Waiting)
}

func TestAnswersToOtherProgramsAreNotReceived(t *testing.T) {
	enterNamespace(t)
	ours, err := OpenEchoSocket()
	require.NoError(t, err)
	defer ours.Close()
	others, err := OpenEchoSocket()
	require.NoError(t, err)
	defer others.Close()
	for _, to := range []string{"127.0.0.1", "::1"} {
		address := netip.MustParseAddr(to)
		others.Send(address, 1, 7)
		ours.Send(address, 1, 8)
		var received []uint16
		require.Eventually(t, func() bool {
			ours.Receive(func(_ netip.Addr, _, sequence uint16) { received = append(received, sequence) })
			return len(received) > 0
		}, 5*time.Second, time.Millisecond, to)
		assert.Equal(t, []uint16{8}, received, to)
	}
}

func TestNothingWakesAQueueThatHasEnded(t *testing.T) {
	enterNamespace(t)
	echoes, err := OpenEchoSocket()
	require.NoError(t, err)
	defer echoes.Close()
	copies := openCopies(t)
	for range 300 {
		q, err := OpenQueue(7, 8)
		require.NoError(t, err)
		h := New(Config{
			Flows: &flow.Manager{}, Clock: func() cc.Time { return 1 },
			KeepServed: func(time.Duration) (bool, error) { return true, nil },
		}, q, echoes)
		ctx, stop := context.WithCancel(t.Context())
		stop()
		require.NoError(t, h.ServeQueue(ctx, q, echoes, copies))
		q.Close() // the race detector finds a wake beside it
	}
}

// serveFor serves a queue for a Holder of cfg until check reports true.
func serveFor(t *testing.T, number uint16, cfg Config, opened func(), check func(Stats) bool) *Holder {
	t.Helper()
	q, err := OpenQueue(number, IdleQueueLimit)
	require.NoError(t, err)
	defer q.Close()
	opened()
	echoes, err := OpenEchoSocket()
	require.NoError(t, err)
	defer echoes.Close()
	copies := openCopies(t)
	defer copies.Close()
	cfg.Flows = &flow.Manager{}
	if cfg.Decide == nil {
		cfg.Decide = func(FlowKey, string) Decision { return Decision{} }
	}
	h := New(cfg, q, echoes)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.ServeQueue(ctx, q, echoes, copies) }()
	require.Eventually(t, func() bool { return check(h.Stats()) }, 10*time.Second, time.Millisecond)
	stop()
	require.NoError(t, <-ended)
	return h
}

func TestPacketsOfAPauseWithoutClientsAreDropped(t *testing.T) {
	enterNamespace(t)
	queueUDP(t, 9, 8)
	sender, _ := connectUDP(t, 9)
	send := func(packets int) {
		for range packets {
			_, err := sender.Write([]byte("late"))
			require.NoError(t, err)
		}
	}
	var now atomic.Int64
	now.Store(int64(time.Second))
	for name, c := range map[string]struct {
		waiting int           // packets when serving begins
		pause   time.Duration // behind the first call of KeepServed, after which a packet comes
		late    int
	}{
		"half a minute":                     {0, 30 * time.Second, 1},
		"others found the queue full":       {IdleQueueLimit + 10, 0, IdleQueueLimit},
		"short, and the queue had room":     {IdleQueueLimit - 1, 0, 0},
		"as long as nothing had to be done": {0, 10 * time.Second, 0},
	} {
		begin := now.Load()
		cfg := Config{
			Clock: func() cc.Time { return cc.Time(now.Load()) },
			KeepServed: func(time.Duration) (bool, error) {
				if c.pause > 0 && now.CompareAndSwap(begin, begin+int64(c.pause)) {
					send(1)
				}
				return true, nil
			},
		}
		h := serveFor(t, 8, cfg, func() { send(c.waiting) },
			func(s Stats) bool { return s.LateDrops+s.UnmanagedPackets > 0 })
		assert.EqualValues(t, c.late, h.Stats().LateDrops, name)
	}
	cfg := Config{
		Clock:      func() cc.Time { return cc.Time(now.Load()) },
		KeepServed: func(time.Duration) (bool, error) { return true, nil },
		Decide: func(FlowKey, string) Decision {
			now.Add(int64(10 * time.Second))
			send(1)
			return Decision{}
		},
	}
	h := serveFor(t, 8, cfg, func() { send(1) }, func(s Stats) bool { return s.LateDrops+s.UnmanagedPackets > 1 })
	assert.EqualValues(t, 1, h.Stats().LateDrops, "in the midst of a decision")
}

func TestAnErrorThatLastsIsLoggedOnce(t *testing.T) {
	enterNamespace(t)
	var calls atomic.Int64
	var said bytes.Buffer
	began := time.Now()
	c, err := nftables.New(nftables.AsLasting())
	require.NoError(t, err)
	defer func() { _ = c.CloseLasting() }()
	serveFor(t, 8, Config{
		Clock: func() cc.Time { return cc.Time(time.Since(began)) + 1 },
		Log:   slog.New(slog.NewTextHandler(&said, nil)),
		KeepServed: func(time.Duration) (bool, error) {
			calls.Add(1)
			c.AddTable(&nftables.Table{Name: fmt.Sprint("test", calls.Load()), Family: nftables.TableFamilyIPv4})
			return false, errors.Join(unix.EPERM, c.Flush()) // the new table makes it be called again
		},
	}, func() {}, func(Stats) bool { return calls.Load() >= 3 })
	assert.Equal(t, 1, strings.Count(said.String(), "hold: packets pass the queue"))
}

func TestAFloodOfAnswersDoesNotKeepPacketsFromTheirVerdicts(t *testing.T) {
	enterNamespace(t)
	for _, to := range []string{"127.0.0.1", "::1"} {
		s, err := OpenEchoSocket()
		require.NoError(t, err)
		address, received := netip.MustParseAddr(to), 0
		s.Send(address, 1, 1)
		s.Receive(func(netip.Addr, uint16, uint16) {
			if received++; received < 1000 { // each answer is behind another one
				s.Send(address, 1, 1)
			}
		})
		assert.Positive(t, received, to)
		assert.LessOrEqual(t, received, answersBatch, to)
		s.Close()
	}
}

func TestChangesOfTablesThatFindNoRoomAreNoticed(t *testing.T) {
	enterNamespace(t)
	q, err := OpenQueue(8, 8)
	require.NoError(t, err)
	defer q.Close()
	require.NoError(t, unix.SetsockoptInt(q.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1))
	c, err := nftables.New()
	require.NoError(t, err)
	table := &nftables.Table{Name: "first", Family: nftables.TableFamilyIPv4}
	c.AddTable(table)
	require.NoError(t, c.Flush())
	receive := func() {
		for n := 1; n > 0; {
			n, err = q.Receive()
			require.NoError(t, err)
			q.ForEach(func(Packet) {})
		}
	}
	receive()
	require.True(t, q.hasNewTables)
	q.hasNewTables = false
	for i := range 100 { // they fill the buffer, and are no news
		c.AddChain(&nftables.Chain{Name: fmt.Sprint("chain", i), Table: table})
		require.NoError(t, c.Flush())
	}
	c.AddTable(&nftables.Table{Name: "second", Family: nftables.TableFamilyIPv4})
	require.NoError(t, c.Flush())
	receive()
	assert.True(t, q.hasNewTables)
}
