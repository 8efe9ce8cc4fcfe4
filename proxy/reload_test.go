package proxy_test

import (
	"crypto/sha256"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// with is the configuration a rig started with, changed.
func (r *rig) with(change func(*config.Config)) config.Config {
	cfg := r.cfg
	change(&cfg)
	return cfg
}

func (r *rig) reload(change func(*config.Config)) proxy.Reloaded {
	r.tb.Helper()
	done, err := r.proxy.Reload(r.with(change))
	require.NoError(r.tb, err)
	return done
}

func under(algorithm policy.Algorithm) func(*config.Config) {
	return func(c *config.Config) { c.Defaults.Algorithm = algorithm }
}

func TestASwitchInTheMiddleOfATransferLosesNothing(t *testing.T) {
	const size, switches = 32 << 20, 20
	algorithms := []policy.Algorithm{"copa", "cubic", "static:cwnd_packets=64", "copa:delta=0.1", "bbr"}
	r := newRig(t, under("cubic"))
	client, server := r.pair()
	up, down := random(1, size), random(2, size)
	var wg sync.WaitGroup
	write := func(conn io.Writer, end func() error, b []byte) {
		wg.Go(func() {
			_, err := conn.Write(b)
			assert.NoError(t, err)
			assert.NoError(t, end())
		})
	}
	write(server, server.CloseWrite, down)
	write(client, client.CloseWrite, up)
	wg.Go(func() {
		got, err := io.ReadAll(server)
		assert.NoError(t, err)
		assert.Equal(t, sha256.Sum256(up), sha256.Sum256(got), "%d bytes", len(got))
	})
	sum := sha256.New()
	for i := range switches {
		_, err := io.CopyN(sum, client, size/switches/2)
		require.NoError(t, err)
		algorithm := algorithms[i%len(algorithms)]
		done := r.reload(under(algorithm))
		assert.Zero(t, done.Kept)
		assert.Positive(t, done.Moved, "half of the download is still to come")
		f := flowsOf(r.proxy)[0]
		name := [...]string{"copa", "cubic", "static", "copa", "bbr"}[i%len(algorithms)]
		assert.Equal(t, name, f.Down.Algorithm)
		assert.Equal(t, name, f.Down.Flow.Algorithm)
		assert.LessOrEqual(t, len(f.Down.Control), 5, "one for each algorithm, and the present one")
	}
	_, err := io.Copy(sum, client)
	require.NoError(t, err)
	wg.Wait()
	want := sha256.Sum256(down)
	assert.Equal(t, want[:], sum.Sum(nil))
	require.NoError(t, r.stop())

	c := r.proxy.Counters()
	require.Len(t, c.Routes, 1)
	assert.EqualValues(t, size, c.Routes[0].Down.Written)
	assert.EqualValues(t, size, c.Routes[0].Up.Written)
	var spent time.Duration
	for _, name := range []string{"cubic", "copa", "static", "bbr"} {
		require.Contains(t, c.Routes[0].Down.Control, name)
		for by, d := range c.Routes[0].Down.Control[name].Limited {
			assert.GreaterOrEqual(t, d, time.Duration(0), "%s %v", name, by)
			spent += d
		}
	}
	assert.Positive(t, spent)
	assert.Contains(t, r.logs.String(), "closed_by=")
}

func TestRunningConnectionsAreDecidedAboutAgain(t *testing.T) {
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	rule := func(change func(*policy.RuleSettings)) func(*config.Config) {
		return func(c *config.Config) {
			c.Rules = []policy.RuleSettings{{Name: "new", Match: policy.Match{Sources: loopback}}}
			change(&c.Rules[0])
		}
	}
	for name, row := range map[string]struct {
		before   policy.Algorithm
		change   func(*config.Config)
		rule, up string // of the connection, after
		done     proxy.Reloaded
	}{
		"by a rule that matches now": {
			"cubic", rule(func(r *policy.RuleSettings) { r.Algorithm = "copa" }), "new", "copa", proxy.Reloaded{Moved: 2},
		},
		"of which only one direction changes": {
			"cubic", rule(func(r *policy.RuleSettings) { r.Up.Algorithm = "copa" }), "new", "copa", proxy.Reloaded{Moved: 1},
		},
		"by a rule that changes nothing": {
			"cubic", rule(func(*policy.RuleSettings) {}), "new", "cubic", proxy.Reloaded{},
		},
		"by a rule that refuses: it goes on as it was": {
			"cubic", rule(func(r *policy.RuleSettings) { r.Refuse = "no more" }), "", "cubic", proxy.Reloaded{Refused: 1},
		},
		"in place, where only the rate changes": {
			"cubic", func(c *config.Config) { c.Defaults.MaxRate = 1e9 }, "", "cubic", proxy.Reloaded{Moved: 2},
		},
		"in place, where only the client's window changes": {
			"cubic", func(c *config.Config) { c.Defaults.Up.Receive = "none" }, "", "cubic", proxy.Reloaded{Moved: 1},
		},
		"but what was left to the kernel stays there": {
			"none", under("copa"), "", "none", proxy.Reloaded{Kept: 2},
		},
		"and what is ours stays ours": {
			"copa", under("none"), "", "copa", proxy.Reloaded{Kept: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, under(row.before))
			client, server := r.pair()
			busy := string(random(1, 100_000)) // more than goes without an algorithm
			send(t, client, busy)
			_, err := io.ReadFull(server, make([]byte, len(busy)))
			require.NoError(t, err)
			send(t, server, busy)
			_, err = io.ReadFull(client, make([]byte, len(busy)))
			require.NoError(t, err)
			require.Eventually(t, func() bool { return flowsOf(r.proxy)[0].State == proxy.StateOpen }, patience, time.Millisecond)
			assert.Equal(t, row.done, r.reload(row.change))
			f := flowsOf(r.proxy)[0]
			assert.Equal(t, row.rule, f.Rule)
			assert.Equal(t, row.up, f.Up.Algorithm)
			again := r.reload(row.change)
			assert.Zero(t, again.Moved, "once more, nothing changes")
			assert.Equal(t, row.done.Kept, again.Kept)
			require.Len(t, r.proxy.Counters().Routes, 1)
			assert.Empty(t, r.proxy.Counters().Routes[0].Rule, "it is counted where it began")

			send(t, server, "pong")
			_, err = io.ReadFull(client, make([]byte, 4))
			require.NoError(t, err)
		})
	}
}

