//go:build linux

package native

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
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
	out    outstanding
	fed    bool // by forecasts of the receiver
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
	return &Sender{
		fd: fd, token: newToken(), algo: algorithm, params: params, out: newOutstanding(),
		fed: cc.TakesForecasts(algorithm, params),
	}, nil
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
		if now >= s.out.Deadline() && s.out.look(now) {
			s.tell(now)
		}
		next, err := s.pump()
		if err != nil {
			return err
		}
		if err := s.wait(min(next, s.tickAt, s.out.Deadline())); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sender) now() cc.Time { return cc.Time(time.Since(s.began) + time.Second) }

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
		writeData(s.packet[:], s.token, s.out.nextTx(), uint64(segment), s.wants())
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

// wants returns what the next data packet says of forecasts.
func (s *Sender) wants() uint16 {
	switch {
	case !s.fed:
		return 0
	case s.out.report.Pipe+2*payload > s.limit.Cwnd:
		return uint16(1 + min(cc.SproutPause(s.out.SRTT(), true), time.Minute).Milliseconds()) //nolint:gosec // it fits
	}
	return 1
}

// hear takes in the acknowledgements and forecasts that have come.
func (s *Sender) hear() error {
	var b [forecastBytes + 1]byte
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
			s.tell(s.now())
		}
		if f, ok := parseForecast(b[:n], s.token); ok && s.fed {
			s.flow.TakeForecast(s.now(), startOf(s.out.nextTx()), f)
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
