package need

import (
	"net"
	"testing"
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
