package userspace

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	connectip "github.com/quic-go/connect-ip-go"
	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// sessionQueue bounds the packets that wait for a session's QUIC connection: 20 ms at 500 Mbit/s.
// The stack drops packets beyond it, and their senders slow down.
const sessionQueue = 1024

// How many packets of a client's go into the stack, and out of it, at once.
const (
	inwardBatch  = 64
	outwardBatch = 16
)

// What comes before each packet in a datagram: a quarter of the stream's number (RFC 9297
// §2.1), and a context ID, zero for IP packets (RFC 9484 §6).
const (
	contextID    = 1 // byte
	beforePacket = 8 + contextID
)

// maxRequestedAddresses bounds the addresses of one request, because answers wait until the client
// reads them.
const maxRequestedAddresses = 64

// ipSession is a CONNECT-IP session of a client.
type ipSession struct {
	masque   *MASQUE
	name     string
	endpoint string
	// addrs are its inner addresses: one of each prefix of the pool.
	addrs []netip.Addr
	// scope is what the client has asked to reach.
	scope     ipScope
	conn      *quicgo.Conn
	stream    *http3.Stream
	datagrams *quic.Datagrams
	// outlet has the stack's packets for addrs; nil: the session has not begun.
	outlet *netstack.Outlet

	received, sent atomic.Uint64 // bytes of packets
}

// addTraffic returns the sum of t and the session's traffic.
func (s *ipSession) addTraffic(t tunnel.Traffic) tunnel.Traffic {
	return tunnel.Traffic{Received: t.Received + s.received.Load(), Sent: t.Sent + s.sent.Load()}
}

// hijacked gives connect-ip a stream that is used here too. connect-ip handles its capsules, and
// ipSession its datagrams.
type hijacked struct {
	http.ResponseWriter
	stream *http3.Stream
}

func (hijacked) WriteHeader(int) {}

func (t hijacked) HTTPStream() (*http3.Stream, error) { return t.stream, nil }

func (t hijacked) Header() http.Header { return http.Header{} }

// runSession moves packets both ways, and answers requests for addresses, until the stream ends.
func (s *ipSession) runSession(w http.ResponseWriter, r *http.Request) (err error) {
	w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	w.WriteHeader(http.StatusOK)
	if s.stream, err = w.(http3.HTTPStreamer).HTTPStream(); err != nil {
		return err
	}
	capsules, err := (&connectip.Proxy{}).Proxy(hijacked{w, s.stream}, nil)
	if err != nil {
		return err
	}
	s.datagrams, err = quic.ReceiveDatagrams(s.stream.QlogTrace(), s.stream.StreamID(), s.stream.ReceiveDatagram)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	var done sync.WaitGroup
	defer func() {
		s.masque.removeSession(s)
		cancel()
		_ = capsules.Close()
		done.Wait()
	}()
	s.masque.addSession(s)
	done.Go(func() { s.moveInward(ctx) })
	done.Go(func() { s.moveOutward(ctx) })

	if err := s.assignAddresses(capsules); err != nil {
		return err
	}
	done.Go(func() { // what the client assigns to us is of no use, but would wait
		for {
			if _, err := capsules.ReceiveAddressAssignment(ctx); err != nil {
				return
			}
		}
	})
	for {
		asked, err := capsules.ReceiveAddressRequest(ctx)
		if err != nil {
			return err
		}
		if len(asked.Prefixes) > maxRequestedAddresses {
			return fmt.Errorf("the client asks for %d addresses at once", len(asked.Prefixes))
		}
		if err := s.answerAddressRequest(asked); err != nil {
			return err
		}
	}
}

// assignAddresses sends the client its addresses, and the routes that it may use.
func (s *ipSession) assignAddresses(capsules *connectip.Conn) error {
	var prefixes []netip.Prefix
	for _, a := range s.addrs {
		prefixes = append(prefixes, prefixOf(a))
	}
	if err := capsules.AssignAddresses(prefixes); err != nil {
		return err
	}
	return capsules.AdvertiseRoute(s.scope.advertisedRoutes(s.addrs))
}

