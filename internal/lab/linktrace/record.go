// Package linktrace describes traces of links and records them: who wants one of the way to
// itself asks a server, which fills that way with datagrams.
package linktrace

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const (
	// headers are those of IPv4 and UDP: a datagram of payload fills an opportunity.
	headers = 28
	payload = int(sim.OpportunityBytes) - headers
	nonce   = 16
	request = nonce / 2 // bytes: the rate
	patient = 5 * time.Second
	knock   = 100 * time.Millisecond
	// burst is how much a sender that has slept too long sends at once to be on time again.
	burst = 10 * time.Millisecond
)

// Serve answers who asks for datagrams, until ctx ends. Each asks by TCP and then shows by a
// datagram of its own that it is where it says, so that no client can have others flooded; it gets
// at most the rate most, as long as its connection lasts, and one at a time is served.
func Serve(ctx context.Context, address string, most cc.Rate) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer l.Close()
	udp, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", l.Addr().String())
	if err != nil {
		return err
	}
	defer udp.Close()
	return serve(ctx, l, udp.(*net.UDPConn), most)
}

func serve(ctx context.Context, l net.Listener, udp *net.UDPConn, most cc.Rate) error {
	defer context.AfterFunc(ctx, func() {
		_ = l.Close()
		_ = udp.Close()
	})()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		_ = fill(conn, udp, most) // the end of the connection tells the client
		_ = conn.Close()
	}
}

// fill serves one client.
func fill(conn net.Conn, udp *net.UDPConn, most cc.Rate) error {
	if err := conn.SetDeadline(time.Now().Add(patient)); err != nil {
		return err
	}
	var asked [request]byte
	if _, err := io.ReadFull(conn, asked[:]); err != nil {
		return err
	}
	rate := min(cc.Rate(binary.BigEndian.Uint64(asked[:])), most)
	if rate <= 0 {
		return errors.New("it asks for no rate")
	}
	word := make([]byte, nonce)
	_, _ = rand.Read(word) // never fails
	if _, err := conn.Write(word); err != nil {
		return err
	}
	to, err := awaitWord(udp, word)
	if err != nil {
		return err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	over := make(chan struct{})
	go func() {
		_, _ = conn.Read(word) // until it closes
		close(over)
	}()
	defer func() {
		_ = conn.Close()
		<-over
	}()
	began, sent := time.Now(), cc.Bytes(0)
	datagram := make([]byte, payload)
	for {
		due := rate.BytesIn(time.Since(began))
		sent = max(sent, due-rate.BytesIn(burst))
		for ; sent < due; sent += sim.OpportunityBytes {
			if _, err := udp.WriteToUDPAddrPort(datagram, to); err != nil {
				return err
			}
		}
		select {
		case <-over:
			return nil
		case <-time.After(time.Millisecond):
		}
	}
}

// awaitWord waits for the datagram that proves an address.
func awaitWord(udp *net.UDPConn, word []byte) (netip.AddrPort, error) {
	if err := udp.SetReadDeadline(time.Now().Add(patient)); err != nil {
		return netip.AddrPort{}, err
	}
	buf := make([]byte, nonce+1)
	for {
		n, from, err := udp.ReadFromUDPAddrPort(buf)
		if err != nil || string(buf[:n]) == string(word) {
			return from, err
		}
	}
}

// Record asks a server for datagrams at a rate, which must be more than the way from there
// carries, and notes for a time when they arrive: the trace of that way in Mahimahi's format.
// Silence is an outage of the link; where the server's connection ends or its port refuses
// datagrams, the server is gone, and there is no trace. TCP ends the connection after an outage
// of two and a half minutes, when the server stops sending as well.
func Record(ctx context.Context, server string, rate cc.Rate, d time.Duration) (*sim.Trace, error) {
	trace, err := recordFrom(ctx, server, rate, d)
	if err != nil && ctx.Err() != nil { // which closes the socket below whatever was under way
		err = errors.Join(context.Cause(ctx), err)
	}
	return trace, err
}

// recordFrom is Record. Once ctx is done its errors are of sockets that were closed.
func recordFrom(ctx context.Context, server string, rate cc.Rate, d time.Duration) (*sim.Trace, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", server)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	udp, err := dialer.DialContext(ctx, "udp", conn.RemoteAddr().String())
	if err != nil {
		return nil, err
	}
	defer udp.Close()
	defer context.AfterFunc(ctx, func() { _ = udp.Close() })()
	if err := conn.SetDeadline(time.Now().Add(patient)); err != nil {
		return nil, err
	}
	var asked [request]byte
	binary.BigEndian.PutUint64(asked[:], uint64(rate))
	word := make([]byte, nonce)
	if _, err := conn.Write(asked[:]); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(conn, word); err != nil {
		return nil, fmt.Errorf("the server says nothing; it serves one at a time: %w", err)
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	ctx, end := context.WithCancelCause(ctx)
	go func() {
		_, err := io.Copy(io.Discard, conn) // nothing comes, until the connection ends
		end(fmt.Errorf("the server has ended the connection: %w", cmp.Or(err, io.EOF)))
	}()
	buf := make([]byte, payload)
	until := time.Now().Add(patient)
	for {
		if _, err := udp.Write(word); err != nil {
			return nil, err
		}
		_ = udp.SetReadDeadline(time.Now().Add(knock))
		if _, err := udp.Read(buf); err == nil {
			break
		} else if ctx.Err() != nil || time.Now().After(until) {
			return nil, errors.Join(context.Cause(ctx), errors.New("no datagram came; does a firewall stop UDP?"))
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			return nil, err
		}
	}
	began := time.Now()
	if err := udp.SetReadDeadline(began.Add(d)); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = udp.SetReadDeadline(began) })()
	var lines strings.Builder
	for came, noted := cc.Bytes(0), cc.Bytes(0); ; {
		n, err := udp.Read(buf)
		at := time.Since(began)
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case at >= d && noted == 0:
			return nil, fmt.Errorf("the link carried less than one packet of %d bytes in %v: record for longer",
				sim.OpportunityBytes, d)
		case at >= d:
			lines.WriteString(strconv.FormatInt(d.Milliseconds(), 10) + "\n") // the length of the loop
			return sim.ReadTrace(server, strings.NewReader(lines.String()))
		case err != nil:
			return nil, err
		}
		for came += cc.Bytes(n + headers); came-noted >= sim.OpportunityBytes; noted += sim.OpportunityBytes {
			lines.WriteString(strconv.FormatInt(at.Milliseconds(), 10) + "\n")
		}
	}
}