// A direction that has had no more underway than any sender may has no algorithm yet, and
// takes whatever a reload gives it.
func TestWhatIsNotManagedYetTakesAnyTerms(t *testing.T) {
	for algorithm, managed := range map[policy.Algorithm]struct{ afterLittle, afterMuch bool }{
		"none": {false, false}, "copa": {false, true}, "static": {true, true},
	} {
		t.Run(string(algorithm), func(t *testing.T) {
			r := newRig(t, under("cubic"))
			client, server := r.pair()
			upload := func(size int) proxy.FlowInfo {
				send(t, client, string(random(1, size)))
				_, err := io.ReadFull(server, make([]byte, size))
				require.NoError(t, err)
				return flowsOf(r.proxy)[0]
			}
			assert.False(t, upload(4).Up.Managed)
			assert.Equal(t, proxy.Reloaded{Moved: 2}, r.reload(under(algorithm)))
			assert.EqualValues(t, algorithm, flowsOf(r.proxy)[0].Up.Algorithm)
			assert.Equal(t, managed.afterLittle, upload(4).Up.Managed)
			assert.Equal(t, managed.afterMuch, upload(100_000).Up.Managed)
		})
	}
}

func TestNewConnectionsHaveTheNewRules(t *testing.T) {
	r := newRig(t, nil)
	client, _ := r.pair()
	r.reload(func(c *config.Config) { c.Rules = []policy.RuleSettings{{Name: "closed", Refuse: "no more"}} })
	refused(t, r.addr())
	r.reload(func(c *config.Config) { c.Limits.Connections = 1 })
	assert.Equal(t, 1, r.proxy.Counters().Limit)
	refused(t, r.addr())
	r.reload(func(c *config.Config) {
		c.Listeners = append([]access.Listener(nil), c.Listeners...)
		c.Listeners[0].Connections = 1
	})
	refused(t, r.addr())
	r.reload(func(c *config.Config) { c.Defaults.Algorithm = "vegas" })
	_, _ = r.pair()
	moved := func() bool { return flowsOf(r.proxy)[1].Down.Algorithm == "vegas" }
	assert.Eventually(t, moved, patience, time.Millisecond, "once it is open")
	c := r.proxy.Counters()
	for _, reason := range []proxy.Reason{proxy.RejectedRule, proxy.RejectedGlobalLimit, proxy.RejectedListenerLimit} {
		assert.Equal(t, uint64(1), c.Listeners[0].Rejected[reason], reason)
	}
	require.NoError(t, client.Close())
}