// answerAddressRequest answers with the addresses that the session has. An answer replaces all
// before it (RFC 9484 §4.7.1).
func (s *ipSession) answerAddressRequest(asked *connectip.AddressRequest) error {
	rest := slices.Clone(s.addrs)
	given := make([]netip.Prefix, len(asked.Prefixes)) // zero: refused
	for i, p := range asked.Prefixes {
		j := slices.IndexFunc(rest, func(a netip.Addr) bool {
			return a.Is4() == p.Addr().Is4() && (p.Addr().IsUnspecified() || p.Contains(a))
		})
		if j >= 0 {
			given[i] = prefixOf(rest[j])
			rest = slices.Delete(rest, j, j+1)
		}
	}
	var others []netip.Prefix
	for _, a := range rest {
		others = append(others, prefixOf(a))
	}
	return asked.Respond(given, others)
}

// moveInward moves packets from the client into the stack, in batches.
func (s *ipSession) moveInward(ctx context.Context) {
	defer s.datagrams.Close()
	batch, packets := make([][]byte, 0, inwardBatch), make([][]byte, 0, inwardBatch)
	for {
		var err error
		if batch, err = s.datagrams.Receive(ctx, batch); err != nil {
			return
		}
		packets = packets[:0]
		for _, b := range batch {
			if p, ok := s.packetOf(b); ok {
				s.clampMSS(p)
				s.received.Add(uint64(len(p)))
				packets = append(packets, p)
			}
		}
		s.masque.stack.Deliver(packets...)
	}
}

// packetOf returns the packet in a datagram; false: the client may not send it.
func (s *ipSession) packetOf(b []byte) ([]byte, bool) {
	drops := &s.masque.drops
	id, n, err := quicvarint.Parse(b)
	if err != nil {
		drops.malformed.Add(1)
		return nil, false
	}
	if id != 0 {
		return nil, false // of an extension that we do not have
	}
	from, to, ok := endsOf(b[n:])
	if !ok {
		drops.malformed.Add(1)
		return nil, false
	}
	if !slices.Contains(s.addrs, from) {
		drops.source.Add(1)
		return nil, false
	}
	if !s.scope.containsPacket(b[n:], to) {
		drops.destination.Add(1)
		return nil, false
	}
	return b[n:], true
}

// moveOutward moves packets from the stack to the client. Each buffer begins with the header of its
// datagram, so that no packet is copied.
func (s *ipSession) moveOutward(ctx context.Context) {
	bufs, sizes := makeBuffers(outwardBatch, beforePacket+s.masque.stack.MTU())
	prefix := append(quicvarint.Append(nil, uint64(s.stream.StreamID()/4)), 0)
	begin := beforePacket - len(prefix)
	for _, b := range bufs {
		copy(b[begin:], prefix)
	}
	for {
		n, err := s.outlet.Collect(ctx, bufs, sizes, beforePacket)
		if err != nil {
			return
		}
		for i, b := range bufs[:n] {
			if !s.sendDatagram(b[begin:beforePacket+sizes[i]], b[beforePacket:beforePacket+sizes[i]]) {
				return
			}
		}
	}
}

// sendDatagram sends a datagram to the client; false: the connection has ended. packet is its last
// part. The stream's SendDatagram would copy it once more.
func (s *ipSession) sendDatagram(datagram, packet []byte) bool {
	s.clampMSS(packet)
	err := s.datagrams.Send(datagram, s.conn.SendDatagram, s.masque.datagrams.Load().ackRequest(packet))
	var large *quicgo.DatagramTooLargeError
	switch {
	case err == nil:
		s.sent.Add(uint64(len(packet)))
	case errors.As(err, &large):
		s.masque.drops.large.Add(1)
		if icmp := tooBig(packet, s.largestPacket(large)); icmp != nil {
			s.masque.stack.Deliver(icmp)
		}
	default:
		return false
	}
	return true
}

// largestPacket returns the size of the largest packet that fits a datagram behind stream and
// context, in bytes.
func (s *ipSession) largestPacket(large *quicgo.DatagramTooLargeError) int {
	return int(large.MaxDatagramPayloadSize) - quicvarint.Len(uint64(s.stream.StreamID()/4)) - contextID
}

// oversized fits no datagram: quic-go's packets have 1452 bytes at most. quic-go reports the size
// that fits only in the error about one that does not.
var oversized [2048]byte

// clampMSS lowers the MSS in SYNs of both ends to what fits at present. The path may turn out to
// carry more, never less.
func (s *ipSession) clampMSS(p []byte) {
	if !isSYN(p) {
		return
	}
	var large *quicgo.DatagramTooLargeError
	if errors.As(s.stream.SendDatagram(oversized[:]), &large) {
		clampMSS(p, s.largestPacket(large))
	}
}

