package agent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// decider has an agent decide for flows that report with each acknowledgement.
type decider struct {
	began time.Time
	link  *Link
	flows []cc.Algorithm
	woken []chan struct{}
}

func (d *decider) now() cc.Time { return cc.Time(time.Second + time.Since(d.began)) }

func (d *decider) state() cc.State {
	return cc.State{Now: d.now(), MSS: 1448, SRTT: time.Second, MinRTT: time.Second}
}

// echoEnv makes the test binary an agent: a process that answers each report at once.
const echoEnv = "PENSTOCK_AGENT_ECHO"

func TestMain(m *testing.M) {
	if path := os.Getenv(echoEnv); path != "" {
		fmt.Fprintln(os.Stderr, echo(path))
		os.Exit(1)
	}
	need.ResolveLoopbackName()
	os.Exit(m.Run())
}

// BenchmarkDecision is how long it takes from a report until the window is in force that
// an agent in another process answers with: the median and the 95th percentile, for one
// flow after the other out of so many; and what it takes of our own processor time.
//
//	go test -run '^$' -bench Decision ./proxy/agent
func BenchmarkDecision(b *testing.B) {
	for _, flows := range []int{1, 64, 1000} {
		b.Run(fmt.Sprintf("%d-flows", flows), func(b *testing.B) {
			d := decide(b, flows)
			took := make([]time.Duration, 0, 1<<16)
			used := need.CPU(b)
			for i := 0; b.Loop(); i++ {
				began, before := time.Now(), d.report(i%flows)
				d.await(i%flows, before)
				took = append(took, time.Since(began))
			}
			b.ReportMetric(float64(need.CPU(b)-used)/1e3/float64(len(took)), "own-cpu-µs/op")
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2])/1e3, "p50-µs")
			b.ReportMetric(float64(took[len(took)*95/100])/1e3, "p95-µs")
		})
	}
}

// BenchmarkDecisions has several flows report at once, as a tick of the kernel's legs has them: as
// many as an agent's socket has room for (net.unix.max_dgram_qlen).
func BenchmarkDecisions(b *testing.B) {
	const flows = 8
	d := decide(b, flows)
	var before [flows]cc.Bytes
	used, n := need.CPU(b), 0
	for b.Loop() {
		for i := range flows {
			before[i] = d.report(i)
		}
		for i := range flows {
			d.await(i, before[i])
		}
		n += flows
	}
	b.ReportMetric(float64(need.CPU(b)-used)/1e3/float64(n), "own-cpu-µs/decision")
}

// BenchmarkCrowd has so many flows report at the same time, ten times a second: what part of the
// reports finds no room, and how long decisions take.
func BenchmarkCrowd(b *testing.B) {
	for _, flows := range []int{16, 64, 1000} {
		b.Run(fmt.Sprintf("%d-flows", flows), func(b *testing.B) {
			d := decide(b, flows)
			used := need.CPU(b)
			turn := time.NewTicker(100 * time.Millisecond)
			defer turn.Stop()
			for b.Loop() {
				for i := range d.flows {
					d.report(i)
				}
				<-turn.C
			}
			info := d.link.Info()
			b.ReportMetric(float64(need.CPU(b)-used)/1e3/float64(info.Reports), "own-cpu-µs/report")
			b.ReportMetric(100*float64(info.Dropped)/float64(info.Reports+info.Dropped), "no-room-%")
			b.ReportMetric(float64(info.Decisions)/float64(b.N*flows), "decisions/ack")
			b.ReportMetric(1e3*within(info.Took, 0.5), "p50-ms")
			b.ReportMetric(1e3*within(info.Took, 0.95), "p95-ms")
		})
	}
}

// within is the bound, in seconds, below which a part of the durations lies; 0: there is none.
func within(h datapath.Histogram, part float64) float64 {
	seen := uint64(0)
	for i, bound := range h.Bounds {
		if seen += h.Counts[i]; float64(seen) >= part*float64(h.Count()) {
			return bound
		}
	}
	return 0
}

// report has a flow hear of an acknowledgement, and returns its window before the answer.
func (d *decider) report(i int) cc.Bytes {
	before := d.flows[i].Control().Cwnd
	d.flows[i].OnAck(cc.Ack{State: d.state(), Acked: 1448, RTT: time.Second, DeliveryRate: 1e6})
	return before
}

// await waits until the window is another.
func (d *decider) await(i int, before cc.Bytes) {
	for d.flows[i].Control().Cwnd == before {
		<-d.woken[i]
		d.flows[i].OnTick(d.state())
	}
}

func decide(b *testing.B, flows int) *decider {
	path := filepath.Join(b.TempDir(), "agent")
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), echoEnv+"="+path), os.Stderr
	require.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	d := &decider{began: time.Now()}
	link, err := Start(Config{Name: "x", Socket: path, Clock: d.now})
	require.NoError(b, err)
	d.link = link
	b.Cleanup(func() { _ = link.Close() })
	require.Eventually(b, func() bool { return link.Info().Up }, patience, time.Millisecond)
	spec := link.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(b, err)
	for range flows {
		woken := make(chan struct{}, 1)
		d.woken = append(d.woken, woken)
		f := spec.New(cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params, Wake: func(cc.Time) {
			select {
			case woken <- struct{}{}:
			default:
			}
		}})
		d.flows = append(d.flows, f)
		b.Cleanup(func() { cc.Close(f) })
		for f.OnTick(d.state()); f.Control().Phase != "agent"; f.OnTick(d.state()) {
			<-woken
		}
	}
	return d
}

// echo serves at a path: the window goes up and down by a segment with each report.
func echo(path string) error {
	code, err := ccp.Compile(text)
	if err != nil {
		return err
	}
	sock, err := listenAt(path)
	if err != nil {
		return err
	}
	buf := make([]byte, 2*ccp.MaxToAgent)
	cwnd := uint64(14480)
	for {
		n, from, err := sock.ReadFromUnix(buf)
		if err != nil {
			return err
		}
		m, _, err := ccp.Next(buf[:n])
		if err != nil {
			return err
		}
		var answer []byte
		switch m.Kind {
		case ccp.KindReady:
			answer = code.Install(1).Append(nil)
		case ccp.KindCreate:
			answer = ccp.Change{Flow: m.Flow, Program: 1}.Append(nil)
		case ccp.KindMeasure:
			cwnd++
			set := []ccp.Update{{Register: code.Registers["Cwnd"], Value: cwnd}}
			answer = ccp.Change{Flow: m.Flow, Updates: set}.Append(nil)
		default:
			continue
		}
		_, _ = sock.WriteToUnix(answer, from) // it may be gone
	}
}
