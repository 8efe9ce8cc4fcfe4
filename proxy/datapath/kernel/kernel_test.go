//go:build linux

package kernel

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
)

// clock starts above zero, as cc.Time wants.
func clock() func() cc.Time {
	start := time.Now()
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// start returns a datapath that ends with the test.
func start(t testing.TB, cfg Config) *Datapath {
	t.Helper()
	cfg.Clock = clock()
	d, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// pair returns a dialled and an accepted leg on loopback, closed with the test.
func (d *Datapath) pair(t testing.TB, addr string) (dialled, accepted *Conn) {
	t.Helper()
	ln, err := d.Listen(t.Context(), "tcp", addr, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	type dial struct {
		conn *Conn
		err  error
	}
	dials := make(chan dial, 1)
	go func() {
		c, err := d.Dial(context.Background(), DialConfig{Host: ln.Addr().String(), Timeout: 10 * time.Second})
		dials <- dial{c, err}
	}()
	tcp, err := ln.AcceptTCP()
	require.NoError(t, err)
	accepted, err = d.Wrap(tcp)
	require.NoError(t, err)
	got := <-dials
	require.NoError(t, got.err)
	t.Cleanup(func() { _, _ = got.conn.Close(), accepted.Close() })
	return got.conn, accepted
}

const (
	loopback4 = "127.0.0.1:0"
	loopback6 = "[::1]:0"
)

func needsIPv6(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp6", loopback6)
	if err != nil {
		t.Skipf("no IPv6 loopback here: %v", err)
	}
	require.NoError(t, ln.Close())
}

func TestConformance(t *testing.T) {
	for name, addr := range map[string]string{"IPv4": loopback4, "IPv6": loopback6} {
		t.Run(name, func(t *testing.T) {
			if addr == loopback6 {
				needsIPv6(t)
			}
			datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
				return start(t, Config{}).pair(t, addr)
			})
		})
	}
}
