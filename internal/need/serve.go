package need

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Echo sends back what comes to a socket until the test ends, and closes it then. It
// returns the socket's address.
func Echo(tb testing.TB, c net.PacketConn) *net.UDPAddr {
	tb.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from) // who does not get it asks again
		}
	}()
	tb.Cleanup(func() {
		_ = c.Close()
		<-done
	})
	return c.LocalAddr().(*net.UDPAddr)
}

// Serve has handle serve each connection to a listener, and closes the connection then, until
// the test ends and the listener is closed.
func Serve(tb testing.TB, ln net.Listener, handle func(net.Conn)) {
	tb.Helper()
	tb.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
}

// Copy returns what has Serve copy between each connection and one to a server, as the
// plainest of proxies does.
func Copy(server string) func(net.Conn) {
	return func(client net.Conn) {
		far, err := net.Dial("tcp", server)
		if err != nil {
			return
		}
		defer far.Close()
		up := make(chan struct{})
		go func() {
			defer close(up)
			_, _ = io.Copy(far, client)
			_ = far.Close()
		}()
		_, _ = io.Copy(client, far)
		_ = client.Close()
		<-up
	}
}

// Silent is the address of a TCP server that does not answer, since its queue has no room, until the test ends.
func Silent(tb testing.TB) *net.TCPAddr {
	tb.Helper()
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = ln.Close() })
	raw, err := ln.SyscallConn()
	require.NoError(tb, err)
	var failed error
	require.NoError(tb, raw.Control(func(fd uintptr) { failed = unix.Listen(int(fd), 0) }))
	require.NoError(tb, failed)
	at := ln.Addr().(*net.TCPAddr)
	waits, err := net.DialTCP("tcp4", nil, at)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = waits.Close() })
	return at
}
