//go:build linux

package e2e

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// linkRate and linkDelay make a bandwidth-delay product of 20 packets.
const (
	linkRate  = cc.Rate(12e6)
	linkDelay = 10 * time.Millisecond // one way
)

// slack is what a link's packets need to leave one after the other, and a busy
// machine to pass them on.
const slack = 5 * time.Millisecond

// segment is what a packet of the link carries.
const segment = netlab.MTU - 52

// slow is the link with a queue of so many packets.
func slow(queue int) sim.LinkConfig {
	return sim.LinkConfig{Rate: linkRate, Delay: linkDelay, QueuePackets: queue}
}

// fixed is the configuration of a window that does not move, towards the client
// alone; every flow has one of its own.
func fixed(packets int) string {
	return "defaults: {algorithm: \"static:cwnd_packets=" + strconv.Itoa(packets) + "\", group: flow, up: " +
		"{algorithm: none}}\n"
}

// record is what passed the edge's device towards the link.
type record struct {
	t       *testing.T
	path    *netlab.Path
	sniffer *netlab.Sniffer
	file    *bytes.Buffer // that the sniffer writes
	began   time.Time
	client  netlab.Addrs
	packets []Packet // once it has ended
	watch   *watch   // nil: only what the kernel does matters
}

func (s *scene) record(path *netlab.Path) *record {
	s.t.Helper()
	r := &record{t: s.t, path: path, file: &bytes.Buffer{}, began: time.Now(), client: s.ClientAddr}
	var err error
	r.sniffer, err = s.Edge.Dump(netlab.NearDevice, r.file)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _, _ = r.sniffer.Stop() })
	return r
}

// How long a machine may stand still before what senders do has to do with that:
// a socket takes a proxy for gone that does not answer for 100 ms, and a packet
// for lost that is not acknowledged 200 ms late.
const (
	unanswered = 90 * time.Millisecond
	late       = 150 * time.Millisecond
)

// answered is a record for which the proxy has to answer all along.
func (r *record) answered() *record {
	r.watch = newWatch()
	r.t.Cleanup(func() { r.watch.stop() })
	return r
}

// end ends the record. On a machine that stood still while it was made it tells
// nothing, and the test is skipped.
func (r *record) end() {
	r.t.Helper()
	if r.packets != nil {
		return
	}
	missed, err := r.sniffer.Stop()
	require.NoError(r.t, err)
	require.Zero(r.t, missed, "packets are missing from the record")
	r.packets = readPackets(r.t, r.file.Bytes(), r.began, r.client)
	if r.watch != nil {
		r.watch.skip(r.t, unanswered)
	}
	report := r.path.Report(0, r.path.Elapsed())
	if was := max(report.Down.Lateness.Max, report.Up.Lateness.Max); was > late {
		r.t.Skipf("the machine is too busy: the link was %v late, and a record with more than %v tells nothing", was,
			late)
	}
}

// watch measures how long a thread that wants to run does not.
type watch struct {
	quit, done chan struct{}
	once       sync.Once
	worst      time.Duration
}