// ipPath is the path of a CONNECT-IP request by the default template of RFC 9484 §3. Target and
// protocol follow.
const ipPath = "/.well-known/masque/ip/"

// ipScope is what a CONNECT-IP session reaches (RFC 9484 §4.6).
type ipScope struct {
	// prefixes are of destinations; nil: all.
	prefixes []netip.Prefix
	// protocol is that of the packets. ICMP is always allowed. 0: all.
	protocol uint8
}

// scopeOf parses the scope in a request's path, and looks up a name.
func scopeOf(r *http.Request, lookup func(ctx context.Context, name string) ([]netip.Addr, error)) (
	s ipScope, err error,
) {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), ipPath)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[2] != "" {
		return s, fmt.Errorf("packets are taken at %sTARGET/PROTOCOL/, such as %[1]s*/*/", ipPath)
	}
	for i := range parts {
		if parts[i], err = url.PathUnescape(parts[i]); err != nil {
			return s, err
		}
	}
	if protocol := parts[1]; protocol != "*" {
		n, err := strconv.ParseUint(protocol, 10, 8)
		if err != nil || n == 0 {
			return s, fmt.Errorf("%q is no protocol: write *, or a number from 1 to 255", protocol)
		}
		s.protocol = uint8(n)
	}
	target := parts[0]
	if target == "*" {
		return s, nil
	}
	if p, err := netip.ParsePrefix(target); err == nil && p == p.Masked() {
		s.prefixes = []netip.Prefix{p}
		return s, nil
	}
	if a, err := netip.ParseAddr(target); err == nil && a.Zone() == "" {
		s.prefixes = []netip.Prefix{prefixOf(a.Unmap())}
		return s, nil
	}
	if target == "" || strings.ContainsAny(target, "/: ") {
		return s, fmt.Errorf("%q is no target: write *, an address, a prefix or a name", target)
	}
	addrs, err := lookup(r.Context(), target)
	s.prefixes = make([]netip.Prefix, len(addrs))
	for i, a := range addrs {
		s.prefixes[i] = prefixOf(a)
	}
	return s, err
}

// containsPacket reports whether the session may send packet p to an address. endsOf has accepted
// the packet.
func (s ipScope) containsPacket(p []byte, to netip.Addr) bool {
	if s.prefixes != nil && !slices.ContainsFunc(s.prefixes, func(f netip.Prefix) bool { return f.Contains(to) }) {
		return false
	}
	if s.protocol == 0 {
		return true
	}
	protocol := protocolOf(p)
	return protocol == s.protocol || protocol == protocolICMP || protocol == protocolICMPv6
}

// advertisedRoutes returns the routes for a session with these addresses, in the order of RFC 9484
// §4.7.3; none: it reaches nothing.
func (s ipScope) advertisedRoutes(addrs []netip.Addr) (routes []connectip.IPRoute) {
	prefixes := slices.Clone(s.prefixes)
	if prefixes == nil {
		prefixes = []netip.Prefix{
			netip.PrefixFrom(netip.IPv4Unspecified(), 0),
			netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		}
	}
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	for _, p := range slices.Compact(prefixes) {
		if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.Is4() == p.Addr().Is4() }) {
			routes = append(routes, connectip.IPRoute{
				StartIP: p.Addr(), EndIP: access.LastOf(p), IPProtocol: s.protocol,
			})
		}
	}
	return routes
}

// pool hands out addresses: one of every prefix for each session. A name has reserved ones, which
// it gets unless another session of that name has them. The mu of MASQUE guards it.
type pool struct {
	ranges []addressRange
	used   map[netip.Addr]bool
	// reserved are by name, one of each range.
	reserved map[string][]netip.Addr
	// owner has the names for reserved addresses.
	owner map[netip.Addr]string
}

// addressRange is one prefix of the pool.
type addressRange struct{ prefix netip.Prefix }

// errPoolExhausted says that no address is free.
var errPoolExhausted = errors.New("no address is free")

