package ingress

import (
	"context"
	"encoding/base64"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

// try has a client at an address give a password, and returns how long the answer took.
func try(t *testing.T, l *Socket, from, says string) (took time.Duration, heard string, err error) {
	t.Helper()
	conn := newFakeConn(says)
	conn.remote, conn.hangUp = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from)), true
	began := time.Now()
	_, err = l.Greet(t.Context(), conn)
	return time.Since(began), conn.heard(), err
}

// countRemembered returns how many hosts are remembered.
func countRemembered(g *Guesses) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.hosts)
}

// The same account, right and wrong, in both protocols.
var (
	socksRight = "\x05\x01\x02\x01\x04jane\x06secret\x05\x01\x00\x01\xc0\x00\x02\x50\x00\x50"
	socksWrong = "\x05\x01\x02\x01\x04jane\x05guess"
	httpRight  = connectAs("jane:secret")
	httpWrong  = connectAs("jane:guess")
	httpNone   = "CONNECT 192.0.2.80:80 HTTP/1.1\r\nHost: 192.0.2.80\r\n\r\n"
)

func connectAs(user string) string {
	return "CONNECT 192.0.2.80:80 HTTP/1.1\r\nHost: 192.0.2.80\r\nProxy-Authorization: Basic " +
		base64.StdEncoding.EncodeToString([]byte(user)) + "\r\n\r\n"
}

func guarded(t *testing.T) *Socket {
	return testListener(t, Config{Mode: access.Mixed, Auth: []User{{"jane", "secret"}}, HandshakeTimeout: 10 * time.Second})
}

func TestAnswersToWrongPasswordsWaitLongerAndLonger(t *testing.T) {
	for name, says := range map[string]string{"SOCKS5": socksWrong, "HTTP": httpWrong} {
		synctest.Test(t, func(t *testing.T) {
			l := guarded(t)
			for i, seconds := range []int{0, 0, 0, 0, 0, 1, 2, 4, 8, 9, 9} {
				took, heard, err := try(t, l, "198.51.100.7:4000", says)
				require.ErrorIs(t, err, ErrUnauthorized, name)
				assert.Equal(t, time.Duration(seconds)*time.Second, took, "%s: attempt %d", name, i+1)
				assert.NotEmpty(t, heard, "%s: it is told", name)
			}
			took, _, err := try(t, l, "198.51.100.8:4000", says)
			require.ErrorIs(t, err, ErrUnauthorized)
			assert.Zero(t, took, "another host")
			time.Sleep(guessPeriod)
			took, _, _ = try(t, l, "198.51.100.7:4000", says)
			assert.Zero(t, took, "a minute later")
			time.Sleep(2 * guessPeriod)
			synctest.Wait()
			assert.Zero(t, countRemembered(&l.guesses), "nothing is kept")
		})
	}
}

func TestRightPasswordsDoNotWaitForWrongOnesOfTheSameHost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := guarded(t)
		var guessing sync.WaitGroup
		for range 50 {
			guessing.Go(func() { _, _, _ = try(t, l, "198.51.100.7:4000", socksWrong) })
		}
		synctest.Wait()
		for _, says := range []string{socksRight, httpRight} {
			took, _, err := try(t, l, "198.51.100.7:5000", says)
			require.NoError(t, err)
			assert.Zero(t, took)
		}
		guessing.Wait()
		time.Sleep(2 * guessPeriod)
	})
}

// Who opens another connection in place of waiting for an answer guesses no faster.
func TestWhoDoesNotWaitForAnswersGuessesNoFaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := guarded(t)
		looked, over := 0, time.Now().Add(guessPeriod/2)
		var guessing sync.WaitGroup
		for time.Now().Before(over) {
			if l.guesses.MayTry(netip.MustParseAddr("2001:db8::1")) {
				looked++
				guessing.Go(func() { _, _, _ = try(t, l, "[2001:db8::1]:4000", socksWrong) })
				synctest.Wait()
				continue
			}
			took, _, err := try(t, l, "[2001:db8::2]:4000", socksRight) // of the same /64
			require.ErrorIs(t, err, errGuessing)
			require.Zero(t, took)
			time.Sleep(time.Second)
			synctest.Wait() // for answers that are due at the same time
		}
		assert.LessOrEqual(t, looked, 5*maxHeldGuesses, "of thousands a second for half a minute")
		guessing.Wait()
		time.Sleep(2 * guessPeriod)
	})
}

func TestABrowserThatHasNotBeenAskedYetIsNotSlowedDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := guarded(t)
		for range 20 {
			took, heard, err := try(t, l, "198.51.100.7:4000", httpNone)
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrUnauthorized)
			assert.Contains(t, heard, "407")
			assert.Zero(t, took)
		}
	})
}

// A host's sixth wrong password may come just as its first ones are forgotten.
func TestAGuessMayComeAsOthersAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Guesses
		var guessing sync.WaitGroup
		for i := range 2000 {
			host := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
			guessing.Go(func() {
				for range freeGuesses {
					g.DelayWrong(t.Context(), host, time.Second)
				}
				time.Sleep(guessPeriod)
				g.DelayWrong(t.Context(), host, time.Second)
			})
		}
		guessing.Wait()
		time.Sleep(2 * guessPeriod)
	})
}

// A client that hangs up, as by resetting its stream, before it has its answer guesses no faster.
func TestWhoHangsUpHasItsAnswersHeldAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Guesses
		host := netip.MustParseAddr("192.0.2.1")
		gone, hangUp := context.WithCancel(t.Context())
		hangUp()
		looked := 0
		for range 10_000 {
			if g.MayTry(host) {
				looked++
				g.DelayWrong(gone, host, 9*time.Second)
			}
		}
		assert.Equal(t, freeGuesses+maxHeldGuesses, looked)
		time.Sleep(10 * time.Second)
		assert.True(t, g.MayTry(host))
		time.Sleep(2 * guessPeriod)
		synctest.Wait()
		assert.Zero(t, countRemembered(&g))
	})
}

// Wrong passwords of thousands of hosts let no other host guess freely.
func TestAHostIsSlowedDownBesideThousands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Guesses
		for i := range 2 * maxGuessedHosts {
			g.DelayWrong(t.Context(), netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), time.Second)
		}
		assert.Equal(t, maxGuessedHosts, countRemembered(&g))
		began := time.Now()
		for range 20 {
			g.DelayWrong(t.Context(), netip.MustParseAddr("192.0.2.1"), time.Second)
		}
		assert.Equal(t, 15*time.Second, time.Since(began))
		time.Sleep(2 * guessPeriod)
	})
}

func TestWrongPasswordsOfManyHostsAreRememberedInBoundedMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g Guesses
		for i := range 2 * maxGuessedHosts {
			g.DelayWrong(t.Context(), netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), time.Second)
		}
		assert.Equal(t, maxGuessedHosts, countRemembered(&g))
		time.Sleep(guessPeriod + time.Second)
		synctest.Wait()
		assert.Zero(t, countRemembered(&g))
	})
}
