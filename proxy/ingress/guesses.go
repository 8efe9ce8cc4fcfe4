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
// the latest, or once ctx is done.
func (g *Guesses) Wrong(ctx context.Context, addr netip.Addr, longest time.Duration) {
	h := g.count(datapath.Host(addr))
	if h == nil {
		return
	}
	g.mu.Lock()
	pause := min(longest, time.Second<<min(h.wrong-freeGuesses-1, 16))
	h.held++
	g.mu.Unlock()
	timer := time.NewTimer(pause)
	select {
	case <-timer.C:
	case <-ctx.Done():
		timer.Stop()
	}
	g.mu.Lock()
	h.held--
	g.mu.Unlock()
}

// count notes a wrong secret of host, for guessPeriod. It returns nil where the answer need not wait.
func (g *Guesses) count(host netip.Addr) *guesser {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.by == nil {
		g.by = map[netip.Addr]*guesser{}
	}
	h := g.by[host]
	if h == nil {
		if len(g.by) >= maxGuessedHosts {
			return nil // so many hosts are not slowed down by so little each
		}
		h = &guesser{}
		g.by[host] = h
	}
	h.wrong++
	time.AfterFunc(guessPeriod, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if h.wrong--; h.wrong == 0 {
			delete(g.by, host)
		}
	})
	if h.wrong <= freeGuesses {
		return nil
	}
	return h
}
