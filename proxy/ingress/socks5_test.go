package ingress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

const (
	hello    = "\x05\x01\x00"             // no authentication
	accepted = "\x05\x00"                 //
	connect4 = "\x05\x01\x00\x01"         // CONNECT, IPv4
	someone  = "\xc0\x00\x02\x50\x01\xbb" // 192.0.2.80:443
)

func failed(code byte) string {
	return string([]byte{5, code, 0, 1, 0, 0, 0, 0, 0, 0})
}

func TestSOCKS5Handshake(t *testing.T) {
	for _, row := range []handshake{
		{name: "IPv4", says: hello + connect4 + someone, hears: accepted, target: "192.0.2.80:443"},
		{
			name: "IPv6", says: hello + "\x05\x01\x00\x04\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x50",
			hears: accepted, target: "[2001:db8::1]:80",
		},
		{
			name: "IPv4 mapped into IPv6 is IPv4", says: hello + "\x05\x01\x00\x04" + strings.Repeat("\x00",
				10) + "\xff\xff\x7f\x00\x00\x01\x00\x50",
			hears: accepted, target: "127.0.0.1:80",
		},
		{
			name: "name", says: hello + "\x05\x01\x00\x03\x0borigin.test\x1f\x90", hears: accepted,
			host: "origin.test:8080",
		},
		{
			name: "address as a name", says: hello + "\x05\x01\x00\x03\x09127.0.0.1\x00\x50", hears: accepted,
			target: "127.0.0.1:80",
		},
		{
			name: "address as a name in brackets", says: hello + "\x05\x01\x00\x03\x0b[fd91:2::2]\x00\x50", hears: accepted,
			target: "[fd91:2::2]:80",
		},
		{
			name: "longest name", says: hello + "\x05\x01\x00\x03\xff" + strings.Repeat("a", 255) + "\x00\x50",
			hears: accepted, host: strings.Repeat("a", 255) + ":80",
		},
		{
			name: "one of many methods", says: "\x05\x03\x02\x01\x00" + connect4 + someone, hears: accepted,
			target: "192.0.2.80:443",
		},
		{
			name: "all methods", says: "\x05\xff" + strings.Repeat("\x00", 255) + connect4 + someone, hears: accepted,
			target: "192.0.2.80:443",
		},
		{
			name: "early data", says: hello + connect4 + someone + "GET / HTTP/1.0\r\n", hears: accepted,
			target: "192.0.2.80:443", early: "GET / HTTP/1.0\r\n",
		},
		{
			name: "more early data than fits our buffer", says: hello + connect4 + someone + strings.Repeat("e",
				10_000),
			hears: accepted, target: "192.0.2.80:443", early: strings.Repeat("e", 10_000),
		},

		{name: "nothing", err: "EOF"},
		{name: "SOCKS4", says: "\x04\x01\x00\x50\x7f\x00\x00\x01\x00", err: "version 4 is not 5"},
		{name: "HTTP", says: "GET / HTTP/1.1\r\n\r\n", err: "version 71 is not 5"},
		{name: "no method", says: "\x05\x00", hears: "\x05\xff", err: "does not offer method 0"},
		{name: "only methods we lack", says: "\x05\x02\x01\x02", hears: "\x05\xff", err: "does not offer method 0"},
		{name: "gone within the methods", says: "\x05\x05\x00", err: "EOF"},
		{name: "gone after the methods", says: hello, hears: accepted, err: "EOF"},
		{name: "gone within the request", says: hello + "\x05\x01", hears: accepted, err: "EOF"},
		{name: "gone within the address", says: hello + connect4 + "\x7f\x00", hears: accepted, err: "EOF"},
		{name: "gone within the name", says: hello + "\x05\x01\x00\x03\x0borigin", hears: accepted, err: "EOF"},
		{name: "gone before the port", says: hello + connect4 + "\x7f\x00\x00\x01\x00", hears: accepted, err: "EOF"},
		{
			name: "request of another version", says: hello + "\x04\x01\x00\x01" + someone, hears: accepted + failed(1),
			err: "request of version 4",
		},
		{name: "BIND", says: hello + "\x05\x02\x00\x01" + someone, hears: accepted + failed(7), err: "command 2"},
		{
			name: "UDP ASSOCIATE", says: hello + "\x05\x03\x00\x01" + someone, hears: accepted + failed(7),
			err: "command 3",
		},
		{
			name: "unknown address type", says: hello + "\x05\x01\x00\x02" + someone, hears: accepted + failed(8),
			err: "address type 2",
		},
		{
			name: "port 0", says: hello + connect4 + "\x7f\x00\x00\x01\x00\x00", hears: accepted + failed(1),
			err: "not in 1..65535",
		},
		{
			name: "empty name", says: hello + "\x05\x01\x00\x03\x00\x00\x50", hears: accepted + failed(1),
			err: "host name of 0 bytes",
		},
		{
			name: "name with a zero byte", says: hello + "\x05\x01\x00\x03\x03a\x00b\x00\x50",
			hears: accepted + failed(1), err: "no host name has",
		},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, Config{Mode: access.SOCKS5}) })
	}
}