func TestWhatIsNotInForceIsCountedUntilItsLastConnectionEnds(t *testing.T) {
	rule := func(name string) func(*config.Config) {
		return func(c *config.Config) { c.Rules = []policy.RuleSettings{{Name: name}} }
	}
	r := newRig(t, rule("one"))
	counted := func() (rules []string, active int) {
		for _, row := range r.proxy.Counters().Routes {
			rules, active = append(rules, row.Rule), active+row.Active
		}
		return rules, active
	}
	begin := func() (client, server net.Conn) {
		client, server = r.pair()
		send(t, server, "hello")
		hears(t, client, "hello")
		return client, server
	}
	end := func(client, server net.Conn) {
		require.NoError(t, client.Close())
		require.NoError(t, server.Close())
		require.Eventually(t, func() bool { _, active := counted(); return active == 0 }, patience, time.Millisecond)
	}
	client, server := begin()
	r.reload(rule("two"))
	rules, _ := counted()
	assert.Equal(t, []string{"one"}, rules)
	end(client, server)
	rules, _ = counted()
	assert.Empty(t, rules)

	end(begin())
	r.reload(rule("two"))
	rules, _ = counted()
	assert.Equal(t, []string{"two"}, rules)
	r.reload(rule("three"))
	rules, _ = counted()
	assert.Empty(t, rules)
}

func TestWhatCannotChangeWhileRunningIsRefusedByName(t *testing.T) {
	r := newRig(t, under("cubic"))
	client, server := r.pair()
	send(t, client, "ping")
	_, err := io.ReadFull(server, make([]byte, 4))
	require.NoError(t, err)
	for key, change := range map[string]func(*config.Config){
		"envelope":               func(c *config.Config) { c.Envelope = "reno" },
		"mark":                   func(c *config.Config) { c.Mark = 7 },
		"limits.held_legs":       func(c *config.Config) { c.Limits.HeldLegs++ },
		"limits.memory":          func(c *config.Config) { c.Limits.Memory *= 2 },
		"telemetry.address":      func(c *config.Config) { c.Telemetry.Address = "off" },
		"telemetry.hints.socket": func(c *config.Config) { c.Telemetry.Hints.Socket = "/run/other.sock" },
		"log.format":             func(c *config.Config) { c.Log.Format = "text" },
	} {
		t.Run(key, func(t *testing.T) {
			_, err := r.proxy.Reload(r.with(func(c *config.Config) {
				change(c)
				c.Defaults.Algorithm = "copa"
				c.Limits.Connections = 1
			}))
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.Equal(t, key, ce.Key)
			assert.Contains(t, err.Error(), key+": cannot change while running")
			assert.Contains(t, err.Error(), "restart")
			assert.Equal(t, "cubic", flowsOf(r.proxy)[0].Down.Algorithm, "nothing else has changed either")
			assert.NotEqual(t, 1, r.proxy.Counters().Limit)
		})
	}
	_, err = r.proxy.Reload(r.with(func(c *config.Config) { c.Limits.Buffer = 1 }))
	require.ErrorContains(t, err, "limits.buffer", "a mistake is one at a reload as well")
	_, err = r.proxy.Reload(r.with(func(c *config.Config) { c.Defaults.Algorithm = "nope" }))
	require.ErrorContains(t, err, "nope")
}

