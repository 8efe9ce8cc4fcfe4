package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/alcc"
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/native"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// nativeBuffer is how much is written or read at once, in bytes.
const nativeBuffer = 64 << 10

func nativeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "native",
		Short: "Send in bulk by an algorithm, with no proxy",
		Long: `Native senders and their receivers are processes of their own, so that the processor
time of an algorithm over TCP can be compared with that of the same one over UDP.
Recipes start them (native: true, over: own-acks).

--over says what carries the data, and is the same at both ends:
  udp       packets of the size of a TCP segment, an acknowledgement for each
  tcp       package alcc over the kernel's TCP and its signals
  own-acks  package alcc at both ends, with acknowledgements of its own

From time to time both print how many bytes there were, and how many of them were
sent once more; over TCP the kernel does that, which is not counted.`,
		Example: `  penstock-lab native receive --listen 127.0.0.1:9100
  penstock-lab native send 127.0.0.1:9100 --algorithm copa:delta=0.02

  penstock-lab native receive --listen 127.0.0.1:9100 --over own-acks
  penstock-lab native send 127.0.0.1:9100 --over own-acks --algorithm verus --every 100ms`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	cmd.AddCommand(nativeSendCommand(), nativeReceiveCommand())
	return cmd
}

// transfer is the command line of one end.
type transfer struct {
	over  string
	every time.Duration

	bytes, again atomic.Int64
}

func (f *transfer) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.over, "over", stage.OverUDP, strings.Join(stage.Overs, ", "))
	flags.DurationVar(&f.every, "every", time.Second, "how often to print what there was")
}

// check returns what is wrong with the command line.
func (f *transfer) check() error {
	if !slices.Contains(stage.Overs, f.over) {
		return cli.BadInput(fmt.Errorf("--over %q: must be one of %s", f.over, strings.Join(stage.Overs, ", ")))
	}
	if f.every < time.Millisecond {
		return cli.BadInput(fmt.Errorf("--every is %v, but must be at least 1ms", f.every))
	}
	return nil
}

// report prints the counts until ctx ends.
func (f *transfer) report(ctx context.Context, out io.Writer) {
	tick := time.Tick(f.every)
	for {
		select {
		case <-tick:
			fmt.Fprintf(out, stage.NativeLine, f.bytes.Load(), f.again.Load())
		case <-ctx.Done():
			return
		}
	}
}

// run prints the first line, then counts, while work sends or receives. It returns the error of work, nil where the
// user has ended it.
func (f *transfer) run(cmd *cobra.Command, first string, work func(ctx context.Context) error) error {
	ctx, stop := interruptible(cmd)
	defer stop()
	fmt.Fprintln(cmd.OutOrStdout(), first)
	go f.report(ctx, cmd.OutOrStdout())
	if err := work(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}

func nativeSendCommand() *cobra.Command {
	var f transfer
	var algorithm string
	cmd := &cobra.Command{
		Use:     "send HOST:PORT",
		Short:   "Send to a receiver without end",
		Example: "  penstock-lab native send 127.0.0.1:9100 --algorithm copa:delta=0.02",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			to, err := netip.ParseAddrPort(args[0])
			if err != nil {
				return cli.BadInput(fmt.Errorf("%q is no address and port, such as 127.0.0.1:9100", args[0]))
			}
			name, params, err := cc.Parse(algorithm)
			if err != nil {
				return cli.BadInput(fmt.Errorf("--algorithm: %w", err))
			}
			send := func(ctx context.Context) error { return f.sendTCP(ctx, to, algorithm) }
			if f.over == stage.OverUDP {
				s, err := native.Open(to, name, params)
				if err != nil {
					return err
				}
				send = func(ctx context.Context) error {
					return s.Run(ctx, func(all, again cc.Bytes) {
						f.bytes.Store(int64(all))
						f.again.Store(int64(again))
					})
				}
			}
			return f.run(cmd, fmt.Sprintf("sending to %v by %s over %s", to, algorithm, f.over), send)
		},
	}
	f.register(cmd)
	cmd.Flags().StringVarP(&algorithm, "algorithm", "a", cc.Default, "what decides how much is in flight")
	return cmd
}

// sendTCP sends over package alcc.
func (f *transfer) sendTCP(ctx context.Context, to netip.AddrPort, algorithm string) error {
	d := alcc.Dialer{Options: alcc.Options{Algorithm: algorithm, OwnAcks: f.over == stage.OverOwnAcks}}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	if stats, ok := alcc.StatsOf(conn); ok && stats.Tier == alcc.TierNone && algorithm != "none" {
		return fmt.Errorf("the algorithm cannot be put on a connection here: %s", strings.Join(stats.Missing, ", "))
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	for buf := make([]byte, nativeBuffer); ; {
		n, err := conn.Write(buf)
		f.bytes.Add(int64(n))
		if err != nil {
			return err
		}
	}
}

func nativeReceiveCommand() *cobra.Command {
	var f transfer
	var listen string
	cmd := &cobra.Command{
		Use:     "receive",
		Short:   "Acknowledge what a native sender sends, and count it",
		Example: "  penstock-lab native receive --listen 127.0.0.1:9100 --over own-acks",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			var closer io.Closer
			var address net.Addr
			receive := func() error { return nil }
			if f.over == stage.OverUDP {
				conn, err := net.ListenPacket("udp", listen)
				if err != nil {
					return cli.BadInput(fmt.Errorf("--listen: %w", err))
				}
				closer, address = conn, conn.LocalAddr()
				receive = func() error { return native.Receive(conn, func(n cc.Bytes) { f.bytes.Add(int64(n)) }) }
			} else {
				ln, err := net.Listen("tcp", listen)
				if err != nil {
					return cli.BadInput(fmt.Errorf("--listen: %w", err))
				}
				closer, address = ln, ln.Addr()
				receive = func() error { return f.receiveTCP(ln) }
			}
			return f.run(cmd, fmt.Sprintf("listening on %v over %s", address, f.over), func(ctx context.Context) error {
				defer context.AfterFunc(ctx, func() { _ = closer.Close() })()
				return errors.Join(receive(), closer.Close())
			})
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:9100", "`ADDRESS` and port")
	return cmd
}

// receiveTCP reads from one connection after the other.
func (f *transfer) receiveTCP(ln net.Listener) error {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		if f.over == stage.OverOwnAcks {
			if conn, err = alcc.Wrap(conn, alcc.Options{Algorithm: "none", OwnAcks: true}); err != nil {
				return err
			}
		}
		_, _ = io.Copy(f, conn) // how a sender ends does not matter
		_ = conn.Close()
	}
}

// Write counts what was received.
func (f *transfer) Write(b []byte) (int, error) {
	f.bytes.Add(int64(len(b)))
	return len(b), nil
}
