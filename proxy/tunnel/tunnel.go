// Package tunnel has the interface between the proxy and the packages that end tunnels: userspace
// ends them in this process, kernelspace in the kernel.
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

// Listener is a tunnel as the proxy sees it: a way in for connections of peers, and a way out to
// these peers.
type Listener interface {
	ingress.Listener
	Inside
	// Name returns the listener's name.
	Name() string
	// Forward makes the tunnel forward datagrams. It is called once, before Serve.
	Forward(access.Datagrams, Forwarding)
	// Dial opens a connection to a peer. The peer sees source as the client's address, or the
	// gateway where source is not inside the tunnel.
	Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error)
	// Resume sets the addresses at which an earlier process last heard from peers. The tunnel sends
	// to them at once, so that they need not find out by timeouts that the process has gone.
	Resume(map[access.Key]netip.AddrPort)
	// Status returns the state of the tunnel. Peers are set by tunnels that know them. With an
	// error the counters are valid all the same.
	Status() (Status, error)
}

// Settings are those of a tunnel that may change while it runs.
type Settings struct {
	Datagrams access.Datagrams
	// Allow has destinations that are open to peers although policy closes them otherwise.
	Allow []netip.Prefix
	// Pool and Peers are WireGuard's. Pool has the prefixes of peers' addresses.
	Pool  []netip.Prefix
	Peers []access.Peer
	// Tokens, Certificate and Authorities are MASQUE's, for clients from now on.
	Tokens      []access.Token
	Certificate tls.Certificate
	// Authorities sign clients' certificates; nil: certificates are not asked for.
	Authorities *x509.CertPool
}

// Forwarding is what datagrams need besides their configuration.
type Forwarding struct {
	// Verdict asks policy, and its guard, whether a datagram may be sent; an error refuses it. down
	// has the terms of the answers: without an algorithm they share no window. up has the group and
	// the maximum rate of what the peer sends; it has no window.
	Verdict func(Sent) (down, up flow.Terms, err error)
	Flows   *flow.Manager
	Clock   func() cc.Time
	// Mark is the SO_MARK of the sockets; 0: none.
	Mark uint32
	Log  *slog.Logger
}

// Sent describes a datagram to policy.
type Sent struct {
	Peer string
	// Target has no port for an echo request.
	Source, Target netip.AddrPort
	// Host is the name that the peer gave; empty: it gave an address.
	Host string
}
