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
	"github.com/penstock-net/penstock/internal/netlab"
)

// Of a datagram: its payload, which begins with its number and with when it was sent, and with the headers
// of IPv4 and UDP.
const (
	datagramPayload = 1400
	datagramHead    = 16
	datagramBytes   = datagramPayload + 28
)

// datagramRoom is the receiver's buffer, so that only the network loses any.
const datagramRoom = 4 << 20

// leastRest is how long the sender sleeps at least: shorter naps cost more
// processor than they smooth.
const leastRest = time.Millisecond

// blast has the server send datagrams to the host until the actor stops, and
// counts what comes until ctx ends.
func (a *actor) blast(ctx context.Context) error {
	in, err := listenUDP(ctx, a.run.lab.Client, a.host)
	if err != nil {
		return err
	}
	out, err := listenUDP(ctx, a.run.lab.Server, a.server.Addr())
	if err != nil {
		return errors.Join(err, in.Close())
	}
	defer context.AfterFunc(ctx, func() { _, _ = in.Close(), out.Close() })()
	ended := make(chan error, 1)
	go func() { ended <- a.receive(in) }()
	to := in.LocalAddr().(*net.UDPAddr).AddrPort()
	err = a.blastTo(ctx, out, to)
	if err == nil {
		<-ctx.Done() // what is under way still counts
	}
	_ = out.Close() // either may be closed already
	_ = in.Close()
	return errors.Join(err, <-ended)
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
	buf := make([]byte, datagramPayload)
	sent := cc.Bytes(0) // on the wire
	for number := uint64(0); ; {
		now := a.run.now()
		due := a.Rate.BytesIn(ranFor(a.turns, now))
		for ; sent <= due; number++ {
			binary.BigEndian.PutUint64(buf, number)
			binary.BigEndian.PutUint64(buf[8:], uint64(a.run.now()))
			p.fill(buf[datagramHead:], number*datagramPayload)
			if _, err := out.WriteToUDPAddrPort(buf, to); err != nil {
				return fmt.Errorf("send datagram %d: %w", number, err)
			}
			sent += datagramBytes
			a.record.Sent += datagramPayload
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
	buf := make([]byte, datagramPayload+1)
	last := time.Duration(0) // transit of the one before; 0: there is none
	for {
		n, _, err := in.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive datagrams: %w", err)
		}
		a.read(n)
		if n != datagramPayload || !p.holds(buf[datagramHead:n], binary.BigEndian.Uint64(buf)*datagramPayload) {
			a.record.Corrupt = fmt.Sprintf("a datagram of %d bytes is not what the server sent", n)
			return errors.New(a.record.Corrupt)
		}
		now, sent := a.run.now(), time.Duration(binary.BigEndian.Uint64(buf[8:])) //nolint:gosec // what blastTo wrote
		if last > 0 && sent >= a.run.stage.Warmup {
			a.record.Jitter = append(a.record.Jitter, (now - sent - last).Abs())
		}
		last = now - sent
	}
}
