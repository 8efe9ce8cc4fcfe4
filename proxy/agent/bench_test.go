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
)

// decider has an agent decide for flows that report with each acknowledgement.
type decider struct {
	began time.Time
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
	os.Exit(m.Run())
}

// BenchmarkDecision is how long it takes from a report until the window is in force that
// an agent in another process answers with: the median and the 95th percentile, for one
// flow after the other out of so many.
//
//	go test -run '^$' -bench Decision ./proxy/agent
func BenchmarkDecision(b *testing.B) {
	for _, flows := range []int{1, 64, 1000} {
		b.Run(fmt.Sprintf("%d-flows", flows), func(b *testing.B) { benchDecision(b, flows) })
	}
}

func benchDecision(b *testing.B, flows int) {
	path := filepath.Join(b.TempDir(), "agent")
	cmd := exec.Command(os.Args[0])
	cmd.Env, cmd.Stderr = append(os.Environ(), echoEnv+"="+path), os.Stderr
	require.NoError(b, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	d := &decider{began: time.Now()}
	link, err := Start(Config{Name: "x", Socket: path, Clock: d.now})
	require.NoError(b, err)
	defer link.Close()
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
		defer cc.Close(f)
		f.OnTick(d.state())
		<-woken
		f.OnTick(d.state())
		require.Equal(b, "agent", f.Control().Phase)
	}
	took := make([]time.Duration, 0, 1<<16)
	for i := 0; b.Loop(); i++ {
		f, woken := d.flows[i%flows], d.woken[i%flows]
		before, began := f.Control().Cwnd, time.Now()
		f.OnAck(cc.Ack{State: d.state(), Acked: 1448, RTT: time.Second, DeliveryRate: 1e6})
		for f.Control().Cwnd == before {
			<-woken
			f.OnTick(d.state())
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*95/100])/1e3, "p95-µs")
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
