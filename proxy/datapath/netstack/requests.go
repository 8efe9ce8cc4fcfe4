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

// requests are the SYNs that wait for an answer, or for the end of their handshake. places bounds
// them for each peer.
type requests struct {
	forwarder *tcp.Forwarder
	places    *datapath.Places
	dropped   atomic.Uint64 // SYNs for which there was no place

	peer    atomic.Pointer[func(netip.Addr) string] // see Stack.SetPeer
	mu      sync.Mutex
	waiting map[stack.TransportEndpointID]synInfo
}

// synInfo is what is kept of a SYN beside gVisor's own request, which does not give access to the
// packet.
type synInfo struct {
	peer string
	hops uint8 // see Conn.Hops
	dscp uint8 // see Conn.ReceivedDSCP
}

// handleNewSegment is called by gVisor with a segment of no connection. It makes a SYN a request;
// false: the stack is to answer the segment. A SYN that comes again while it waits is dropped.
func (r *requests) handleNewSegment(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	flags := header.TCP(pkt.TransportHeader().Slice()).Flags()
	if !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck) {
		return false
	}
	peer := (*r.peer.Load())(addrPortOf(id.RemoteAddress, 0).Addr())
	r.mu.Lock()
	_, again := r.waiting[id]
	full := !again && !r.places.Take(peer)
	if !again && !full {
		r.waiting[id] = synInfo{peer, hopsOf(pkt), dscpOf(pkt)}
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

// removeRequest removes a SYN and frees its place.
func (r *requests) removeRequest(id stack.TransportEndpointID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a, there := r.waiting[id]; there {
		delete(r.waiting, id)
		r.places.Leave(a.peer)
	}
}

// request is a SYN that waits for its answer.
type request struct {
	*tcp.ForwarderRequest
	requests *requests
	synInfo
}

// Complete ends the request, with a RST or without an answer. It is called once.
func (r *request) Complete(reset bool) {
	id := r.ID()
	r.ForwarderRequest.Complete(reset)
	r.requests.removeRequest(id)
}
