package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/datapath"
)

const (
	freeGuesses     = 5           // of one host in guessPeriod, before its answers wait
	guessPeriod     = time.Minute // for how long a wrong secret counts
	maxHeldGuesses  = 128         // answers that wait of one host
	maxGuessedHosts = 4096        // of which wrong secrets are remembered
)

// ErrUnauthorized is wrapped by errors of Greet about passwords.
var ErrUnauthorized = errors.New("not authorized")

var (
	errWrongPassword = fmt.Errorf("%w: unknown name or wrong password", ErrUnauthorized)
	errGuessing      = fmt.Errorf("%w: the answers to %d wrong passwords of this host wait, so this one is not looked at",
		ErrUnauthorized, maxHeldGuesses)
)

// Guesses slow down hosts that guess passwords or tokens. After freeGuesses wrong ones within guessPeriod the
// answer to each further one waits: a second, and twice as long with each. Right ones are answered at once,
// since clients behind one address may be many; but while maxHeldGuesses answers wait, no other secret of
// that host is looked at, or whoever does not wait for answers would guess on. The zero value is ready.
type Guesses struct {
	mu sync.Mutex
	by map[netip.Addr]*guesser
}

// guesser is a host that has given wrong secrets.
type guesser struct {
	wrong int // within guessPeriod
	held  int // answers that wait
}

// May reports whether a secret of the client at addr is to be looked at.
func (g *Guesses) May(addr netip.Addr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.by[datapath.Host(addr)]
	return h == nil || h.held < maxHeldGuesses
}

// Wrong counts a wrong secret of the client at addr, and returns when it may be told: after longest at
// the latest, or once ctx is done. Whoever does not wait has the answer held for as long all the same, so
// that a client that hangs up guesses no faster.
func (g *Guesses) Wrong(ctx context.Context, addr netip.Addr, longest time.Duration) {
	pause := g.count(datapath.Host(addr), longest)
	if pause == 0 {
		return
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// count notes a wrong secret of host for guessPeriod, and returns for how long its answer is held: longest at most.
func (g *Guesses) count(host netip.Addr, longest time.Duration) (pause time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.by == nil {
		g.by = map[netip.Addr]*guesser{}
	}
	h := g.by[host]
	if h == nil {
		if len(g.by) >= maxGuessedHosts {
			g.evictHost()
		}
		h = &guesser{}
		g.by[host] = h
	}
	h.wrong++
	time.AfterFunc(guessPeriod, func() { g.forget(host, h) })
	if h.wrong <= freeGuesses {
		return 0
	}
	pause = min(longest, time.Second<<min(h.wrong-freeGuesses-1, 16))
	h.held++
	time.AfterFunc(pause, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		h.held--
	})
	return pause
}

// forget takes one wrong secret off those of host, of which h may have been evicted.
func (g *Guesses) forget(host netip.Addr, h *guesser) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if h.wrong--; h.wrong == 0 && g.by[host] == h {
		delete(g.by, host)
	}
}

// evictHost forgets a host with few wrong secrets: the one with the fewest of a sample, since a map is read in
// random order. Hosts that guess on have more, and stay. The caller holds g.mu.
func (g *Guesses) evictHost() {
	const sample = 64
	var least netip.Addr
	fewest, seen := 0, 0
	for host, h := range g.by {
		if seen == 0 || h.wrong < fewest {
			least, fewest = host, h.wrong
		}
		if seen++; seen == sample {
			break
		}
	}
	delete(g.by, least)
}
