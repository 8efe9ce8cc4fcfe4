package happyeyeballs_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

const (
	ms     = time.Millisecond
	never  = time.Hour
	within = 10 * time.Second // of a dial
)

var (
	errRefused = errors.New("connection refused")
	errNoName  = &net.DNSError{Err: "no such host", IsNotFound: true}
	errServer  = &net.DNSError{Err: "server misbehaving", IsTemporary: true}
)

// reply is what a name server says of a family, and when.
type reply struct {
	after time.Duration
	addrs []string
	err   error
}

// names is a name server for one name.
type names map[string]reply

func (n names) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	r := n[network]
	select {
	case <-time.After(r.after):
	case <-ctx.Done():
		return nil, &net.DNSError{Err: "i/o timeout", Name: host, IsTimeout: true}
	}
	var addrs []netip.Addr
	for _, a := range r.addrs {
		addrs = append(addrs, netip.MustParseAddr(a))
	}
	return addrs, r.err
}

// host is what an address does with a connection: it takes it, or refuses it, after a time.
type host struct {
	after time.Duration
	err   error
}

// network has the hosts by their addresses. Those that it does not have never answer.
type network struct {
	hosts map[string]host

	mu     sync.Mutex
	tried  []string
	under  int // attempts
	most   int // attempts under way at a time
	opened []string
	closed []string
}

func (n *network) dial(ctx context.Context, addr netip.Addr) (string, error) {
	n.mu.Lock()
	n.tried = append(n.tried, addr.String())
	n.under++
	n.most = max(n.most, n.under)
	h, there := n.hosts[addr.String()]
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		n.under--
		n.mu.Unlock()
	}()
	if !there {
		h.after = never
	}
	select {
	case <-time.After(h.after):
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	if h.err != nil {
		return "", h.err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.opened = append(n.opened, addr.String())
	return addr.String(), nil
}

func (n *network) discard(conn string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = append(n.closed, conn)
}

// places are of one client.
type places struct {
	mu   sync.Mutex
	left int
}

func (p *places) Take(string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		return false
	}
	p.left--
	return true
}

func (p *places) Leave(string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left++
}

// many are IPv4 addresses.
func many(n int) (addrs []string) {
	for i := range n {
		addrs = append(addrs, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}).String())
	}
	return addrs
}

