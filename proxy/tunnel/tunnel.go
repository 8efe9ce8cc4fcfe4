// Package tunnel says what the proxy and those that end tunnels ask of each other.
// It ends none itself: package userspace does, in this process.
package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Listener is a tunnel as the proxy sees it: a way in, each of whose connections is of a
// peer, and which reaches these peers.
type Listener interface {
	ingress.Listener
	Inside
	// Name is the listener's.
	Name() string
	// Forward has the tunnel's datagrams forwarded; once, before Serve.
	Forward(access.Datagrams, Forwarding)
	// Dial opens a connection to a peer, which sees source as whom it is from, or the
	// gateway where source is not inside the tunnel.
	Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error)
	// Resume has peers found where a process before this one heard from them last: they
	// are sent to at once, and need not find out by themselves that it has gone.
	Resume(map[access.Key]netip.AddrPort)
	// Status returns how it goes; peers are of those tunnels that know them. With an error
	// the counters are good all the same.
	Status() (Status, error)
}

// Settings are what may change of a tunnel while it runs.
type Settings struct {
	Datagrams   access.Datagrams
	Allow       []netip.Prefix  // where peers may go that is closed to them otherwise
	Pool        []netip.Prefix  // WireGuard's: where its peers' addresses are from
	Peers       []access.Peer   // WireGuard's
	Tokens      []access.Token  // MASQUE's, as is the rest
	Certificate tls.Certificate // for clients that come from now on
	Authorities *x509.CertPool  // likewise; nil: certificates are not asked for
}

// Forwarding is what datagrams need besides what configuration says of them.
type Forwarding struct {
	// Verdict is policy's, and its guard's: an error refuses what is sent. down says whose
	// window the answers share; without an algorithm nobody's. up has the group and its maximum
	// rate; a window it has not.
	Verdict func(Sent) (down, up flow.Terms, err error)
	Flows   *flow.Manager
	Clock   func() cc.Time
	Mark    uint32 // of the sockets; 0: none
	Log     *slog.Logger
}

// Sent is what policy decides on about a datagram.
type Sent struct {
	Peer           string
	Source, Target netip.AddrPort // Target has no port where it is an echo request
	Host           string         // the name that the peer gave; empty: an address
}
