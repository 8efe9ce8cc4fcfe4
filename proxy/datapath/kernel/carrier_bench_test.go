//go:build linux

package kernel

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// peerEnv makes this test binary the far ends of the carrier benchmark, so that
// the benchmark's own CPU time is that of the middle alone.
const peerEnv = "PENSTOCK_BENCH_PEER"

func TestMain(m *testing.M) {
	if os.Getenv(peerEnv) != "" {
		if err := peer(); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(1)
		}
		return
	}
	need.ResolveLoopbackName()
	os.Exit(m.Run())
}

// peer prints where it listens as a sink, reads from standard input where to
// send and how fast, and does both until its input ends.
func peer() error {
	ln, err := net.Listen("tcp", loopback4)
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				buf := make([]byte, 1<<20)
				for {
					if _, err := c.Read(buf); err != nil {
						return
					}
				}
			}()
		}
	}()
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var addr string
		var rate uint64
		if _, err := fmt.Sscan(in.Text(), &addr, &rate); err != nil {
			return err
		}
		c, err := net.Dial("tcp", addr)
		if err != nil {
			return err
		}
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			return err
		}
		err = datapath.Control(raw, func(fd int) error {
			return unix.SetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, uint64(pacingOption(cc.Rate(rate))))
		})
		if err != nil {
			return err
		}
		go func() {
			buf := make([]byte, 1<<20)
			for {
				if _, err := c.Write(buf); err != nil {
					return
				}
			}
		}()
	}
	return in.Err()
}

// startPeer returns the sink's address and a call that has the peer send somewhere.
func startPeer(b *testing.B) (sink string, sendTo func(addr string, rate cc.Rate)) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), peerEnv+"=1")
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(b, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, cmd.Start())
	b.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(b, err)
	return strings.TrimSpace(line), func(addr string, rate cc.Rate) {
		_, err := fmt.Fprintln(stdin, addr, int64(rate))
		require.NoError(b, err)
	}
}

// BenchmarkCarrier forwards over loopback between two legs whose far ends are
// in another process, 1 MiB an iteration.
func BenchmarkCarrier(b *testing.B) {
	type way struct {
		name    string
		carrier func(out, in *Conn) datapath.Carrier // nil: io.Copy
		observe bool                                 // the tick polls the sending leg
		grant   int
		rate    cc.Rate // of the sender; 0: what it can
	}
	copied := func(out, in *Conn) datapath.Carrier { return datapath.NewCopy(out, in, &datapath.Buffers{}) }
	spliced := func(out, in *Conn) datapath.Carrier { return out.CarryFrom(in, &datapath.Buffers{}) }
	for _, w := range []way{
		{"io.Copy", nil, false, 0, 0},
		{"copy", copied, false, datapath.LargeBuffer, 0},
		{"splice", spliced, false, 1 << 20, 0},
		{"copy/polled", copied, true, datapath.LargeBuffer, 0},
		{"splice/polled", spliced, true, 1 << 20, 0},
		{"copy/polled/grants of 64 KiB", copied, true, 64 << 10, 0},
		{"splice/polled/grants of 64 KiB", spliced, true, 64 << 10, 0},
		{"1 Gbit/s/io.Copy", nil, false, 0, 1e9},
		{"1 Gbit/s/copy/polled", copied, true, datapath.LargeBuffer, 1e9},
		{"1 Gbit/s/splice/polled", spliced, true, 1 << 20, 1e9},
		{"1 Gbit/s/copy/polled/grants of 64 KiB", copied, true, 64 << 10, 1e9},
		{"1 Gbit/s/splice/polled/grants of 64 KiB", spliced, true, 64 << 10, 1e9},
	} {
		b.Run(w.name, func(b *testing.B) {
			d := start(b, Config{})
			sink, sendTo := startPeer(b)
			ln, err := Listen(b.Context(), loopback4, false)
			require.NoError(b, err)
			defer ln.Close() //nolint:errcheck // it only listened
			sendTo(ln.Addr().String(), w.rate)
			tcp, err := ln.AcceptTCP()
			require.NoError(b, err)
			in, err := d.adoptConn(tcp, d.loops.Least(), false)
			require.NoError(b, err)
			defer in.Close() //nolint:errcheck // the peer goes on sending
			out, err := d.Dial(b.Context(), DialConfig{Host: sink})
			require.NoError(b, err)
			defer out.Close() //nolint:errcheck // the sink only reads

			if w.observe {
				out.manage(flow.Limit{Cwnd: cc.MaxCwnd}, func(flow.Report) {})
			}
			total := int64(b.N) << 20
			before := need.CPU(b)
			b.ResetTimer()
			if w.carrier == nil {
				_, err = io.CopyN(out, in, total)
			} else {
				err = move(w.carrier(out, in), total, w.grant)
			}
			b.StopTimer()
			require.NoError(b, err)
			b.ReportMetric(float64(total)*8/1e9/b.Elapsed().Seconds(), "Gbit/s")
			b.ReportMetric((need.CPU(b)-before).Seconds()/(float64(total)/1e9), "cpu-s/GB")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func move(c datapath.Carrier, total int64, grant int) error {
	defer c.Release()
	for total > 0 {
		if _, err := c.Fill(1 << 20); err != nil {
			return err
		}
		for c.Buffered() > 0 {
			n, err := c.Drain(grant)
			if err != nil {
				return err
			}
			total -= int64(n)
		}
	}
	return nil
}