func TestAReloadWhileAConnectionIsBeingMadeCountsForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *config.Config, _ *bench) { c.Defaults.Algorithm = "cubic" })
		defer b.end()
		b.dialling = func() { // it has been decided about
			cfg := b.cfg
			cfg.Defaults.Algorithm = "copa"
			done, err := b.server.Reload(cfg)
			assert.NoError(t, err)
			assert.Zero(t, done.Moved)
		}
		client, server := b.connect()
		client.send([]byte("x"))
		_, err := server.take(1)
		require.NoError(t, err)
		synctest.Wait()
		f := flowsOf(b.server)[0]
		assert.Equal(t, "copa", f.Down.Algorithm)
		assert.Equal(t, "copa", f.Up.Algorithm)
	})
}

// A connection is counted under the rule that it was decided by, though a reload has dropped that while it was
// dialled.
func TestWhatIsDroppedWhileAConnectionIsBeingMadeIsCountedUntilThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *config.Config, _ *bench) { c.Rules = []policy.RuleSettings{{Name: "dropped"}} })
		defer b.end()
		b.dialling = func() {
			cfg := b.cfg
			cfg.Rules = nil
			_, err := b.server.Reload(cfg)
			assert.NoError(t, err)
		}
		client, server := b.connect()
		synctest.Wait()
		routes := b.server.Counters().Routes
		require.Len(t, routes, 1)
		assert.Equal(t, "dropped", routes[0].Rule)
		client.sendFin()
		server.sendFin()
		synctest.Wait()
		assert.Empty(t, b.server.Counters().Routes)
	})
}

func TestWhoIsRevokedWhileAConnectionIsBeingMadeLosesIt(t *testing.T) {
	revoke := func(b *bench) {
		b.listener.gone.Store(true)
		done, err := b.server.Reload(b.cfg)
		assert.NoError(t, err)
		assert.Equal(t, 1, done.Revoked)
	}
	for name, row := range map[string]struct {
		silent bool // the server does not answer
		when   func(b *bench)
	}{
		"while it is dialled":   {true, func(*bench) {}},
		"as the server answers": {false, revoke},
		"before it is relayed":  {false, func(b *bench) { b.listener.gone.Store(true) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, func(_ *config.Config, b *bench) { b.silent = row.silent })
				defer b.end()
				b.dialling = func() { row.when(b) }
				client := newFakeLeg(b.clock, 10000, b.capacity)
				b.listener.legs <- client
				synctest.Wait()
				if row.silent {
					revoke(b)
				}
				require.False(t, t.Failed())
				began := time.Now()
				_, err := client.take(1)
				assert.ErrorIs(t, err, syscall.ECONNRESET)
				assert.Zero(t, time.Since(began))
				synctest.Wait()
				assert.Contains(t, b.logs.String(), "reason=revoked")
			})
		})
	}
}

func TestNewTimeoutsHoldForRunningConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil) // an hour idle
		defer b.end()
		client, _ := b.connect()
		time.Sleep(time.Second)
		cfg := b.cfg
		cfg.Limits.IdleTimeout = time.Minute
		_, err := b.server.Reload(cfg)
		require.NoError(t, err)
		began := time.Now()
		_, err = client.take(1)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
		assert.InDelta(t, time.Minute.Seconds(), time.Since(began).Seconds(), 8)
	})
}
