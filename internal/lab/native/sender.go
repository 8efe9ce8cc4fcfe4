//go:build linux

package native

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// longestWait is how long the sender waits at most, to see that it is to end.
const longestWait = 50 * time.Millisecond

// newToken draws the number by which a receiver knows its sender.
func newToken() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint64(b[:])
}

// Sender is a bulk sender. Its socket is in the network namespace of the thread that
// opened it.
type Sender struct {
	fd     int
	token  uint64
	algo   string
	params cc.Params

	began  time.Time
	flow   *flow.Flow
	tickAt cc.Time
	limit  flow.Limit
	paced  cc.Time // not to send before
	look   cc.Time // for losses; 0: with the next acknowledgement
	out    outstanding
	packet [DataBytes]byte

	sent func(all, again cc.Bytes) // of Run
}

// Open opens a sender's socket to a receiver.
func Open(to netip.AddrPort, algorithm string, params cc.Params) (*Sender, error) {
	if !to.Addr().Is4() {
		return nil, fmt.Errorf("native: send to %s: only IPv4 addresses are supported", to)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("native: open a socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
		return nil, errors.Join(fmt.Errorf("native: connect to %s: %w", to, err), unix.Close(fd))
	}
	return &Sender{fd: fd, token: newToken(), algo: algorithm, params: params, out: newOutstanding()}, nil
}

// Run sends until ctx ends, and closes the socket. It calls sent with all bytes so far, and with how many of them were
// sent once more.
func (s *Sender) Run(ctx context.Context, sent func(all, again cc.Bytes)) (err error) {
	runtime.LockOSThread() // the waits of a thread are exact, those of a goroutine are not
	defer runtime.UnlockOSThread()
	defer func() { err = errors.Join(err, unix.Close(s.fd)) }()
	s.began, s.sent = time.Now(), sent
	manager := flow.Manager{Seed: s.token, Arm: func(_ int, at cc.Time) { s.tickAt = min(s.tickAt, at) }}
	s.tickAt = cc.Never
	terms := flow.Terms{Group: "native", Alone: true, Algorithm: s.algo, Params: s.params}
	apply := func(l flow.Limit) {
		s.paced = cc.Repace(s.now(), s.paced, s.limit.PacingRate, l.PacingRate)
		s.limit = l
	}
	if s.flow, err = manager.Open(s.now(), terms, flow.Leg{Enforces: true, Apply: apply}); err != nil {
		return fmt.Errorf("native: %w", err)
	}
	defer func() { s.flow.Close(s.now()) }()
	s.tell(s.now())
	for ctx.Err() == nil {
		if err := s.hear(); err != nil {
			return err
		}
		now := s.now()
		if now >= s.tickAt {
			s.tickAt = cc.Never
			s.tickAt = min(s.tickAt, manager.Tick(0, now))
		}
		if now >= s.out.timeout() {
			s.out.expire(now)
			s.tell(now)
		}
		if s.look > 0 && now >= s.look {
			s.look = s.out.detect(now)
			s.out.report.RTT = 0
			s.tell(now)
		}
		next, err := s.pump()
		if err != nil {
			return err
		}
		if err := s.wait(min(next, s.tickAt, s.out.timeout(), s.lookAt())); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sender) now() cc.Time { return cc.Time(time.Since(s.began) + time.Second) }

func (s *Sender) lookAt() cc.Time {
	if s.look == 0 {
		return cc.Never
	}
	return s.look
}

// tell reports to the flow.
func (s *Sender) tell(now cc.Time) {
	s.out.report.At = now
	s.flow.Report(s.out.report)
}

// pump sends what window and pace allow. It returns when it is to go on; cc.Never: with
// the next acknowledgement.
func (s *Sender) pump() (next cc.Time, err error) {
	sent := false
	defer func() {
		if sent {
			s.out.report.RTT = 0
			s.tell(s.now())
		}
	}()
	for s.out.allows(s.limit.Cwnd) {
		now := s.now()
		if s.paced > now {
			return s.paced, nil
		}
		segment, _ := s.out.next()
		writeData(s.packet[:], s.token, s.out.txBase+uint64(len(s.out.txs)), uint64(segment))
		switch _, err := unix.Write(s.fd, s.packet[:]); {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOBUFS):
			return now.Add(time.Millisecond), nil // this machine's own queue is full
		case err != nil:
			return 0, os.NewSyscallError("send", err)
		}
		s.out.send(now)
		s.sent(s.out.report.Written-ahead+s.out.report.Lost, s.out.report.Lost)
		sent = true
		if s.limit.PacingRate > 0 {
			// A wait that ended late is made up for, but not a whole pause.
			s.paced = max(s.paced, now.Add(-time.Millisecond)).Add(s.limit.PacingRate.TimeFor(payload))
		}
	}
	return cc.Never, nil
}

// hear takes in the acknowledgements that have come.
func (s *Sender) hear() error {
	var b [ackBytes + 1]byte
	for {
		n, err := unix.Read(s.fd, b[:])
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return os.NewSyscallError("receive", err)
		}
		if a, ok := parseAck(b[:n], s.token); ok && s.out.take(s.now(), a, s.limit.Cwnd) {
			s.look = s.out.detect(s.now())
			s.tell(s.now())
		}
	}
}

// wait waits for an acknowledgement, until a time at most.
func (s *Sender) wait(until cc.Time) error {
	d := min(until.Sub(s.now()), longestWait)
	if until == cc.Never {
		d = longestWait
	}
	if d <= 0 {
		return nil
	}
	ts := unix.NsecToTimespec(int64(d))
	_, err := unix.Ppoll([]unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLIN}}, &ts, nil) //nolint:gosec // a descriptor
	if err != nil && !errors.Is(err, unix.EINTR) {
		return os.NewSyscallError("ppoll", err)
	}
	return nil
}

// silence is how long a sender must have sent nothing before a receiver takes up another.
const silence = time.Second

// Receive answers the packets of one sender at a time until conn is closed. It calls took with the payload of each
// segment that had not come before.
func Receive(conn net.PacketConn, took func(cc.Bytes)) error {
	var r arrivals
	var heard time.Time // when the sender's latest packet came; zero: there is no sender
	buf, reply := make([]byte, DataBytes+1), make([]byte, 0, ackBytes)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("native: receive: %w", err)
		}
		now := time.Now()
		if n == DataBytes && now.Sub(heard) > silence {
			if token := binary.BigEndian.Uint64(buf); token != r.token {
				r = arrivals{token: token}
			}
		}
		if a, ok := r.take(buf[:n]); ok {
			if heard = now; r.isNew(buf[:n]) {
				took(payload)
			}
			if _, err := conn.WriteTo(a.write(reply[:0], r.token), from); err != nil && !errors.Is(err, net.ErrClosed) {
				return fmt.Errorf("native: acknowledge: %w", err)
			}
		}
	}
}