func TestDial(t *testing.T) {
	v6, v4 := "2001:db8::1", "192.0.2.1"
	quick, dead := host{after: ms}, host{after: never}
	for _, row := range []struct {
		name   string
		names  names
		hosts  map[string]host
		source string
		spare  int
		want   string // address; empty: none
		after  time.Duration
		err    error
	}{
		{
			name: "IPv6 is preferred", want: v6, after: 2 * ms,
			names: names{"ip6": {after: ms, addrs: []string{v6}}, "ip4": {after: ms, addrs: []string{v4}}},
			hosts: map[string]host{v6: quick, v4: quick},
		},
		{
			name: "IPv6 addresses that are a little late are waited for", want: v6, after: 41 * ms,
			names: names{"ip6": {after: 40 * ms, addrs: []string{v6}}, "ip4": {addrs: []string{v4}}},
			hosts: map[string]host{v6: quick, v4: quick},
		},
		{
			name: "IPv6 is never answered", want: v4, after: 52 * ms,
			names: names{"ip6": {after: never}, "ip4": {after: ms, addrs: []string{v4}}},
			hosts: map[string]host{v4: quick},
		},
		{
			name: "IPv4 is never answered", want: v6, after: 2 * ms,
			names: names{"ip6": {after: ms, addrs: []string{v6}}, "ip4": {after: never}},
			hosts: map[string]host{v6: quick},
		},
		{
			name: "there is no IPv6 address", want: v4, after: 2 * ms,
			names: names{"ip6": {err: errNoName}, "ip4": {after: ms, addrs: []string{v4}}},
			hosts: map[string]host{v4: quick},
		},
		{
			name: "the name server fails for IPv6", want: v4, after: 11 * ms,
			names: names{"ip6": {after: 10 * ms, err: errServer}, "ip4": {addrs: []string{v4}}},
			hosts: map[string]host{v4: quick},
		},
		{
			name: "IPv6 does not lead there", want: v4, after: 251 * ms, spare: 8,
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {addrs: []string{v4}}},
			hosts: map[string]host{v4: quick},
		},
		{
			name: "a refusal is not waited out", want: v4, after: 2 * ms,
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {addrs: []string{v4}}},
			hosts: map[string]host{v6: {after: ms, err: errRefused}, v4: quick},
		},
		{
			name: "the families take turns", want: v4, after: 251 * ms, spare: 8,
			names: names{
				"ip6": {addrs: []string{"2001:db8::9", "2001:db8::8", "2001:db8::7"}}, "ip4": {addrs: []string{v4}},
			},
			hosts: map[string]host{v4: quick},
		},
		{
			name: "six dead addresses, and a seventh", want: "192.0.2.7", after: 1551 * ms, spare: 8,
			names: names{"ip6": {after: never}, "ip4": {addrs: many(7)}},
			hosts: map[string]host{"192.0.2.7": quick},
		},
		{
			name: "fifteen dead addresses: the first ones are given up", want: "192.0.2.16", after: 3751 * ms, spare: 8,
			names: names{"ip6": {err: errNoName}, "ip4": {addrs: many(16)}},
			hosts: map[string]host{"192.0.2.16": quick},
		},
		{
			name: "without room each address has two seconds", want: "192.0.2.4", after: 6001 * ms,
			names: names{"ip6": {err: errNoName}, "ip4": {addrs: many(4)}},
			hosts: map[string]host{"192.0.2.4": quick},
		},
		{
			name: "a slow first address is not given up", want: v4, after: 900 * ms, spare: 8,
			names: names{"ip6": {err: errNoName}, "ip4": {addrs: many(2)}},
			hosts: map[string]host{v4: {after: 900 * ms}},
		},
		{
			name: "IPv4 addresses that are late are tried once they are there", want: v4, after: 4001 * ms,
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {after: 4 * time.Second, addrs: []string{v4}}},
			hosts: map[string]host{v6: {err: errRefused}, v4: quick},
		},
		{
			name: "addresses of another family than the source's are not asked for", want: v4, after: ms,
			names: names{"ip4": {addrs: []string{v4}}}, source: "192.0.2.200", hosts: map[string]host{v4: quick},
		},
		{
			name: "an IPv4 address in IPv6 form", want: v4, after: ms,
			names: names{"ip4": {addrs: []string{"::ffff:192.0.2.1"}}}, source: "192.0.2.200",
			hosts: map[string]host{v4: quick},
		},
		{
			name: "no address at all", names: names{"ip6": {err: errNoName}, "ip4": {after: ms, err: errNoName}},
			after: ms, err: errNoName,
		},
		{
			name:  "a failure of the name server is no negative answer",
			names: names{"ip6": {err: errNoName}, "ip4": {after: ms, err: errServer}}, after: ms, err: errServer,
		},
		{
			name:  "all refuse",
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {addrs: []string{v4}}}, after: 2 * ms, err: errRefused,
			hosts: map[string]host{v6: {after: ms, err: errRefused}, v4: {after: ms, err: errRefused}},
		},
		{
			name:  "a refusal tells more than the lack of a route of the other family",
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {addrs: []string{v4}}}, after: 2 * ms, err: errRefused,
			hosts: map[string]host{v6: {after: ms, err: errRefused}, v4: {after: ms, err: syscall.ENETUNREACH}},
		},
		{
			name:  "no route of either family",
			names: names{"ip6": {addrs: []string{v6}}, "ip4": {addrs: []string{v4}}}, after: 2 * ms,
			hosts: map[string]host{v6: {after: ms, err: syscall.EADDRNOTAVAIL}, v4: {after: ms, err: syscall.ENETUNREACH}},
			err:   syscall.ENETUNREACH,
		},
		{
			name: "nothing answers", names: names{"ip6": {after: never}, "ip4": {addrs: many(3)}}, spare: 8,
			hosts: map[string]host{v4: dead}, after: within, err: context.DeadlineExceeded,
		},
		{
			name: "the name server does not answer", names: names{"ip6": {after: never}, "ip4": {after: never}},
			after: within,
			err:   &net.DNSError{Err: "i/o timeout", Name: "a.test", IsTimeout: true},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{hosts: row.hosts}
				spare := &places{left: row.spare}
				to := happyeyeballs.Host{Name: "a.test", Resolver: row.names, Timeout: within, Spare: spare, Client: "a"}
				if row.source != "" {
					to.Source = netip.MustParseAddr(row.source)
				}
				began := time.Now()
				conn, err := happyeyeballs.Dial(t.Context(), to, n.dial, n.discard)
				assert.Equal(t, row.after, time.Since(began))
				assert.Equal(t, row.want, conn)
				if row.err == nil {
					require.NoError(t, err)
				} else {
					require.Error(t, err)
					var dns *net.DNSError
					if errors.As(row.err, &dns) {
						assert.Equal(t, dns, errors.Unwrap(err))
					} else {
						assert.ErrorIs(t, err, row.err)
					}
				}
				synctest.Wait()
				assert.Zero(t, n.under, "attempts go on")
				assert.Equal(t, row.spare, spare.left)
			})
		})
	}
}

