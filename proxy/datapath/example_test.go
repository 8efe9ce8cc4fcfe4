package datapath_test

import (
	"fmt"
	"io"
	"net"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// pipeLeg is a leg over net.Pipe: bytes have arrived once Write returns.
type pipeLeg struct {
	net.Conn
	now     cc.Time
	written cc.Bytes // since Observe
	report  func(flow.Report)
}

// Enforce returns 0: a pipe keeps neither a window nor a rate, so the relay does.
func (p *pipeLeg) Enforce(datapath.Hold, int) datapath.Hold { return 0 }

func (p *pipeLeg) Observe(report func(flow.Report)) {
	p.written, p.report = 0, report
	p.sendReport()
}

func (p *pipeLeg) sendReport() {
	if p.report != nil {
		p.report(flow.Report{At: p.now, Written: p.written, Acked: p.written, MSS: 1448})
	}
}

func (p *pipeLeg) Write(b []byte) (int, error) {
	n, err := p.Conn.Write(b)
	p.now, p.written = p.now.Add(time.Millisecond), p.written+cc.Bytes(n)
	p.sendReport()
	return n, err
}

func (p *pipeLeg) Apply(flow.Limit)    {}
func (p *pipeLeg) CloseWrite() error   { return p.Close() }
func (p *pipeLeg) Reset() error        { return p.Close() }
func (p *pipeLeg) Info() datapath.Info { return datapath.Info{Tier: "pipe"} }

func (p *pipeLeg) Undelivered() (cc.Bytes, error) { return 0, nil }
func (p *pipeLeg) Aborted() bool                  { return false }
func (p *pipeLeg) InProcess() bool                { return true }

// A leg is a net.Conn that reports what became of the bytes written to it.
func ExampleConn() {
	here, there := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, there) }()
	var leg datapath.Conn = &pipeLeg{Conn: here}

	if leg.Enforce(datapath.HoldAll, 0)&datapath.HoldWindow == 0 {
		fmt.Println("the relay asks flow.Take before every write")
	}
	leg.Observe(func(r flow.Report) {
		fmt.Printf("at %v: %d of %d bytes have arrived\n", time.Duration(r.At), r.Acked, r.Written)
	})
	_, _ = leg.Write(make([]byte, 3000))
	_ = leg.CloseWrite()
	// Output:
	// the relay asks flow.Take before every write
	// at 0s: 0 of 0 bytes have arrived
	// at 1ms: 3000 of 3000 bytes have arrived
}

// A carrier moves bytes from one connection to another, and lends memory only while bytes are in it.
func ExampleNewCarrier() {
	client, in := net.Pipe()
	out, server := net.Pipe()
	go func() { _, _ = client.Write([]byte("hello")) }()

	carrier := datapath.NewCarrier(out, in, datapath.NewBuffers(1<<20))
	defer carrier.Release()
	n, _ := carrier.Fill(64 << 10)
	received := make(chan []byte)
	go func() {
		b := make([]byte, n)
		_, _ = io.ReadFull(server, b)
		received <- b
	}()
	_, _ = carrier.Drain(n)
	b := <-received
	fmt.Printf("%s, spliced: %v\n", b, carrier.Splicing())
	// Output: hello, spliced: false
}
