package stage

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/quic-go/quic-go"

	"github.com/penstock-net/penstock/internal/certs"
)

// quicProtocol is what both ends of a connection name.
const quicProtocol = "stage"

// quic downloads over UDP, by the server's own congestion control, until the actor stops.
func (a *actor) quic(ctx context.Context) error {
	if control := cmp.Or(a.Control, quicControl); control != quicControl {
		return a.sendNative(ctx, control, OverUDP)
	}
	out, in, err := a.openUDP(ctx)
	if err != nil {
		return err
	}
	defer func() { _, _ = out.Close(), in.Close() }()
	server, err := quic.Listen(out, &tls.Config{
		Certificates: []tls.Certificate{certs.SelfSigned(a.server.Addr().String())}, NextProtos: []string{quicProtocol},
	}, nil)
	if err != nil {
		return fmt.Errorf("start the QUIC server: %w", err)
	}
	serverEnded := make(chan error, 1)
	go func() { serverEnded <- a.serveQUIC(ctx, server) }()
	conn, err := quic.Dial(ctx, in, out.LocalAddr(), &tls.Config{
		InsecureSkipVerify: true, //nolint:gosec // the server's key was made above
		NextProtos:         []string{quicProtocol},
	}, nil)
	if err == nil {
		defer context.AfterFunc(ctx, func() { _ = conn.CloseWithError(0, "") })()
		var stream *quic.ReceiveStream
		if stream, err = conn.AcceptUniStream(ctx); err == nil {
			_ = a.take(stream, question{actor: a.number}, make([]byte, piece)) // it has no end but that of ctx
		}
	}
	return errors.Join(err, server.Close(), <-serverEnded)
}

// serveQUIC sends to the first client that connects until ctx ends.
func (a *actor) serveQUIC(ctx context.Context, server *quic.Listener) error {
	conn, err := server.Accept(ctx)
	if err != nil {
		return fmt.Errorf("accept the QUIC client: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = conn.CloseWithError(0, "") })()
	stream, err := conn.OpenUniStreamSync(ctx)
	if err != nil {
		return fmt.Errorf("open a QUIC stream: %w", err)
	}
	return a.pour(ctx, stream, question{actor: a.number}, make([]byte, piece))
}