func newWatch() *watch {
	w := &watch{quit: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(w.done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		last := time.Now()
		for {
			select {
			case <-tick.C:
				now := time.Now()
				w.worst = max(w.worst, now.Sub(last))
				last = now
			case <-w.quit:
				return
			}
		}
	}()
	return w
}

// skip skips a test during which the machine stood still for longer than most.
func (w *watch) skip(t *testing.T, most time.Duration) {
	t.Helper()
	if still := w.stop(); still > most {
		t.Skipf("the machine is too busy: it stood still for %v, and a record with more than %v tells nothing", still,
			most)
	}
}

// stop returns the longest time between two runs.
func (w *watch) stop() time.Duration {
	w.once.Do(func() { close(w.quit) })
	<-w.done
	return w.worst
}

// now is the record's clock.
func (r *record) now() time.Duration { return time.Since(r.began) }

// sending ends the record and returns what the proxy sent for a transfer.
func (r *record) sending(d *transfer) Sending {
	r.t.Helper()
	r.end()
	s := SendingTo(r.packets, netip.AddrPort{}, d.peer())
	require.NotEmpty(r.t, s.Steps)
	require.EqualValues(r.t, segment, s.MSS)
	return s
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// packets is how many segments bytes are, begun ones included.
func packets(n cc.Bytes) int { return int((n + segment - 1) / segment) }

// excess is by how many packets a sender went beyond its window. It may by one when
// nothing has come back for two round trips, as on a machine that stands still: a
// probe for a lost tail (RFC 8985 §7.3) asks no window.
func excess(s Sending, window int) (most int) {
	var last time.Duration
	for _, p := range s.Steps {
		over := packets(p.Pipe) - window
		if probe := over == 1 && p.At-last >= 4*linkDelay; p.Payload > 0 && !probe {
			most = max(most, over)
		}
		last = p.At
	}
	return most
}

// round is one round trip of a sender: it lasts until as much has arrived as was
// in flight when it began.
type round struct {
	from, to time.Duration
	sent     int // packets
	again    int // of those, sent before
	pipe     int // the most, in packets
}

// rounds cuts what happened from one moment to another into whole round trips.
func rounds(s Sending, from, to time.Duration) []round {
	var out []round
	var sent, target cc.Bytes
	var r *round
	for _, step := range s.Steps {
		if step.Payload > 0 && !step.Again {
			sent += step.Payload
		}
		if step.At < from || step.At >= to {
			continue
		}
		if r == nil || sent-step.Inflight >= target {
			out = append(out, round{from: step.At})
			r, target = &out[len(out)-1], sent
		}
		r.to = step.At
		r.pipe = max(r.pipe, packets(step.Pipe))
		if step.Payload > 0 {
			r.sent++
		}
		if step.Again {
			r.again++
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out[:len(out)-1]
}

func mostPipe(rs []round) int {
	most := 0
	for _, r := range rs {
		most = max(most, r.pipe)
	}
	return most
}

func resent(rs []round) (n int) {
	for _, r := range rs {
		n += r.again
	}
	return n
}

// transfer is a download that a test watches.
type transfer struct {
	t              *testing.T
	client, server *net.TCPConn
	seed           uint64
	size           int64

	moved atomic.Int64 // bytes that the client has
	got   chan received
	sent  chan error
}

type received struct {
	sum string
	n   int64
	err error
}

// download opens a connection and begins to send size bytes from the server to
// the client, and then the stream's end.
func (w way) download(s *scene, seed uint64, size int64) *transfer {
	s.t.Helper()
	d := w.prepare(s, seed, size)
	d.begin()
	return d
}

// prepare is download up to the first byte.
func (w way) prepare(s *scene, seed uint64, size int64) *transfer {
	s.t.Helper()
	d := &transfer{t: s.t, seed: seed, size: size, got: make(chan received, 1), sent: make(chan error, 1)}
	d.client, d.server = w.pair(s)
	return d
}

func (d *transfer) begin() {
	seed, size := d.seed, d.size
	go func() {
		_, err := io.Copy(struct{ io.Writer }{d.server}, random(seed, size))
		d.sent <- errors.Join(err, d.server.CloseWrite())
	}()
	go func() {
		sum, n, err := digest(counted{d.client, &d.moved})
		d.got <- received{sum, n, err}
	}()
}

// counted adds up what is read.
type counted struct {
	io.Reader
	n *atomic.Int64
}

func (c counted) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.n.Add(int64(n))
	return n, err
}

// reaches waits until the client has n bytes.
func (d *transfer) reaches(n int64) {
	d.t.Helper()
	require.Eventually(d.t, func() bool { return d.moved.Load() >= n }, patience, time.Millisecond)
}

// ends waits until the client has seen an end of whatever kind.
func (d *transfer) ends() received {
	d.t.Helper()
	select {
	case r := <-d.got:
		return r
	case <-time.After(patience):
		require.Fail(d.t, "the client waits for ever")
		return received{}
	}
}

// arrives waits until all has arrived as it was sent.
func (d *transfer) arrives() {
	d.t.Helper()
	r := d.ends()
	require.NoError(d.t, r.err)
	require.Equal(d.t, d.size, r.n)
	assert.Equal(d.t, digestOf(d.seed, d.size), r.sum)
	require.NoError(d.t, <-d.sent)
	d.client.Close()
	d.server.Close()
}

// peer is the client's end of the connection to the proxy.
func (d *transfer) peer() netip.AddrPort { return addrPort(d.client.LocalAddr()) }

// borrow returns a copy of the program's socket to peer.
func (p *program) borrow(peer netip.AddrPort) int {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	pidfd, err := unix.PidfdOpen(pid, 0)
	require.NoError(p.t, err)
	defer unix.Close(pidfd) //nolint:errcheck // nothing is in it
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	entries, err := os.ReadDir(dir)
	require.NoError(p.t, err)
	for _, e := range entries {
		if to, err := os.Readlink(dir + e.Name()); err != nil || !strings.HasPrefix(to, "socket:") {
			continue
		}
		number, err := strconv.Atoi(e.Name())
		require.NoError(p.t, err)
		fd, err := unix.PidfdGetfd(pidfd, number, 0)
		require.NoError(p.t, err)
		if peerOf(fd) == peer {
			return fd
		}
		require.NoError(p.t, unix.Close(fd))
	}
	require.Fail(p.t, "the program has no such socket", "%v", peer)
	return -1
}

func peerOf(fd int) netip.AddrPort {
	switch a, _ := unix.Getpeername(fd); a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}

func tcpInfo(t *testing.T, fd int) *unix.TCPInfo {
	t.Helper()
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	require.NoError(t, err)
	return info
}

// fill has the program write ahead until so many bytes wait unsent in its socket
// to peer, which normally are some 10 ms worth. It returns a copy of the socket.
func (p *program) fill(peer netip.AddrPort, bytes int) int {
	p.t.Helper()
	fd := p.borrow(peer)
	require.NoError(p.t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4*bytes))
	require.Eventually(p.t, func() bool {
		// The program sets it anew when the rate moves.
		require.NoError(p.t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, 4*bytes))
		return int(tcpInfo(p.t, fd).Notsent_bytes) >= bytes
	}, patience, time.Millisecond)
	return fd
}

func (p *program) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
}

// registered tells whether the kernel lists a congestion control.
func registered(t *testing.T, name string) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	require.NoError(t, err)
	return slices.Contains(strings.Fields(string(text)), name)
}
