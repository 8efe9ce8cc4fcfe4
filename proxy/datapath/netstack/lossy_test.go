package netstack

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// roundsVariable says how many rounds TestDownloadsEndOverALossyLink takes. With it, the
// test also bounds their silences, for which the machine has to be idle enough.
const roundsVariable = "PENSTOCK_LOSSY_ROUNDS"

// Each round is many small downloads at once over a short path that loses packets, in
// real time since the stack is not of any other.
func TestDownloadsEndOverALossyLink(t *testing.T) {
	const (
		downloads = 100
		size      = 300_000
		trip      = 300 * time.Microsecond
		silence   = 3 * time.Second // more than a few timeouts in a row
	)
	rounds, text := 1, os.Getenv(roundsVariable)
	if text != "" {
		var err error
		rounds, err = strconv.Atoi(text)
		require.NoError(t, err, roundsVariable)
	}
	for _, algorithm := range []string{"penstock", "none"} {
		for round := range rounds {
			loss := float64(1+round%3) / 100
			t.Run(fmt.Sprintf("%s %d%% %d", algorithm, int(100*loss), round), func(t *testing.T) {
				now := clock()
				near, far := lossy(t, now, loss, trip/2, uint64(round))
				var manager flow.Manager
				var done sync.WaitGroup
				serve(t, near, &manager, algorithm, size)
				longest := make([]time.Duration, downloads)
				for i := range downloads {
					done.Go(func() {
						c := dial(t, far, client, server)
						got, b := 0, make([]byte, 64<<10)
						for {
							before := now()
							assert.NoError(t, c.SetReadDeadline(time.Now().Add(10*silence))) //nolint:forbidigo // net.Conn's deadlines are of the real clock
							n, err := c.Read(b)
							longest[i] = max(longest[i], now().Sub(before))
							if got += n; err != nil {
								assert.Equal(t, io.EOF, err)
								break
							}
						}
						assert.Equal(t, size, got)
						assert.NoError(t, c.Close())
					})
				}
				done.Wait()
				worst := slices.Max(longest)
				t.Logf("longest silence %v, stalls %d", worst, near.Counts().Stalls)
				if text != "" {
					assert.Less(t, worst, silence)
				}
			})
		}
	}
}

// serve answers every connection with size bytes, under an algorithm.
func serve(t *testing.T, s *Stack, m *flow.Manager, algorithm string, size int) {
	var done sync.WaitGroup
	stop := make(chan struct{})
	done.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				m.Tick(0, s.clock())
			}
		}
	})
	done.Go(func() {
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			done.Go(func() { answer(t, c, m, algorithm, size) })
		}
	})
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		close(stop)
		done.Wait()
	})
}

func answer(t *testing.T, c *Conn, m *flow.Manager, algorithm string, size int) {
	if c.Admit(context.Background()) != nil {
		return // its client asks again
	}
	take := func(n int) int { return n }
	if algorithm != "none" {
		wake := make(chan struct{}, 1)
		c.Enforce(datapath.HoldAll, 0)
		terms := flow.Terms{Group: "client", Algorithm: algorithm}
		f, err := m.Open(c.conns.clock(), terms, flow.Leg{Apply: c.Apply, Wake: func() {
			select {
			case wake <- struct{}{}:
			default:
			}
		}})
		if !assert.NoError(t, err) {
			return
		}
		defer func() { f.Close(c.conns.clock()) }()
		c.Observe(f.Report)
		take = func(n int) int {
			for {
				if g := f.Take(c.conns.clock(), cc.Bytes(n)); g.Bytes > 0 {
					return int(g.Bytes)
				}
				select {
				case <-wake:
				case <-c.conns.poller.closed:
					return 0
				}
			}
		}
	}
	b := make([]byte, 64<<10)
	for left := size; left > 0; {
		n, err := c.Write(b[:take(min(len(b), left))])
		if !assert.NoError(t, err) {
			return
		}
		left -= n
	}
	assert.NoError(t, c.CloseWrite())
	_, _ = io.Copy(io.Discard, c) // until the client closes, or the stack
	_ = c.Close()
}

// lossy returns two stacks and joins them, each way with a delay; of what the first
// sends, a part is lost.
func lossy(t *testing.T, now func() cc.Time, loss float64, delay time.Duration, seed uint64) (near, far *Stack) {
	near, err := New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	far, err = New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	type batch struct {
		at      time.Time
		packets [][]byte
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	for _, way := range [][2]*Stack{{near, far}, {far, near}} {
		lost := func() bool { return false }
		if random := rand.New(rand.NewPCG(seed, 0)); way[0] == near {
			lost = func() bool { return random.Float64() < loss }
		}
		line := make(chan batch, 1<<14)
		done.Go(func() {
			defer close(line)
			bufs, sizes := make([][]byte, 128), make([]int, 128)
			for i := range bufs {
				bufs[i] = make([]byte, mtu)
			}
			for {
				n, err := way[0].Collect(ctx, bufs, sizes, 0)
				if err != nil {
					return
				}
				b := batch{at: time.Now().Add(delay)} //nolint:forbidigo // the stacks run on it
				for i := range n {
					if !lost() {
						b.packets = append(b.packets, append([]byte(nil), bufs[i][:sizes[i]]...))
					}
				}
				line <- b
			}
		})
		done.Go(func() {
			for b := range line {
				time.Sleep(time.Until(b.at)) //nolint:forbidigo // likewise
				way[1].Deliver(b.packets...)
			}
		})
	}
	t.Cleanup(func() {
		assert.NoError(t, near.Close())
		assert.NoError(t, far.Close())
		cancel()
		done.Wait()
	})
	return near, far
}
