package happyeyeballs

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"time"
)

// family is an address family, as an index.
type family int

const (
	ipv6 family = iota
	ipv4
)

func (f family) String() string { return [...]string{"IPv6", "IPv4"}[f] }

// familyOf returns the family of an address; IPv4 in its IPv6 form is IPv4.
func familyOf(a netip.Addr) family {
	if a.Unmap().Is4() {
		return ipv4
	}
	return ipv6
}

// answer is the result of a lookup for one family.
type answer struct {
	family family
	addrs  []netip.Addr
	err    error
}

// addresses are those of a host that have not been tried yet, while answers come in.
type addresses struct {
	answers  chan answer
	pending  int              // lookups under way
	delay    <-chan time.Time // until then IPv4 addresses wait for IPv6 ones; nil: they do not
	waiting  [2][]netip.Addr  // by family
	turn     family           // the family of the next address, if it has one
	failures [2]error         // of lookups
	dropped  bool
}

// lookUp begins the lookups of a host. They end with ctx.
func lookUp(ctx context.Context, host Host) *addresses {
	resolver := host.Resolver
	if resolver == nil {
		resolver = net.DefaultResolver
	}
	families := host.families()
	a := &addresses{answers: make(chan answer, len(families)), pending: len(families), turn: families[0]}
	for _, f := range families {
		go func() {
			network := map[family]string{ipv6: "ip6", ipv4: "ip4"}[f]
			addrs, err := resolver.LookupNetIP(ctx, network, host.Name)
			a.answers <- answer{f, addrs, err}
		}()
	}
	return a
}

// addAnswer takes an answer.
func (a *addresses) addAnswer(from answer) {
	a.pending--
	a.failures[from.family] = from.err
	if a.dropped {
		return
	}
	a.waiting[from.family] = from.addrs
	switch {
	case from.family == ipv6 || a.pending == 0:
		a.delay = nil
	case len(from.addrs) > 0:
		a.delay = time.After(resolutionDelay)
	}
}

// LookUp returns the addresses of a host, those of the families in turn. Once those of one family
// have come it waits no longer than lookUpDelay for the others.
func LookUp(ctx context.Context, host Host) ([]netip.Addr, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := lookUp(ctx, host)
	var late <-chan time.Time
	for patient := true; patient && a.pending > 0; {
		select {
		case answer := <-a.answers:
			a.addAnswer(answer)
			late = time.After(lookUpDelay)
		case <-late:
			patient = !a.hasAny()
		}
	}
	if !a.hasAny() {
		return nil, &Error{Host: host.Name, lookups: a.failures, last: a.decisiveFailure(context.Cause(ctx))}
	}
	var all []netip.Addr
	for a.hasAny() {
		all = append(all, a.takeNext())
	}
	return all, nil
}

// hasAny reports whether an address waits to be tried.
func (a *addresses) hasAny() bool { return len(a.waiting[ipv6])+len(a.waiting[ipv4]) > 0 }

// isReady reports whether there is an address that may be tried now.
func (a *addresses) isReady() bool {
	return a.delay == nil && a.hasAny()
}

// mayHaveMore reports whether there is an address, or may be one once the lookups are over.
func (a *addresses) mayHaveMore() bool {
	return a.pending > 0 || a.hasAny()
}

// takeNext takes an address, of the families in turn (RFC 8305 §4).
func (a *addresses) takeNext() netip.Addr {
	f := a.turn
	if len(a.waiting[f]) == 0 {
		f = 1 - f
	}
	addr := a.waiting[f][0].Unmap()
	a.waiting[f] = a.waiting[f][1:]
	a.turn = 1 - f
	return addr
}

// dropAll forgets the addresses, also those of lookups that go on.
func (a *addresses) dropAll() {
	a.dropped = true
	a.waiting = [2][]netip.Addr{}
}

// decisiveFailure returns why there was no address to try: preferably one that another lookup may not have,
// else why the dial has ended.
func (a *addresses) decisiveFailure(ended error) error {
	var found error
	for _, err := range a.failures {
		if err != nil && !isNotFound(err) {
			return err
		}
		found = cmp.Or(found, err)
	}
	return cmp.Or(found, ended)
}