func TestSOCKS5Password(t *testing.T) {
	const offer, chosen = "\x05\x02\x00\x02", "\x05\x02"
	cfg := Config{Mode: access.SOCKS5, Auth: []User{{"alice", "secret"}, {"bob", "hunter2"}}}
	for _, row := range []handshake{
		{
			name: "first user", says: offer + "\x01\x05alice\x06secret" + connect4 + someone, hears: chosen + "\x01\x00",
			target: "192.0.2.80:443",
		},
		{
			name: "second user, pipelined", says: offer + "\x01\x03bob\x07hunter2" + connect4 + someone + "x",
			hears: chosen + "\x01\x00", target: "192.0.2.80:443", early: "x",
		},
		{
			name: "another's password", says: offer + "\x01\x03bob\x06secret", hears: chosen + "\x01\x01",
			err: "wrong password",
		},
		{
			name: "password cut short", says: offer + "\x01\x05alice\x05secre", hears: chosen + "\x01\x01",
			err: "wrong password",
		},
		{
			name: "unknown user", says: offer + "\x01\x05mallo\x06secret", hears: chosen + "\x01\x01",
			err: "unknown name",
		},
		{
			name: "empty name and password", says: offer + "\x01\x00\x00", hears: chosen + "\x01\x01",
			err: "unknown name",
		},
		{
			name: "unknown version", says: offer + "\x05\x05alice\x06secret", hears: chosen + "\x01\x01",
			err: "password version 5",
		},
		{name: "password not offered", says: hello, hears: "\x05\xff", err: "does not offer method 2"},
		{name: "gone within the name", says: offer + "\x01\x05al", hears: chosen, err: "EOF"},
		{name: "gone within the password", says: offer + "\x01\x05alice\x06se", hears: chosen, err: "EOF"},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, cfg) })
	}
}

func TestSOCKS5AnswerSaysWhereTheProxyStands(t *testing.T) {
	for bound, want := range map[string]string{
		"192.0.2.1:4000":          "\x05\x00\x00\x01\xc0\x00\x02\x01\x0f\xa0",
		"[::ffff:192.0.2.1]:4000": "\x05\x00\x00\x01\xc0\x00\x02\x01\x0f\xa0",
		"[2001:db8::2]:4000":      "\x05\x00\x00\x04\x20\x01\x0d\xb8" + strings.Repeat("\x00", 11) + "\x02\x0f\xa0",
	} {
		conn := newFakeConn(hello + connect4 + someone)
		c, err := testListener(t, Config{Mode: access.SOCKS5}).Greet(t.Context(), conn)
		require.NoError(t, err)
		require.NoError(t, c.Answer(netip.MustParseAddrPort(bound), nil))
		assert.Equal(t, accepted+want, conn.heard())
		closed, _ := conn.isClosed()
		assert.False(t, closed)
	}
}

// dialErrors are what a dial returns, with the answers of both protocols.
var dialErrors = []struct {
	name   string
	err    error
	socks  byte
	status string
}{
	{"refused", dialError(syscall.ECONNREFUSED), 5, "502 Bad Gateway"},
	{"no route to the host", dialError(syscall.EHOSTUNREACH), 4, "502 Bad Gateway"},
	{"no route to the network", dialError(syscall.ENETUNREACH), 3, "502 Bad Gateway"},
	{"timed out in the kernel", dialError(syscall.ETIMEDOUT), 6, "504 Gateway Timeout"},
	{"timed out in the proxy", fmt.Errorf("dial: %w", context.DeadlineExceeded), 6, "504 Gateway Timeout"},
	{"timed out in the resolver", &net.DNSError{Err: "i/o timeout", IsTimeout: true}, 6, "504 Gateway Timeout"},
	{
		"no such name", &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", IsNotFound: true}}, 4,
		"502 Bad Gateway",
	},
	{"denied by policy", fmt.Errorf("rule 3: %w", ErrNotAllowed), 2, "403 Forbidden"},
	{"denied by the firewall", dialError(syscall.EACCES), 2, "403 Forbidden"},
	{"no descriptor left", dialError(syscall.EMFILE), 1, "503 Service Unavailable"},
	{"no local port left", fmt.Errorf("dial: %w", kernel.ErrNoPort), 1, "503 Service Unavailable"},
	{"anything else", fmt.Errorf("odd"), 1, "502 Bad Gateway"},
}

func dialError(errno syscall.Errno) error {
	return &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", errno)}
}

func TestSOCKS5AnswerSaysWhyTheDialFailed(t *testing.T) {
	for _, row := range dialErrors {
		t.Run(row.name, func(t *testing.T) {
			conn := newFakeConn(hello + connect4 + someone)
			c, err := testListener(t, Config{Mode: access.SOCKS5}).Greet(t.Context(), conn)
			require.NoError(t, err)
			require.NoError(t, c.Answer(netip.AddrPort{}, row.err))
			assert.Equal(t, accepted+failed(row.socks), conn.heard())
			closed, reset := conn.isClosed()
			assert.True(t, closed)
			assert.False(t, reset, "an orderly end, so that the answer arrives")
		})
	}
}