func TestServersFarAwayAreReached(t *testing.T) {
	for _, row := range []struct{ addrs, spare int }{{2, 8}, {8, 8}, {16, 8}, {40, 8}, {2, 0}, {5, 0}, {8, 0}} {
		t.Run(fmt.Sprintf("%d addresses, %d spare attempts", row.addrs, row.spare), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{hosts: map[string]host{}}
				for _, a := range many(row.addrs) {
					n.hosts[a] = host{after: 2500 * ms}
				}
				to := happyeyeballs.Host{
					Name: "a.test", Resolver: names{"ip6": {err: errNoName}, "ip4": {addrs: many(row.addrs)}},
					Timeout: within, Spare: &places{left: row.spare},
				}
				_, err := happyeyeballs.Dial(t.Context(), to, n.dial, n.discard)
				assert.NoError(t, err)
			})
		})
	}
}

func TestAnErrorTellsOfEachFamily(t *testing.T) {
	for _, row := range []struct {
		name, want string
		names      names
		hosts      map[string]host
	}{
		{
			"both looked up in vain", "no address of a.test could be reached; IPv6: lookup : no such host; " +
				"IPv4: lookup : server misbehaving",
			names{"ip6": {err: errNoName}, "ip4": {err: errServer}},
			nil,
		},
		{
			"one looked up in vain, one refused", "no address of a.test could be reached; IPv6: lookup : no such host; " +
				"IPv4: connection refused; IPv4: connection refused; IPv4: connection refused; and 2 more",
			names{"ip6": {err: errNoName}, "ip4": {addrs: many(5)}},
			map[string]host{
				"192.0.2.1": {err: errRefused}, "192.0.2.2": {err: errRefused}, "192.0.2.3": {err: errRefused},
				"192.0.2.4": {err: errRefused}, "192.0.2.5": {err: errRefused},
			},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &network{hosts: row.hosts}
				_, err := happyeyeballs.Dial(t.Context(), happyeyeballs.Host{Name: "a.test", Resolver: row.names},
					n.dial, n.discard)
				assert.EqualError(t, err, row.want)
			})
		})
	}
}

