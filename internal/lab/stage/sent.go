package stage

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
)

// sentTo is what was sent on a connection, and how much of it once more.
type sentTo struct {
	client       netip.AddrPort // its end; of a native sender none
	sent, resent cc.Bytes
}

// countEarly notes what has been sent by the end of the warm-up: it does not count.
func (w *watch) countEarly() {
	if w.wait(w.ctx, w.stage.Warmup) != nil {
		return
	}
	early, err := w.counts()
	if err != nil {
		if w.ctx.Err() == nil {
			w.fail(err)
		}
		return
	}
	for a, c := range early {
		a.early = c
	}
}

// counts are of all that sends into the last hop now.
func (w *watch) counts() (map[*actor]sentTo, error) {
	all := map[*actor]sentTo{}
	if w.tunnel != nil && w.proxy != nil { // no socket sends: the transport is the proxy's own
		flows, err := w.proxy.Flows(w.ctx)
		for _, a := range w.looked {
			if at := a.at.Load(); err == nil {
				if f := flowOf(flows, at); f != nil {
					all[a] = sentTo{client: *at, resent: f.ClientLeg.Retransmitted} // what was sent the last hop knows
				}
			}
		}
		return all, err
	}
	for _, node := range []*netlab.Node{w.lab.Edge, w.lab.Server, w.lab.Client} {
		sockets, err := sockets(node, node == w.lab.Client)
		if err != nil {
			return nil, err
		}
		for _, a := range w.actors {
			if at := a.at.Load(); at != nil && node == a.sends() {
				all[a] = sentTo{*at, sockets[*at].sent, sockets[*at].resent}
			}
		}
	}
	for _, a := range w.actors {
		if s := a.sender.Load(); s != nil {
			sent, resent := s.Sent()
			all[a] = sentTo{sent: sent, resent: resent}
		}
	}
	return all, nil
}

// sends is the node whose socket sends into the last hop.
func (a *actor) sends() *netlab.Node {
	switch {
	case a.Kind == Upload:
		return a.run.lab.Client
	case a.proxied:
		return a.run.lab.Edge
	}
	return a.run.lab.Server
}

// resent is the share of retransmissions in the bytes that were sent after the warm-up.
func (r *run) resent() float64 {
	var sent, resent cc.Bytes
	for _, a := range r.actors {
		sent, resent = sent+a.late.sent, resent+a.late.resent
		if a.early.client == a.late.client {
			sent, resent = sent-a.early.sent, resent-a.early.resent
		}
	}
	if r.tunnel != nil && r.proxy != nil {
		sent = r.record.Path.Down.Bytes
	}
	return float64(resent) / float64(max(1, sent))
}
