// Package happyeyeballs connects to a host by name (RFC 8305). It looks up the IPv4 and the IPv6
// addresses apart, so that a name server that never answers for one family does not hold up the
// other, and it does not wait for an address that does not answer before it tries the next one.
package happyeyeballs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"
)

const (
	resolutionDelay = 50 * time.Millisecond  // for the IPv6 addresses after the IPv4 ones have come (RFC 8305 §3)
	lookUpDelay     = 200 * time.Millisecond // for the addresses of the other family, where all are wanted
	attemptDelay    = 250 * time.Millisecond // from one attempt to the next (RFC 8305 §5)

	// MaxAttempts is how many attempts are under way at a time at most.
	MaxAttempts = 8
	// minPatience is the time that an attempt has before it is given up in favour of another
	// address. Linux sends a SYN again after one second.
	minPatience = MaxAttempts * attemptDelay
)

var errGivenUp = fmt.Errorf("no answer so far, and another address waits: %w", os.ErrDeadlineExceeded)

// Resolver looks up names. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Host is what a Dial connects to.
type Host struct {
	Name     string
	Source   netip.Addr    // only addresses of its family are tried; invalid: those of both families are
	Resolver Resolver      // nil: net.DefaultResolver
	Timeout  time.Duration // of a Dial; 0: its context alone ends it

	// Spare has places for the attempts that go on beside others, of all dials that share it.
	// Where Client gets none, or Spare is nil, one attempt follows another.
	Spare  Places
	Client string
}

// Places are shared by clients. *datapath.Places are such.
type Places interface {
	Take(client string) bool // false: there is none for this client
	Leave(client string)
}

// withTimeout returns a context for a Dial.
func (h Host) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if h.Timeout > 0 {
		return context.WithTimeout(ctx, h.Timeout)
	}
	return context.WithCancel(ctx)
}

// families returns the families to look up, in the order of preference.
func (h Host) families() []family {
	switch {
	case !h.Source.IsValid():
		return []family{ipv6, ipv4}
	case h.Source.Unmap().Is4():
		return []family{ipv4}
	}
	return []family{ipv6}
}

// Dial calls dial for the addresses of host until it succeeds for one of them. Calls overlap as
// far as host.Spare has room. dial must return soon after its context has ended. discard gets
// what a call returned that another one forestalled. Where no call succeeds, the error is an
// *Error.
func Dial[C any](
	ctx context.Context, host Host, dial func(context.Context, netip.Addr) (C, error), discard func(C),
) (C, error) {
	ctx, cancel := host.withTimeout(ctx)
	defer cancel()
	won := make(chan struct{})
	defer close(won)

	addresses := lookUp(ctx, host)
	failure := &Error{Host: host.Name}
	var attempts []*attempt
	results := make(chan result[C])
	turn := time.NewTicker(attemptDelay)
	defer turn.Stop()
	var lastThird <-chan time.Time // of the time; nil: it has begun, or never does
	if host.Timeout > 0 {
		lastThird = time.After(host.Timeout * 2 / 3)
	}
	mayGiveUp := true
	ended := ctx.Done()
	for mayBegin := true; addresses.mayHaveMore() || len(attempts) > 0; {
		if mayBegin && addresses.isReady() {
			if a := newAttempt(host, len(attempts)); a != nil {
				a.addr = addresses.takeNext()
				attempts = append(attempts, a)
				var within context.Context
				within, a.cancel = context.WithCancelCause(ctx)
				go runAttempt(within, a, dial, discard, results, won)
				mayBegin = false
				turn.Reset(attemptDelay)
			} else if mayGiveUp {
				attempts[0].giveWay()
			}
		}
		select {
		case answer := <-addresses.answers:
			addresses.addAnswer(answer)
		case <-addresses.delay:
			addresses.delay = nil
		case <-turn.C:
			mayBegin = true
		case <-lastThird:
			// A server that is far away may answer yet, and another address would have less time.
			lastThird, mayGiveUp = nil, false
		case r := <-results:
			if r.err == nil {
				return r.conn, nil
			}
			attempts = slices.DeleteFunc(attempts, func(a *attempt) bool { return a == r.attempt })
			failure.addAttempt(r.addr, r.err)
			mayBegin = true
		case <-ended:
			ended = nil
			addresses.dropAll()
		}
	}
	failure.lookups = addresses.failures
	if failure.last == nil {
		failure.last = addresses.decisiveFailure(context.Cause(ctx))
	}
	var none C
	return none, failure
}

// attempt is a call of dial.
type attempt struct {
	addr            netip.Addr
	minPatienceOver <-chan time.Time // minPatience is over
	cancel          context.CancelCauseFunc
	leaveSpare      func() // gives back the place among Spare
}

// result is the outcome of an attempt.
type result[C any] struct {
	*attempt
	conn C
	err  error
}

// newAttempt makes an attempt beside others; nil: there is no room for it.
func newAttempt(host Host, others int) *attempt {
	a := &attempt{minPatienceOver: time.After(minPatience), leaveSpare: func() {}}
	if others > 0 {
		if others >= MaxAttempts || host.Spare == nil || !host.Spare.Take(host.Client) {
			return nil
		}
		a.leaveSpare = func() { host.Spare.Leave(host.Client) }
	}
	return a
}

// giveWay gives the attempt up if minPatience is over.
func (a *attempt) giveWay() {
	select {
	case <-a.minPatienceOver:
		a.cancel(errGivenUp)
	default:
	}
}

// runAttempt calls dial, and discards what it returns if Dial has returned.
func runAttempt[C any](
	ctx context.Context, a *attempt, dial func(context.Context, netip.Addr) (C, error), discard func(C),
	results chan<- result[C], won <-chan struct{},
) {
	defer a.cancel(nil)
	conn, err := dial(ctx, a.addr)
	a.leaveSpare()
	select {
	case results <- result[C]{a, conn, err}:
	case <-won:
		if err == nil {
			discard(conn)
		}
	}
}

// isNotFound reports whether a lookup was answered, and the host has no address of the family.
func isNotFound(err error) bool {
	var dns *net.DNSError
	var unsuitable *net.AddrError // the hosts file has addresses of the other family
	return errors.As(err, &dns) && dns.IsNotFound || errors.As(err, &unsuitable)
}
