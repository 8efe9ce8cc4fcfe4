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
	freeGuesses     = 5           // wrong secrets of one host within guessPeriod that are answered at once
	guessPeriod     = time.Minute // how long a wrong secret counts
	maxHeldGuesses  = 128         // delayed answers of one host at a time
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
// guessPeriod the answer to the next is delayed by a second, and by twice as long with each
// further one. Right secrets are answered at once, since many clients may share one address. But
// while maxHeldGuesses answers are delayed, no secret of that host is checked: otherwise a client
// that does not wait for answers could guess on. The zero value is ready to use.
type Guesses struct {
	mu    sync.Mutex
	hosts map[netip.Addr]*guesser
}

// guesser is a host that has given wrong secrets.
type guesser struct {
	wrong int // within guessPeriod
	held  int // delayed answers that were not sent yet
}

// MayTry reports whether to check a secret of the client at addr.
func (g *Guesses) MayTry(addr netip.Addr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.hosts[datapath.Host(addr)]
	return h == nil || h.held < maxHeldGuesses
}

// DelayWrong counts a wrong secret of the client at addr. It returns when the client may get its
// answer: after longest at the latest, or once ctx is done. Even then the answer counts as held
// for the whole delay, so that a client that hangs up guesses no faster.
func (g *Guesses) DelayWrong(ctx context.Context, addr netip.Addr, longest time.Duration) {
	if pause := g.addWrong(datapath.Host(addr), longest); pause > 0 {
		waitFor(ctx, pause)
	}
}

// waitFor waits for pause, or until ctx has ended.
func waitFor(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// addWrong counts a wrong secret of host for guessPeriod, and returns how long to delay its
// answer: longest at most.
func (g *Guesses) addWrong(host netip.Addr, longest time.Duration) (pause time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.hosts == nil {
		g.hosts = map[netip.Addr]*guesser{}
	}
	h := g.hosts[host]
	if h == nil {
		if len(g.hosts) >= maxGuessedHosts {
			g.evictHost()
		}
		h = &guesser{}
		g.hosts[host] = h
	}
	h.wrong++
	time.AfterFunc(guessPeriod, func() { g.expireWrong(host, h) })
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

// expireWrong ends the count of one wrong secret of host. h may have been evicted.
func (g *Guesses) expireWrong(host netip.Addr, h *guesser) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if h.wrong--; h.wrong == 0 && g.hosts[host] == h {
		delete(g.hosts, host)
	}
}

// evictHost forgets the host with the fewest wrong secrets of a random sample, which the order of
// a map is. Hosts that guess on have more, and stay. The caller holds g.mu.
func (g *Guesses) evictHost() {
	const sample = 64
	var least netip.Addr
	fewest, seen := 0, 0
	for host, h := range g.hosts {
		if seen == 0 || h.wrong < fewest {
			least, fewest = host, h.wrong
		}
		if seen++; seen == sample {
			break
		}
	}
	delete(g.hosts, least)
}
