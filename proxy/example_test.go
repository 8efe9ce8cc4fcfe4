package proxy_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// A proxy in front of one server, from start to shutdown. A client that connects to its listener reaches
// the server, under the algorithm cubic.
func ExampleOpen() {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.Close()
	go func() {
		if conn, err := server.Accept(); err == nil {
			_, _ = io.WriteString(conn, "hello from the server")
			_ = conn.Close()
		}
	}()

	cfg := config.Default()
	cfg.Defaults.Algorithm = "cubic"
	cfg.Listeners = []access.Listener{{
		Name: "lan", Mode: "forward", Address: "127.0.0.1:0", Target: server.Addr().String(),
	}}
	start := time.Now()
	clock := func() cc.Time { return cc.Time(time.Since(start)) + 1 }
	ctx, shutDown := context.WithCancel(context.Background())
	defer shutDown()
	p, err := proxy.Open(ctx, cfg, nil, &flow.Manager{}, clock, slog.New(slog.DiscardHandler))
	if err != nil {
		fmt.Println(err)
		return
	}
	served := make(chan error)
	go func() { served <- p.Serve(ctx) }()

	client, err := net.Dial("tcp", p.Addrs()["lan"].String())
	if err != nil {
		fmt.Println(err)
		return
	}
	text, err := io.ReadAll(client)
	fmt.Println(string(text), err)
	_ = client.Close()

	shutDown() // connections may go on for cfg.Shutdown.Drain
	fmt.Println(<-served, p.Close())
	for _, route := range p.Counters().Routes {
		fmt.Println("bytes to clients:", route.Down.Written)
	}
	// Output:
	// hello from the server <nil>
	// <nil> <nil>
	// bytes to clients: 21B
}

// Parts replace the kernel, so that a test needs no socket and no clock: the leg that Dial returns and the way in that
// Open returns are in memory.
func ExampleNew() {
	cfg := config.Default()
	cfg.Listeners = []access.Listener{{Name: "lan", Mode: "forward", Address: ":7000", Target: "192.0.2.1:80"}}
	s, err := proxy.New(cfg, proxy.Parts{
		Clock: func() cc.Time { return 1 },
		Flows: &flow.Manager{},
		Open:  func(proxy.ListenerConfig) (proxy.Listener, error) { return newFakeListener(), nil },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	cfg.Defaults.Algorithm = "vegas"
	cfg.Mark = 7 // cannot change while running
	_, err = s.Reload(cfg)
	fmt.Println(err)
	cfg.Mark = s.Config().Mark
	done, err := s.Reload(cfg)
	fmt.Printf("%+v %v\n", done, err)
	// Output:
	// mark: cannot change while running; put the old value back, or restart the proxy
	// {Opened:0 Closing:0 Moved:0 Kept:0 Refused:0 Revoked:0} <nil>
}