// newPool checks the prefixes: each has room for clients, and none overlap.
func newPool(prefixes []netip.Prefix) (*pool, error) {
	p := &pool{used: map[netip.Addr]bool{}, reserved: map[string][]netip.Addr{}, owner: map[netip.Addr]string{}}
	for i, a := range prefixes {
		if !a.IsValid() || a.Addr().Is4In6() || a.Addr().BitLen()-a.Bits() < 2 {
			return nil, fmt.Errorf("pool: %v has no room for clients; a prefix such as 10.10.0.0/24 or "+
				"fd00:10::/64 has", a)
		}
		for _, b := range prefixes[:i] {
			if a.Overlaps(b) {
				return nil, fmt.Errorf("pool: %v and %v overlap", b, a)
			}
		}
		p.ranges = append(p.ranges, addressRange{a.Masked()})
	}
	return p, nil
}

// leastAddress returns the first address for clients. The prefix's own is not used, and the next is
// the gateway's by convention.
func (r addressRange) leastAddress() netip.Addr { return access.GatewayIn(r.prefix).Next() }

// containsClient reports whether a client may have an address. The last of an IPv4 prefix is for
// broadcast.
func (r addressRange) containsClient(a netip.Addr) bool {
	return r.prefix.Contains(a) && a.Compare(r.leastAddress()) >= 0 && !(a.Is4() && !r.prefix.Contains(a.Next()))
}

// preferredFor returns the address to try first for a name. It is the same each time, also in
// another process.
func (r addressRange) preferredFor(name string) netip.Addr {
	a, hash := r.prefix.Addr().AsSlice(), sha256.Sum256([]byte(name))
	for bit := r.prefix.Bits(); bit < 8*len(a); bit++ {
		a[bit/8] |= hash[bit/8] & (0x80 >> (bit % 8))
	}
	if addr, _ := netip.AddrFromSlice(a); r.containsClient(addr) {
		return addr
	}
	return r.leastAddress()
}

// findFree returns the first address from preferredFor on that is not taken; false: all are taken.
// most bounds how many are.
func (r addressRange) findFree(name string, most int, taken func(netip.Addr) bool) (netip.Addr, bool) {
	first := r.preferredFor(name)
	a := first
	for tries := 0; taken(a); tries++ {
		if a = a.Next(); !r.containsClient(a) {
			a = r.leastAddress()
		}
		if a == first || tries > most {
			return netip.Addr{}, false
		}
	}
	return a, true
}

// reserveFor reserves addresses for these names, and frees those of others. A name keeps the
// addresses that it has. A name for which none is left gets one that is free when it asks.
func (p *pool) reserveFor(names []string) {
	before := p.reserved
	p.reserved, p.owner = map[string][]netip.Addr{}, map[netip.Addr]string{}
	keep := func(name string, addrs []netip.Addr) {
		p.reserved[name] = addrs
		for _, a := range addrs {
			p.owner[a] = name
		}
	}
	for _, name := range names {
		if addrs, had := before[name]; had {
			keep(name, addrs)
		}
	}
	for _, name := range names {
		if _, has := p.reserved[name]; has {
			continue
		}
		addrs := make([]netip.Addr, 0, len(p.ranges))
		for _, r := range p.ranges {
			if a, ok := r.findFree(name, len(p.owner), func(a netip.Addr) bool { return p.owner[a] != "" }); ok {
				addrs = append(addrs, a)
			}
		}
		if len(addrs) == len(p.ranges) {
			keep(name, addrs)
		}
	}
}

// takeAddresses hands out one address of each prefix for a session of that name.
func (p *pool) takeAddresses(name string) ([]netip.Addr, error) {
	taken := make([]netip.Addr, 0, len(p.ranges))
	for i, r := range p.ranges {
		a, ok := netip.Addr{}, false
		if own := p.reserved[name]; own != nil && !p.used[own[i]] {
			a, ok = own[i], true
		}
		most := len(p.used) + len(p.owner)
		if !ok {
			a, ok = r.findFree(name, most, func(a netip.Addr) bool { return p.used[a] || p.owner[a] != "" })
		}
		if !ok {
			a, ok = r.findFree(name, most, func(a netip.Addr) bool { return p.used[a] })
		}
		if !ok {
			p.returnAddresses(taken)
			return nil, fmt.Errorf("%w in %v", errPoolExhausted, r.prefix)
		}
		p.used[a] = true
		taken = append(taken, a)
	}
	if len(taken) == 0 {
		return nil, errPoolExhausted
	}
	return taken, nil
}

// returnAddresses takes addresses back.
func (p *pool) returnAddresses(addrs []netip.Addr) {
	for _, a := range addrs {
		delete(p.used, a)
	}
}
