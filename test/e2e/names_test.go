//go:build linux

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/penstock-net/penstock/internal/need"
)

// serveNames has the server answer queries for addresses of these names. It never answers for a family that a name has
// no address of.
func (s *scene) serveNames(names map[string][]netip.Addr) {
	dns := listenUDP(s.t, s.Server, netip.AddrPortFrom(s.ServerAddr.V4, 53))
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := dns.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) == 0 {
				continue
			}
			q := m.Questions[0]
			m.Response, m.Additionals = true, nil
			for _, addr := range names[q.Name.String()] {
				header := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 1}
				switch {
				case q.Type == dnsmessage.TypeA && addr.Is4():
					m.Answers = append(m.Answers, dnsmessage.Resource{
						Header: header, Body: &dnsmessage.AResource{A: addr.As4()},
					})
				case q.Type == dnsmessage.TypeAAAA && addr.Is6():
					m.Answers = append(m.Answers, dnsmessage.Resource{
						Header: header, Body: &dnsmessage.AAAAResource{AAAA: addr.As16()},
					})
				}
			}
			if b, err := m.Pack(); err == nil && len(m.Answers) > 0 {
				_, _ = dns.WriteToUDPAddrPort(b, from)
			}
		}
	}()
}

// asksServer runs what follows it with the scene's server as its name server.
func (s *scene) asksServer() []string {
	path := filepath.Join(s.t.TempDir(), "resolv.conf")
	require.NoError(s.t, os.WriteFile(path, fmt.Appendf(nil, "nameserver %v\n", s.ServerAddr.V4), 0o644)) //nolint:gosec
	s.cloneflags = syscall.CLONE_NEWNS
	return []string{
		"sh", "-c", `mount --make-rprivate / && mount --bind "$0" /etc/resolv.conf && exec "$@"`, path,
	}
}

func TestNamesWithSilentFamiliesAndDeadAddressesAreReached(t *testing.T) {
	needsPrivilege(t)
	s := newScene(t)
	var dead []netip.Addr
	for a := s.ServerAddr.V4; len(dead) < 6; {
		a = a.Next()
		dead = append(dead, a)
	}
	s.serveNames(map[string][]netip.Addr{
		"v4.test.": {s.ServerAddr.V4}, "v6.test.": {s.ServerAddr.V6}, "both.test.": {s.ServerAddr.V4, s.ServerAddr.V6},
		"many.test.": append(dead, s.ServerAddr.V4), "broken6.test.": {dead[0], s.ServerAddr.V6},
	})
	need.Serve(t, s.listen(netip.MustParseAddrPort("[::]:8080")), func(c net.Conn) {
		_, _ = io.WriteString(c, c.RemoteAddr().String())
	})
	s.start("listeners:\n  - {name: ask, mode: connect, address: \"[::]:7000\"}\n"+
		"  - {name: fixed, mode: forward, address: \"[::]:7001\", target: \"v4.test:8080\"}\n"+
		"telemetry: {address: \""+telemetryAddr+"\"}\nlimits: {dial_timeout: 10s}\nlog: {level: debug}\n",
		s.asksServer()...)
	for _, row := range []struct {
		name   string
		within time.Duration
	}{
		{"both", time.Second},
		{"v4", time.Second}, // it takes 50 ms
		{"v6", time.Second},
		{"broken6", 2 * time.Second},
		{"many", 5 * time.Second}, // 1.5 s
	} {
		t.Run(row.name, func(t *testing.T) {
			began := time.Now()
			conn, err := dialEdge(s, netip.AddrPort{})
			require.NoError(t, err)
			defer conn.Close()
			require.NoError(t, conn.SetDeadline(began.Add(patience)))
			_, err = fmt.Fprintf(conn, "CONNECT %s.test:8080 HTTP/1.1\r\n\r\n", row.name)
			require.NoError(t, err)
			resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, http.StatusOK, resp.StatusCode, "%s", s.proxy.said)
			assert.Less(t, time.Since(began), row.within)
		})
	}
	began := time.Now()
	conn, err := dialSecond(s, netip.AddrPort{})
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(began.Add(patience)))
	said, err := io.ReadAll(conn)
	require.NoError(t, err)
	assert.Contains(t, string(said), s.EdgeFar.V4.String())
	assert.Less(t, time.Since(began), time.Second)
}