func TestLookUp(t *testing.T) {
	v6, v4 := "2001:db8::1", "192.0.2.1"
	for _, row := range []struct {
		name  string
		names names
		want  []string
		after time.Duration
		err   error
	}{
		{
			"both families",
			names{"ip6": {after: 100 * ms, addrs: []string{v6}}, "ip4": {addrs: []string{v4}}},
			[]string{v6, v4},
			100 * ms, nil,
		},
		{
			"IPv6 is never answered",
			names{"ip6": {after: never}, "ip4": {addrs: []string{v4}}},
			[]string{v4},
			200 * ms, nil,
		},
		{
			"IPv4 is answered late, IPv6 in vain",
			names{"ip6": {err: errNoName}, "ip4": {after: 500 * ms, addrs: []string{v4}}},
			[]string{v4},
			500 * ms, nil,
		},
		{"neither", names{"ip6": {err: errNoName}, "ip4": {err: errNoName}}, nil, 0, errNoName},
		{"never", names{"ip6": {after: never}, "ip4": {after: never}}, nil, within, &net.DNSError{
			Err: "i/o timeout", Name: "a.test", IsTimeout: true,
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), within)
				defer cancel()
				began := time.Now()
				addrs, err := happyeyeballs.LookUp(ctx, happyeyeballs.Host{Name: "a.test", Resolver: row.names})
				assert.Equal(t, row.after, time.Since(began))
				var got []string
				for _, a := range addrs {
					got = append(got, a.String())
				}
				assert.Equal(t, row.want, got)
				assert.Equal(t, row.err, errors.Unwrap(err))
			})
		})
	}
}

// Whatever name servers and hosts do: a host that takes connections within a second is reached, attempts are bounded,
// and every connection but the one that is returned is closed.
func TestDialsLeaveNothingBehind(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) { leaveNothingBehind(t, r) })
}

func leaveNothingBehind(bubble *testing.T, t *rapid.T) {
	n := &network{hosts: map[string]host{}}
	server, reachable := names{}, false
	for family, prefix := range map[string]string{"ip6": "2001:db8::", "ip4": "192.0.2."} {
		r := reply{after: time.Duration(rapid.IntRange(0, 2000).Draw(t, family+" comes after")) * ms}
		if rapid.Bool().Draw(t, family+" fails") {
			r.err = errServer
		}
		for i := range rapid.IntRange(0, 6).Draw(t, family+" addresses") {
			if r.err != nil {
				break
			}
			addr := prefix + string(rune('1'+i))
			r.addrs = append(r.addrs, addr)
			h := host{after: time.Duration(rapid.IntRange(0, 1000).Draw(t, addr+" answers after")) * ms}
			switch rapid.IntRange(0, 2).Draw(t, addr+" does") {
			case 0:
				continue // it never answers
			case 1:
				h.err = errRefused
			default:
				reachable = true
			}
			n.hosts[addr] = h
		}
		server[family] = r
	}
	room := rapid.IntRange(0, 10).Draw(t, "spare")
	spare := &places{left: room}
	var conn string
	var err error
	synctest.Test(bubble, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		conn, err = happyeyeballs.Dial(ctx, happyeyeballs.Host{Name: "a.test", Resolver: server, Spare: spare},
			n.dial, n.discard)
		synctest.Wait()
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	if reachable != (err == nil) {
		t.Fatalf("reachable: %v, but %v", reachable, err)
	}
	if most := min(happyeyeballs.MaxAttempts, 1+room); n.most > most {
		t.Fatalf("%d attempts at a time, of %d", n.most, most)
	}
	if n.under != 0 || spare.left != room {
		t.Fatalf("%d attempts go on, %d places are taken", n.under, room-spare.left)
	}
	if err == nil {
		n.closed = append(n.closed, conn)
	}
	if len(n.closed) != len(n.opened) {
		t.Fatalf("opened %v, but closed or returned %v", n.opened, n.closed)
	}
	if err != nil && strings.Contains(err.Error(), "\n") {
		t.Fatalf("an error of more than a line: %q", err)
	}
}
