package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/ingress"
)

const (
	// udpPath is the path of a CONNECT-UDP request by the default template of RFC 9298 §2,
	// before target_host and target_port.
	udpPath = "/.well-known/masque/udp/"

	udpQueue = 64 // datagrams that may wait for a request's QUIC connection
	udpHops  = 64 // the hop limit of what leaves

	resolveTimeout = 10 * time.Second // a target's name
	maxLookups     = 64               // at a time, of two sockets each

	capsuleDatagram = 0         // RFC 9297 §3.5
	maxUDP          = 65527 + 8 // of a datagram's payload (RFC 9298 §5), and the context before it
)

// udpStream is a CONNECT-UDP request: a session of Datagrams with one target.
type udpStream struct {
	// name is the peer's.
	name string
	// queue has datagrams for the client.
	queue chan ackedDatagram
	// cancel ends the request.
	cancel context.CancelFunc
}

// ackedDatagram is an HTTP datagram, and who waits for its acknowledgement.
type ackedDatagram struct {
	content []byte
	ack     quic.AckRequest
}

// udpTarget parses the target in a request's path: an address and port, or a name and a port.
func udpTarget(r *http.Request) (netip.AddrPort, string, error) {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), udpPath)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[2] != "" {
		return netip.AddrPort{}, "", fmt.Errorf("targets are asked for at %sHOST/PORT/", udpPath)
	}
	host, err := url.PathUnescape(parts[0]) // an IPv6 address has its colons escaped
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	return ingress.Destination(net.JoinHostPort(host, parts[1]))
}

// errSessionOver ends a request after Datagrams has ended its session.
var errSessionOver = errors.New("the session is over")

// inwardUDP passes on payloads that come in QUIC's datagrams.
func inwardUDP(ctx context.Context, datagrams *quic.Datagrams, pass func([]byte) bool) error {
	defer datagrams.Close()
	batch := make([][]byte, 0, inwardBatch)
	for {
		var err error
		if batch, err = datagrams.Receive(ctx, batch); err != nil {
			return err
		}
		for _, b := range batch {
			if payload, ok := payloadUDP(b); ok && !pass(payload) {
				return errSessionOver
			}
		}
	}
}

// capsulesUDP passes on payloads that come in the stream, and returns when the client ends it.
func capsulesUDP(stream io.Reader, pass func([]byte) bool) error {
	capsules := http3.NewCapsuleParser(stream)
	for {
		kind, content, err := capsules.Next()
		if err != nil {
			return err
		}
		if kind != capsuleDatagram { // to be passed over (RFC 9297 §3.2)
			if _, err := io.Copy(io.Discard, content); err != nil {
				return err
			}
			continue
		}
		b, err := io.ReadAll(io.LimitReader(content, maxUDP+1))
		if err != nil {
			return err
		}
		if len(b) > maxUDP {
			return fmt.Errorf("a datagram of more than %d bytes", maxUDP)
		}
		if payload, ok := payloadUDP(b); ok && !pass(payload) {
			return errSessionOver
		}
	}
}

// payloadUDP returns the UDP payload of an HTTP datagram; false: the datagram is malformed, or of
// an extension that is not supported.
func payloadUDP(b []byte) ([]byte, bool) {
	id, n, err := quicvarint.Parse(b)
	return b[min(n, len(b)):], err == nil && id == 0
}

// queueDatagram queues a datagram for the client. It returns an error if there is no room. It
// refuses a datagram that fits no QUIC datagram, so that the queue of a client that acknowledges
// nothing stays small.
func (u *udpStream) queueDatagram(payload []byte, ack quic.AckRequest) error {
	if contextID+len(payload) > len(oversized) {
		return syscall.EMSGSIZE
	}
	b := append(make([]byte, contextID, contextID+len(payload)), payload...)
	select {
	case u.queue <- ackedDatagram{b, ack}:
		return nil
	default:
		return syscall.ENOBUFS
	}
}
