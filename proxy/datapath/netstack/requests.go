package netstack

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// requests are the SYNs that wait for an answer, or for the end of their handshake.
type requests struct {
	forwarder *tcp.Forwarder
	places    *datapath.Places
	dropped   atomic.Uint64 // SYNs for which there was no place

	peer  atomic.Pointer[func(netip.Addr) string]
	mu    sync.Mutex
	asked map[stack.TransportEndpointID]asked
}

// asked is what is kept of a SYN beside the stack's own request.
type asked struct {
	peer string
	hops uint8
	dscp uint8
}

// SetPeer sets the function that returns the name of the peer that has an address inside the
// tunnel. Before, each address is a peer of its own.
func (s *Stack) SetPeer(of func(inner netip.Addr) string) { s.requests.peer.Store(&of) }

func (r *requests) peerOf(inner netip.Addr) string {
	if of := r.peer.Load(); of != nil {
		return (*of)(inner)
	}
	return inner.String()
}

// request is a SYN that waits for its answer.
type request struct {
	*tcp.ForwarderRequest
	of   *requests
	hops uint8 // see Conn.Hops
	dscp uint8 // see Conn.ReceivedDSCP
}

// takeSegment takes a segment of no connection from the stack; false: the stack is to answer it.
func (r *requests) takeSegment(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	flags := header.TCP(pkt.TransportHeader().Slice()).Flags()
	if !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck) {
		return false
	}
	peer := r.peerOf(addrPortOf(id.RemoteAddress, 0).Addr())
	r.mu.Lock()
	_, again := r.asked[id]
	full := !again && !r.places.Take(peer)
	if !again && !full {
		r.asked[id] = asked{peer, hopsOf(pkt), dscpOf(pkt)}
	}
	r.mu.Unlock()
	switch {
	case again:
		return true
	case full:
		r.dropped.Add(1)
		return true
	}
	taken := r.forwarder.HandlePacket(id, pkt)
	if !taken {
		r.removeRequest(id)
	}
	return taken
}

func (r *requests) removeRequest(id stack.TransportEndpointID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a, there := r.asked[id]; there {
		delete(r.asked, id)
		r.places.Leave(a.peer)
	}
}

// Complete ends the request, with a RST or without an answer. It is called once.
func (r *request) Complete(reset bool) {
	id := r.ID()
	r.ForwarderRequest.Complete(reset)
	r.of.removeRequest(id)
}

// queueRequest makes a SYN wait for Accept.
func (s *Stack) queueRequest(asked *tcp.ForwarderRequest) {
	r := &request{ForwarderRequest: asked, of: &s.requests}
	s.requests.mu.Lock()
	syn := s.requests.asked[asked.ID()]
	r.hops, r.dscp = syn.hops, syn.dscp
	s.requests.mu.Unlock()
	select {
	case <-s.draining:
		r.Complete(false)
		return
	default:
	}
	c := newConn(s, r.ID())
	c.request, c.hops, c.dscp = r, r.hops, r.dscp
	select {
	case s.syns <- c:
	default: // Config.Handshakes wait already
		r.Complete(false)
	}
}
