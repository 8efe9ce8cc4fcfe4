package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/traffic"
)

// actor is one application at play: the client's end, and what its server needs
// to know of it.
type actor struct {
	Actor
	run     *run
	number  int
	turns   []sim.Turn
	host    netip.Addr
	server  netip.AddrPort
	proxied bool
	streams int                            // connections so far
	at      atomic.Pointer[netip.AddrPort] // the client's end of the present one
	record  ActorRecord

	sender atomic.Pointer[nativeEnd] // nil: it is not native, or not there yet
	// By what sends into the last hop: on connections that have ended, and on all by the end of the
	// warm-up and of the run.
	ended, early, late sentFor
}

func (r *run) newActor(number int) *actor {
	a := &actor{Actor: r.stage.Actors[number], run: r, number: number, turns: r.stage.Turns(number)}
	a.host = r.lab.Hosts[a.Host].V4
	if r.stage.Tunnel != "" {
		a.host = edge.TunnelHost
	}
	a.proxied = r.stage.proxied(a.Actor) && !r.stage.Native
	a.server = netip.AddrPortFrom(r.direct, a.port())
	if a.proxied {
		a.server = netip.AddrPortFrom(r.lab.ServerAddr.V4, a.port())
	}
	a.record = ActorRecord{Name: a.Name, Bytes: make([]cc.Bytes, r.stage.steps())}
	return a
}

// proxied reports whether a proxy decides about the actor: it relays its connection, or holds its packets.
func (s Stage) proxied(a Actor) bool {
	return s.Edge != "" && !a.Direct && (s.Hold || !a.isDatagrams())
}

// windowed reports whether the actor's windows are looked at: the proxy's, or those of the
// servers' sockets where there is no proxy.
func (s Stage) windowed(a Actor) bool {
	return a.Kind != Upload && !a.isDatagrams() && (s.Edge == "" || s.proxied(a))
}

// steps is how many of them the run has, a last shorter one included.
func (s Stage) steps() int { return int((s.Duration + Step - 1) / Step) }

// play does what the actor does until ctx ends, and notes what ends it before.
func (a *actor) play(ctx context.Context) {
	err := a.run.wait(ctx, a.Start)
	if err == nil && a.Kind == UDP {
		err = a.blast(ctx)
	} else if err == nil {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		if a.Stop > 0 {
			a.run.others.Go(func() {
				_ = a.run.wait(ctx, a.Stop) // fails when ctx ends: nothing is left to stop
				cancel()
			})
		}
		switch {
		case a.run.stage.Native && (a.Kind == Bulk || a.Kind == Upload):
			err = a.nativeBulk(ctx)
		case a.Kind == Bulk || a.Kind == Upload:
			err = a.streamBulk(ctx)
		case a.Kind == Requests || a.Kind == Web || a.Kind == Video:
			err = a.ask(ctx)
		case a.Kind == QUIC:
			err = a.quic(ctx)
		}
		if ctx.Err() != nil {
			err = nil
		}
	}
	if err != nil && ctx.Err() == nil {
		a.record.Error = err.Error()
	}
}

// streamBulk downloads or uploads on one connection.
func (a *actor) streamBulk(ctx context.Context) error {
	l, err := a.open(ctx)
	if err != nil {
		return err
	}
	if a.Kind == Upload {
		err = l.put(ctx)
	} else {
		err = l.get(a.Size)
	}
	return errors.Join(err, l.close())
}

// ask asks for one thing after the other in the actor's turns, each on a connection of its own where the kind is Web.
func (a *actor) ask(ctx context.Context) error {
	client := sim.NewClient(a.Size, a.Every, a.video())
	var l *line
	defer func() {
		if l != nil {
			_ = l.close() // what ended it is known
		}
		if a.record.Video = client.Playback(min(a.run.now(), a.run.stage.Duration)); a.Kind != Video {
			a.record.Requests = client.Objects
		}
	}()
	for next := a.Start; ; {
		due, more := nextTurn(a.turns, max(next, a.run.now()))
		switch {
		case !more && a.Kind == Video: // to watch what is there
			return a.run.wait(ctx, a.run.stage.Duration)
		case !more:
			return nil
		}
		if err := a.run.wait(ctx, due); err != nil {
			return err
		}
		began := time.Now()
		client.Ask(a.run.now())
		if l == nil {
			var err error
			if l, err = a.open(ctx); err != nil {
				return err
			}
		}
		if err := l.get(client.Size); err != nil {
			return err
		}
		next = client.Take(due, a.run.now(), time.Since(began))
		if a.Kind == Web {
			err := l.close()
			if l = nil; err != nil {
				return err
			}
		}
	}
}

// video is what the actor's player asks for; that of other kinds asks for nothing.
func (a Actor) video() sim.Video {
	if a.Kind != Video {
		return sim.Video{}
	}
	return sim.Video{Rate: a.Rate, Chunk: a.Every, Buffer: cmp.Or(a.Buffer, defaultBuffer)}
}

// read counts payload that the application has read just now.
func (a *actor) read(n int) {
	if step := int(a.run.now() / Step); step < len(a.record.Bytes) {
		a.record.Bytes[step] += cc.Bytes(n)
	}
}

// line is a connection to the actor's server.
type line struct {
	*actor
	net.Conn
	stream int
	buf    []byte
	forget func() bool
}

// open connects; the end of ctx ends all reads and writes.
func (a *actor) open(ctx context.Context) (*line, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: a.host.AsSlice()}}
	d.SetMultipathTCP(false)
	if a.Kind == Upload {
		d.Control = traffic.Control(cmp.Or(a.Control, kernelDefault))
	}
	conn, err := a.run.lab.Client.DialWith(ctx, &d, "tcp4", a.server.String())
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if local, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		at := local.AddrPort()
		a.at.Store(&at)
	}
	l := &line{actor: a, Conn: conn, stream: a.streams, buf: make([]byte, piece)}
	l.forget = context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // fails once it is closed
	a.streams++
	return l, nil
}

// get downloads size bytes; 0: without end.
func (l *line) get(size cc.Bytes) error {
	q := question{actor: l.number, stream: l.stream, size: size}
	if _, err := l.Write(q.text()); err != nil {
		return fmt.Errorf("ask the server: %w", err)
	}
	return l.take(l, q, l.buf)
}

// put uploads without end.
func (l *line) put(ctx context.Context) error {
	q := question{actor: l.number, stream: l.stream, upload: true}
	_, err := l.Write(q.text())
	if err == nil {
		err = l.pour(ctx, l, q, l.buf)
	}
	return fmt.Errorf("upload: %w", err)
}
