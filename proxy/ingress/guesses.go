package ingress

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// users are the accounts of a listener, hashed so that the time to compare them depends neither
// on their lengths nor on where they differ.
type users []credential

type credential struct{ name, password [sha256.Size]byte }

func newUsers(list []User) users {
	us := make(users, 0, len(list))
	for _, u := range list {
		us = append(us, credential{sha256.Sum256([]byte(u.Name)), sha256.Sum256([]byte(u.Password))})
	}
	return us
}

// allowUser reports whether there is such an account. It looks at all of them, so that its time
// is the same.
func (us users) allowUser(name, password []byte) bool {
	n, p := sha256.Sum256(name), sha256.Sum256(password)
	found := 0
	for i := range us {
		found |= subtle.ConstantTimeCompare(us[i].name[:], n[:]) &
			subtle.ConstantTimeCompare(us[i].password[:], p[:])
	}
	return found == 1
}

const (
	freeGuesses     = 5           // of one host in guessPeriod, before its answers wait
	guessPeriod     = time.Minute // for how long a wrong secret counts
	maxHeldGuesses  = 128         // answers that wait of one host
	maxGuessedHosts = 4096        // hosts with wrong secrets that are remembered
)

// ErrUnauthorized is wrapped by errors of Greet about passwords.
var ErrUnauthorized = errors.New("not authorized")

var (
	errWrongPassword = fmt.Errorf("%w: unknown name or wrong password", ErrUnauthorized)
	errGuessing      = fmt.Errorf("%w: the answers to %d wrong passwords of this host wait, so this one is not looked at",
		ErrUnauthorized, maxHeldGuesses)
)

// Guesses slow down hosts that guess passwords or tokens. After freeGuesses wrong ones within
// guessPeriod the answer to each further one waits: a second, and twice as long with each. Right
// ones are answered at once, since clients behind one address may be many. But while
// maxHeldGuesses answers wait, no other secret of that host is looked at: a client that does not
// wait for answers would guess on. The zero value is ready.
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

// Wrong counts a wrong secret of the client at addr. It returns when the client may have its
// answer: after longest at the latest, or once ctx is done. The answer counts as held for as long
// even then, so that a client that hangs up guesses no faster.
func (g *Guesses) Wrong(ctx context.Context, addr netip.Addr, longest time.Duration) {
	if pause := g.count(datapath.Host(addr), longest); pause > 0 {
		waitFor(ctx, pause)
	}
}

// waitFor waits for that long, or until ctx has ended.
func waitFor(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// count notes a wrong secret of host for guessPeriod, and returns for how long its answer is
// held: longest at most.
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

// forget takes one wrong secret off those of host. h may have been evicted.
func (g *Guesses) forget(host netip.Addr, h *guesser) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if h.wrong--; h.wrong == 0 && g.by[host] == h {
		delete(g.by, host)
	}
}

// evictHost forgets a host with few wrong secrets: the one with the fewest of a sample, since a
// map is read in random order. Hosts that guess on have more, and stay. The caller holds g.mu.
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
