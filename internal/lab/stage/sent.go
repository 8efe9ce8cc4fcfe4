package stage

import (
	"context"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
)

// sentFor is what was sent for an actor, and how much of it once more.
type sentFor struct{ sent, resent cc.Bytes }

func (s sentFor) plus(t sentFor) sentFor { return sentFor{s.sent + t.sent, s.resent + t.resent} }

// countEarly notes what has been sent by the end of the warm-up: it does not count.
func (w *watch) countEarly() error {
	if err := w.wait(w.ctx, w.stage.Warmup); err != nil {
		return err
	}
	early, err := w.counts(w.ctx)
	for a, c := range early {
		a.early = c
	}
	return err
}

// counts are of all that was sent into the last hop until now.
func (r *run) counts(ctx context.Context) (map[*actor]sentFor, error) {
	r.counting.Lock()
	defer r.counting.Unlock()
	all, err := r.present(ctx, r.actors...)
	if err != nil {
		return nil, err
	}
	for _, a := range r.actors {
		all[a] = all[a].plus(a.ended)
	}
	return all, nil
}

// present are the counts of the connections that there are.
func (r *run) present(ctx context.Context, actors ...*actor) (map[*actor]sentFor, error) {
	all := map[*actor]sentFor{}
	if r.tunnel != nil && r.proxy != nil { // no socket sends: the transport is the proxy's own
		flows, err := r.proxy.Flows(ctx)
		for _, a := range actors {
			if f := flowOf(flows, a.at.Load()); f != nil && r.stage.windowed(a.Actor) {
				all[a] = sentFor{resent: f.ClientLeg.Retransmitted} // what was sent the last hop knows
			}
		}
		return all, err
	}
	nodes := map[*netlab.Node]map[netip.AddrPort]socket{}
	for _, a := range actors {
		if at := a.at.Load(); at != nil {
			node := a.sends()
			if nodes[node] == nil {
				var err error
				if nodes[node], err = sockets(node, node == r.lab.Client); err != nil {
					return nil, err
				}
			}
			all[a] = nodes[node][*at].sentFor
		}
		if s := a.sender.Load(); s != nil && a.at.Load() == nil {
			all[a] = sentFor{cc.Bytes(s.bytes.Load()), cc.Bytes(s.again.Load())}
		}
	}
	return all, nil
}

// sends returns the node that sends into the last hop.
func (a *actor) sends() *netlab.Node {
	switch {
	case a.Kind == Upload:
		return a.run.lab.Client
	case a.proxied:
		return a.run.lab.Edge
	}
	return a.run.lab.Server
}

// close closes the connection. What was sent on it is counted before: nothing shows that afterwards.
func (l *line) close() error {
	l.forget()
	r := l.run
	r.counting.Lock()
	defer r.counting.Unlock()
	if r.now() < r.stage.Duration {
		present, err := r.present(context.Background(), l.actor) // the actor's own may have ended
		if err != nil {
			r.fail(err)
		}
		l.ended = l.ended.plus(present[l.actor])
	}
	l.at.Store(nil)
	return l.Conn.Close()
}

// resent is the share of retransmissions in the bytes that were sent after the warm-up.
func (r *run) resent() float64 {
	var sent, resent cc.Bytes
	for _, a := range r.actors {
		sent += a.late.sent - a.early.sent
		resent += a.late.resent - a.early.resent
	}
	if r.tunnel != nil && r.proxy != nil {
		sent = r.record.Path.Down.Bytes
	}
	return float64(resent) / float64(max(1, sent))
}
