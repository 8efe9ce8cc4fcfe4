package agent

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

const (
	remoteDial = 5 * time.Second // limit for connection and handshake
	remoteDead = 2 * time.Second // limit without an acknowledgement from the other machine
)

// remoteKeepAlive finds out within about remoteDead that the other machine is gone.
var remoteKeepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: 500 * time.Millisecond, Count: 2}

// dialRemote connects to an agent on another machine, over TLS. Messages follow one
// another, each with its length in its header.
func (l *Link) dialRemote(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, remoteDial)
	defer cancel()
	conn, err := l.handshake(ctx)
	if err != nil {
		return nil, fmt.Errorf("agent %q: connecting to %s: %w", l.cfg.Name, l.cfg.Address, err)
	}
	return conn, nil
}

// handshake connects to the first of the agent's addresses that answers, and shakes hands there.
func (l *Link) handshake(ctx context.Context) (net.Conn, error) {
	name, port, err := net.SplitHostPort(l.cfg.Address)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{
		KeepAliveConfig: remoteKeepAlive,
		Control: func(_, _ string, raw syscall.RawConn) error {
			var err error
			ms := int(remoteDead.Milliseconds())
			return errors.Join(raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, ms)
			}), err)
		},
	}
	dial := func(ctx context.Context, addr netip.Addr) (net.Conn, error) {
		return d.DialContext(ctx, "tcp", net.JoinHostPort(addr.String(), port))
	}
	var conn net.Conn
	if addr, literal := netip.ParseAddr(name); literal == nil {
		conn, err = dial(ctx, addr)
	} else {
		conn, err = happyeyeballs.Dial(ctx, happyeyeballs.Host{
			Name: name, Spare: datapath.NewPlaces(2 * happyeyeballs.MaxAttempts),
		}, dial, func(late net.Conn) { _ = late.Close() })
	}
	if err != nil {
		return nil, err
	}
	cfg := l.tls.Load()
	if cfg.ServerName == "" {
		cfg = cfg.Clone()
		cfg.ServerName = name
	}
	secured := tls.Client(conn, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return secured, nil
}

// disconnectReason returns why there is no connection, without the parts of the error that differ each time: the time
// of day and our port.
func disconnectReason(err error) string {
	var invalid x509.CertificateInvalidError
	var op *net.OpError
	switch {
	case errors.As(err, &invalid):
		return fmt.Sprintf("certificate: %d", invalid.Reason)
	case errors.As(err, &op):
		return op.Err.Error()
	}
	return err.Error()
}

// serveRemote serves a connection to an agent on another machine until it ends.
func (l *Link) serveRemote(ctx context.Context, conn net.Conn) error {
	return l.serveUntilEnd(ctx, l.cfg.Address, connection{fd: -1}, func() { _ = conn.Close() },
		func(context.Context) error { return l.receiveRemote(conn) },
		func(ctx context.Context) error { return l.sendRemote(ctx, conn) })
}

// sendRemote sends waiting messages until the connection ends.
func (l *Link) sendRemote(ctx context.Context, conn net.Conn) error {
	w := bufio.NewWriter(conn)
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-l.wakeSender:
		}
		for b := l.takeOldest(); b != nil; b = l.takeOldest() {
			_, _ = w.Write(b) // Flush has the error as well
		}
		if err := w.Flush(); err != nil {
			// receiveRemote may get the reason, such as the alert of an agent that does not trust us. It has time
			// to return first.
			select {
			case <-ctx.Done():
			case <-time.After(remoteDead):
			}
			return fmt.Errorf("nobody reads what is sent: %w", err)
		}
	}
}

// takeOldest removes and returns the message that has waited longest; nil: none waits.
func (l *Link) takeOldest() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waiting.isEmpty() {
		return nil
	}
	return l.waiting.removeFirst().bytes
}

// receiveRemote passes the agent's messages to the flows. It ends at a malformed header, which
// does not tell where the next message begins.
func (l *Link) receiveRemote(conn net.Conn) error {
	r, buf := bufio.NewReader(conn), make([]byte, ccp.MaxFromAgent)
	for bad := 0; bad < maxMalformed; {
		if _, err := io.ReadFull(r, buf[:ccp.HeaderLen]); err != nil {
			return fmt.Errorf("the agent has closed the connection: %w", err)
		}
		n, err := ccp.Length(buf)
		if err != nil || n > len(buf) {
			l.malformed.Add(1)
			l.agent.CountMalformed()
			return errors.Join(fmt.Errorf("%w: one of %d bytes", ccp.ErrMalformed, n), err)
		}
		if _, err := io.ReadFull(r, buf[ccp.HeaderLen:n]); err != nil {
			return fmt.Errorf("the agent has closed the connection: %w", err)
		}
		if !l.heard.Swap(true) { // by now it has taken our certificate
			l.noteReached(l.cfg.Address)
		}
		bad = l.countMalformed(bad, l.handleDatagram(buf[:n]))
	}
	return fmt.Errorf("%w: %d in a row", ccp.ErrMalformed, maxMalformed)
}
