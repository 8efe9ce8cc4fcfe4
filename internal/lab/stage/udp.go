package stage

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// datagramHead is what a datagram begins with: its number and when it was sent.
const datagramHead = 16

// datagramRoom is the receiver's buffer, so that only the network loses any.
const datagramRoom = 4 << 20

// leastRest is how long the sender sleeps at least: shorter naps cost more
// processor than they smooth.
const leastRest = time.Millisecond

// blast has the server send datagrams to the host until the actor stops, and
// counts what comes until ctx ends.
func (a *actor) blast(ctx context.Context) error {
	out, in, err := a.openUDP(ctx)
	if err != nil {
		return err
	}
	closeBoth := func() { _, _ = out.Close(), in.Close() } // either may be closed already
	defer context.AfterFunc(ctx, closeBoth)()
	ended := make(chan error, 1)
	go func() { ended <- a.receive(in) }()
	to := in.LocalAddr().(*net.UDPAddr).AddrPort()
	err = a.blastTo(ctx, out, to)
	if err == nil {
		<-ctx.Done() // what is under way still counts
	}
	closeBoth()
	return errors.Join(err, <-ended)
}

// openUDP opens a socket at the server, and one at the host.
func (a *actor) openUDP(ctx context.Context) (server, host *net.UDPConn, err error) {
	if server, err = listenUDP(ctx, a.run.lab.Server, a.server.Addr()); err != nil {
		return nil, nil, err
	}
	if host, err = listenUDP(ctx, a.run.lab.Client, a.host); err != nil {
		return nil, nil, errors.Join(err, server.Close())
	}
	return server, host, nil
}

func listenUDP(ctx context.Context, node *netlab.Node, host netip.Addr) (conn *net.UDPConn, err error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			// Beyond the system's limit, where that is allowed; else up to it.
			if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, datagramRoom) != nil {
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, datagramRoom)
			}
		})
	}}
	err = node.Do(func() error {
		c, err := lc.ListenPacket(ctx, "udp4", netip.AddrPortFrom(host, 0).String())
		if err != nil {
			return fmt.Errorf("open a socket for datagrams: %w", err)
		}
		conn = c.(*net.UDPConn)
		return nil
	})
	return conn, err
}

// blastTo sends at the actor's rate, in its turns.
func (a *actor) blastTo(ctx context.Context, out *net.UDPConn, to netip.AddrPort) error {
	p := patternOf(a.number, 0)
	buf := make([]byte, sim.DatagramPayload)
	sent := cc.Bytes(0) // on the wire
	for number := uint64(0); ; {
		now := a.run.now()
		due := a.Rate.BytesIn(ranFor(a.turns, now))
		for ; sent <= due; number++ {
			binary.BigEndian.PutUint64(buf, number)
			binary.BigEndian.PutUint64(buf[8:], uint64(a.run.now()))
			p.fill(buf[datagramHead:], number*uint64(sim.DatagramPayload))
			if _, err := out.WriteToUDPAddrPort(buf, to); err != nil {
				return fmt.Errorf("send datagram %d: %w", number, err)
			}
			sent += sim.DatagramBytes
			a.record.Sent += sim.DatagramPayload
		}
		resumes, more := nextTurn(a.turns, now)
		if !more {
			return nil
		}
		if err := a.run.wait(ctx, max(resumes, now+leastRest, now+a.Rate.TimeFor(sent-due))); err != nil {
			return err
		}
	}
}

// receive counts what comes until the socket is closed.
func (a *actor) receive(in *net.UDPConn) error {
	p := patternOf(a.number, 0)
	buf := make([]byte, sim.DatagramPayload+1)
	var jitter sim.Jitter
	defer func() { a.record.Jitter = jitter.All }()
	for {
		n, _, err := in.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive datagrams: %w", err)
		}
		a.read(n)
		at := binary.BigEndian.Uint64(buf) * uint64(sim.DatagramPayload)
		if n != int(sim.DatagramPayload) || !p.holds(buf[datagramHead:n], at) {
			a.record.Corrupt = fmt.Sprintf("a datagram of %d bytes is not what the server sent", n)
			return errors.New(a.record.Corrupt)
		}
		now, sent := a.run.now(), time.Duration(binary.BigEndian.Uint64(buf[8:])) //nolint:gosec // what blastTo wrote
		jitter.Arrive(now-sent, sent >= a.run.stage.Warmup)
	}
}
