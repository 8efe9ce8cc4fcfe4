package netstack

import (
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// requests are the SYNs that wait for an answer, or for the end of their handshake.
type requests struct {
	forwarder *tcp.Forwarder
	most      int
	dropped   atomic.Uint64 // SYNs beyond that

	mu   sync.Mutex
	hops map[stack.TransportEndpointID]uint8 // which the stack's own requests do not tell
}

// request is one of them.
type request struct {
	*tcp.ForwarderRequest
	of   *requests
	hops uint8 // how many routers the SYN may still pass
}

// take takes in a segment that is of no connection; false: it is no SYN.
func (r *requests) take(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	flags := header.TCP(pkt.TransportHeader().Slice()).Flags()
	if !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck) {
		return false
	}
	r.mu.Lock()
	_, again := r.hops[id]
	full := len(r.hops) >= r.most
	if !again && !full {
		r.hops[id] = hopsOf(pkt)
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
		r.remove(id)
	}
	return taken
}

func (r *requests) remove(id stack.TransportEndpointID) {
	r.mu.Lock()
	delete(r.hops, id)
	r.mu.Unlock()
}

// Complete ends the request, with a reset or without an answer of its own. Once only.
func (r *request) Complete(reset bool) {
	id := r.ID()
	r.ForwarderRequest.Complete(reset)
	r.of.remove(id)
}

// ask has a SYN wait for Accept.
func (s *Stack) ask(asked *tcp.ForwarderRequest) {
	r := &request{ForwarderRequest: asked, of: &s.requests}
	s.requests.mu.Lock()
	r.hops = s.requests.hops[asked.ID()]
	s.requests.mu.Unlock()
	select {
	case <-s.draining:
		r.Complete(false)
		return
	default:
	}
	c := newConn(s, r.ID())
	c.request, c.hops = r, r.hops
	select {
	case s.syns <- c:
	default: // as many wait as may
		r.Complete(false)
	}
}
