//go:build linux

package kernel_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// monotonic is a clock for kernel.Config. It starts above zero.
func monotonic() func() cc.Time {
	start := time.Now()
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// greet accepts legs on a port of loopback, says hello on each and reads it to its end.
func greet(d *kernel.Datapath) (*kernel.Listener, error) {
	tcp, err := kernel.Listen(context.Background(), "127.0.0.1:0", false)
	if err != nil {
		return nil, err
	}
	ln, err := d.Listener(tcp)
	if err != nil {
		return nil, err
	}
	go ln.Serve( //nolint:errcheck // it ends with Close
		func(leg datapath.Conn) { // on a loop, where it must not wait
			go func() {
				_, _ = io.WriteString(leg, "hello")
				_ = leg.CloseWrite()
				_, _ = io.Copy(io.Discard, leg)
				_ = leg.Close()
			}()
		},
		func(error) (pause time.Duration) { return time.Second },
	)
	return ln, nil
}

// A datapath accepts legs and dials them. They are net.Conns.
func ExampleNew() {
	d, err := kernel.New(kernel.Config{Clock: monotonic(), Envelope: "reno"}) // reno needs no privilege
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close() //nolint:errcheck // the example ends
	ln, err := greet(d)
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // the example ends

	leg, err := d.Dial(context.Background(), kernel.DialConfig{Host: ln.Addr().String(), Timeout: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer leg.Close() //nolint:errcheck // the example ends
	heard, err := io.ReadAll(leg)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", heard)
	// Output: hello
}

// A leg reports what becomes of its bytes, and keeps to the limits that are applied to it.
func ExampleDatapath_Dial() {
	d, err := kernel.New(kernel.Config{Clock: monotonic(), Envelope: "reno"})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close() //nolint:errcheck // the example ends
	ln, err := greet(d)
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close() //nolint:errcheck // the example ends
	leg, err := d.Dial(context.Background(), kernel.DialConfig{Host: ln.Addr().String(), Timeout: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer leg.Close() //nolint:errcheck // the example ends

	// With the envelope "ebpf" Enforce returns HoldAll. Here it returns 0: the caller enforces window and rate, as
	// flow.Take does, and writes no more than they allow.
	if leg.Enforce(datapath.HoldAll, 0) == 0 {
		fmt.Println("the caller enforces the window")
	}
	const total = 100_000
	arrived := make(chan flow.Report, 1)
	leg.Observe(func(r flow.Report) { // with a lock held; it may call Apply
		if r.Acked == total {
			select {
			case arrived <- r:
			default:
			}
		}
	})
	leg.Apply(flow.Limit{Cwnd: 200_000, PacingRate: 80_000_000}) // bytes; bits per second
	if _, err := leg.Write(make([]byte, total)); err != nil {
		log.Fatal(err)
	}
	r := <-arrived
	fmt.Println(r.Written, "written,", r.Acked, "acknowledged,", r.Pipe, "in flight")
	// Output:
	// the caller enforces the window
	// 100000B written, 100000B acknowledged, 0B in flight
}
