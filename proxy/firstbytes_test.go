package proxy_test

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// forever is a wait that no test outlives: what comes sooner did not wait for it.
const forever = time.Hour

func serverNames(t *testing.T, list ...string) []policy.NamePattern {
	t.Helper()
	out := make([]policy.NamePattern, len(list))
	for i, s := range list {
		p, err := policy.ParseNamePattern(s)
		require.NoError(t, err)
		out[i] = p
	}
	return out
}

// byName has a rule for video, one against ads and one for the rest, in front of
// which a name is waited for.
func byName(t *testing.T, change func(*config.Config)) func(*config.Config) {
	return func(cfg *config.Config) {
		cfg.Listeners[0].Allow = nil
		cfg.Limits.ServerNameWait = forever
		cfg.Rules = []policy.RuleSettings{
			{Name: "video", Match: policy.Match{ServerNames: serverNames(t, "video.example", "*.video.example")}},
			{Name: "ads", Match: policy.Match{ServerNames: serverNames(t, "*.ads.example")}, Refuse: "no ads"},
			{Name: "rest"},
		}
		cfg.Rules[0].Algorithm, cfg.Rules[2].Algorithm = "copa", "none"
		if change != nil {
			change(cfg)
		}
	}
}

// clientHello is what a TLS client sends first.
func clientHello(t *testing.T, name string) string {
	t.Helper()
	client, server := net.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- tls.Client(client, &tls.Config{ServerName: name, MinVersion: tls.VersionTLS13}).Handshake()
	}()
	head := make([]byte, 5)
	_, err := io.ReadFull(server, head)
	require.NoError(t, err)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, err = io.ReadFull(server, body)
	require.NoError(t, err)
	require.NoError(t, server.Close())
	require.Error(t, <-done)
	require.NoError(t, client.Close())
	return string(head) + string(body)
}

// relayed is the one connection once it is.
func (r *rig) relayed() proxy.FlowInfo {
	r.tb.Helper()
	var flows []proxy.FlowInfo
	require.Eventually(r.tb, func() bool {
		flows = flowsOf(r.proxy)
		return len(flows) == 1 && flows[0].Relayed()
	}, patience, time.Millisecond)
	return flows[0]
}

func TestRulesByServerName(t *testing.T) {
	request := "GET / HTTP/1.1\r\nHost: cdn.video.example:8080\r\n\r\n"
	hello := clientHello(t, "Cdn.Video.example")
	big := "POST / HTTP/1.1\r\nHost: video.example\r\nContent-Length: 1000000\r\n\r\n" + string(random(9, 1_000_000))
	for _, row := range []struct {
		name, sent string
		server     string
		rule       string
	}{
		{"TLS", hello + "more", "cdn.video.example", "video"},
		{"TLS for another name", clientHello(t, "example.com"), "example.com", "rest"},
		{"TLS without a name", clientHello(t, "192.0.2.1"), "", "rest"},
		{"HTTP", request, "cdn.video.example", "video"},
		{"HTTP with a long body", big, "video.example", "video"},
		{"SSH", "SSH-2.0-client\r\n", "", "rest"},
		{"a header that is too long", "GET / HTTP/1.1\r\nX: " + strings.Repeat("x",
			20_000) + "\r\nHost: video.example\r\n\r\n", "", "rest"},
	} {
		for kind, pair := range map[string]func(*rig, string) (net.Conn, *net.TCPConn){
			"at once":              (*rig).sendAtOnce,
			"behind a CONNECT":     (*rig).sendAsEarlyData,
			"half of it with that": (*rig).sendHalfAsEarlyData,
		} {
			t.Run(row.name+" "+kind, func(t *testing.T) {
				change := byName(t, nil)
				if kind != "at once" {
					change = asking(byName(t, func(cfg *config.Config) { cfg.Listeners[0].Allow = loopbackAllowed }))
				}
				r := newRig(t, change)
				client, server := pair(r, row.sent)
				got := make([]byte, len(row.sent))
				_, err := io.ReadFull(server, got)
				require.NoError(t, err)
				assert.True(t, row.sent == string(got), "the first bytes arrive as they were sent")
				flow := r.relayed()
				assert.Equal(t, row.rule, flow.Rule)
				assert.Equal(t, row.server, flow.ServerName)
				assert.Equal(t, row.rule == "video", flow.Up.Algorithm != "none")
				send(t, client, "the rest")
				require.NoError(t, client.(*net.TCPConn).CloseWrite())
				assert.Equal(t, "the rest", receive(t, server))
			})
		}
	}
}

func (r *rig) sendAtOnce(s string) (net.Conn, *net.TCPConn) {
	client, server := r.pair()
	go func() { _, _ = io.WriteString(client, s) }()
	return client, server
}

func (r *rig) sendAsEarlyData(s string) (net.Conn, *net.TCPConn) { return r.sendEarly(s, len(s)) }

func (r *rig) sendHalfAsEarlyData(s string) (net.Conn, *net.TCPConn) { return r.sendEarly(s, len(s)/2) }

// sendEarly sends n bytes of s with the CONNECT and the others behind its answer.
func (r *rig) sendEarly(s string, n int) (net.Conn, *net.TCPConn) {
	r.tb.Helper()
	n = min(n, 2000) // more might not be taken before the answer
	client, _, status := r.ask(r.backend.Addr().String(), s[:n])
	require.Equal(r.tb, http.StatusOK, status)
	go func() { _, _ = io.WriteString(client, s[n:]) }()
	require.NoError(r.tb, r.backend.SetDeadline(time.Now().Add(patience)))
	server, err := r.backend.AcceptTCP()
	require.NoError(r.tb, err)
	require.NoError(r.tb, server.SetDeadline(time.Now().Add(patience)))
	r.tb.Cleanup(func() { _ = server.Close() })
	return client, server
}

// However the bytes are cut, the answer is the same.
func TestAServerNameInSmallSegments(t *testing.T) {
	r := newRig(t, byName(t, nil))
	client, server := r.pair()
	hello := clientHello(t, "video.example")
	for i := range len(hello) {
		send(t, client, hello[i:i+1])
	}
	got := make([]byte, len(hello))
	_, err := io.ReadFull(server, got)
	require.NoError(t, err)
	assert.Equal(t, hello, string(got))
	assert.Equal(t, "video", r.relayed().Rule)
}

func TestAServerThatSpeaksFirstIsNotKeptWaiting(t *testing.T) {
	for name, said := range map[string]string{"to a silent client": "", "to a client that is not finished": "GET"} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, byName(t, nil))
			client, server := r.pair()
			send(t, client, said)
			send(t, server, "220 welcome\r\n")
			banner := make([]byte, len("220 welcome\r\n"))
			_, err := io.ReadFull(client, banner)
			require.NoError(t, err)
			assert.Equal(t, "220 welcome\r\n", string(banner))
			assert.Equal(t, "rest", r.relayed().Rule)
			send(t, client, "EHLO\r\n")
			require.NoError(t, client.CloseWrite())
			assert.Equal(t, said+"EHLO\r\n", receive(t, server))
		})
	}
}

func TestWithoutANameInTimeTheNextRuleDecides(t *testing.T) {
	for name, said := range map[string]string{"one byte of TLS": "\x16", "one byte of HTTP": "G", "nothing": ""} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, byName(t, func(cfg *config.Config) { cfg.Limits.ServerNameWait = 20 * time.Millisecond }))
			client, server := r.pair()
			send(t, client, said)
			got := make([]byte, len(said))
			_, err := io.ReadFull(server, got)
			require.NoError(t, err)
			assert.Equal(t, said, string(got))
			assert.Equal(t, "rest", r.relayed().Rule)
			// No deadline is left behind on either leg.
			send(t, client, "more")
			require.NoError(t, client.CloseWrite())
			assert.Equal(t, "more", receive(t, server))
			send(t, server, "answer")
			require.NoError(t, server.CloseWrite())
			assert.Equal(t, "answer", receive(t, client))
		})
	}
}

func TestAClientThatClosesEndsTheWait(t *testing.T) {
	for name, said := range map[string]string{
		"silently": "", "after one byte": "G",
		"after a whole name": "GET / HTTP/1.1\r\nHost: video.example\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			client, server := newRig(t, byName(t, nil)).pair()
			send(t, client, said)
			require.NoError(t, client.CloseWrite())
			assert.Equal(t, said, receive(t, server))
			send(t, server, "answer")
			require.NoError(t, server.Close())
			assert.Equal(t, "answer", receive(t, client))
		})
	}
}

// announced has every server told of its client, which happens when the dial is
// back and before the client's first bytes are awaited.
func announced(cfg *config.Config) { cfg.Defaults.SendProxy = "v1" }

// waiting is a pair of which the proxy has dialled its end; it is announced.
func (r *rig) waiting() (client, server *net.TCPConn) {
	r.tb.Helper()
	client, server = r.pair()
	for b := make([]byte, 1); b[0] != '\n'; {
		_, err := io.ReadFull(server, b)
		require.NoError(r.tb, err)
	}
	return client, server
}

func TestAResetEndsTheWaitAndIsPassedOn(t *testing.T) {
	for _, from := range []string{"client", "server"} {
		t.Run("from the "+from, func(t *testing.T) {
			r := newRig(t, byName(t, announced))
			sender, receiver := r.waiting()
			if from == "server" {
				sender, receiver = receiver, sender
			}
			require.NoError(t, sender.SetLinger(0))
			require.NoError(t, sender.Close())
			_, err := receiver.Read(make([]byte, 1))
			require.ErrorIs(t, err, syscall.ECONNRESET)
			require.NoError(t, r.stop())
			assert.Contains(t, r.logs.String(), "closed_by="+from+" reason=reset")
		})
	}
}

func TestAShutdownEndsTheWait(t *testing.T) {
	r := newRig(t, byName(t, announced))
	client, server := r.waiting()
	require.NoError(t, r.stop())
	for _, conn := range []net.Conn{client, server} {
		_, err := conn.Read(make([]byte, 1))
		assert.ErrorIs(t, err, syscall.ECONNRESET)
	}
}

func TestAServerNameThatIsRefused(t *testing.T) {
	r := newRig(t, byName(t, nil))
	client, server := r.pair()
	send(t, client, clientHello(t, "x.ads.example"))
	for who, conn := range map[string]net.Conn{"client": client, "server": server} {
		n, err := conn.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET, who)
		assert.Zero(t, n, who)
	}
	require.Eventually(t, r.rejected(proxy.RejectedRule), patience, time.Millisecond)
	require.NoError(t, r.stop())
	assert.Contains(t, r.logs.String(), "rule ads: no ads")
}

// Where all but some names are refused, the refusal waits for the name; where
// no name would help, nothing is dialled.
func TestOnlySomeServerNamesAreAllowed(t *testing.T) {
	only := func(cfg *config.Config) {
		cfg.Rules = []policy.RuleSettings{cfg.Rules[0], {Name: "rest", Refuse: "not listed"}}
	}
	t.Run("one of them", func(t *testing.T) {
		r := newRig(t, byName(t, only))
		client, server := r.pair()
		hello := clientHello(t, "video.example")
		send(t, client, hello)
		require.NoError(t, client.CloseWrite())
		assert.Equal(t, hello, receive(t, server))
	})
	t.Run("another", func(t *testing.T) {
		r := newRig(t, byName(t, only))
		client, server := r.pair()
		send(t, client, clientHello(t, "other.example"))
		_, err := server.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.Eventually(t, r.rejected(proxy.RejectedRule), patience, time.Millisecond)
	})
	t.Run("none at all", func(t *testing.T) {
		r := newRig(t, byName(t, func(cfg *config.Config) {
			only(cfg)
			cfg.Rules[0].Refuse = "neither"
		}))
		refused(t, r.addr())
		require.Eventually(t, r.rejected(proxy.RejectedRule), patience, time.Millisecond)
	})
}

// A header that does not depend on the name is there before the client speaks,
// for a server that waits for it; another is there before the first byte.
func TestThePROXYHeaderAndTheServerName(t *testing.T) {
	read := func(t *testing.T, server net.Conn, want string) {
		t.Helper()
		got := make([]byte, len(want))
		_, err := io.ReadFull(server, got)
		require.NoError(t, err)
		assert.Equal(t, want, string(got))
	}
	t.Run("whatever the name", func(t *testing.T) {
		r := newRig(t, byName(t, func(cfg *config.Config) { cfg.Defaults.SendProxy = "v1" }))
		_, server := r.pair()
		read(t, server, "PROXY TCP4 127.0.0.1")
		assert.Equal(t, proxy.StateDialing, flowsOf(r.proxy)[0].State)
	})
	t.Run("for one name", func(t *testing.T) {
		r := newRig(t, byName(t, func(cfg *config.Config) { cfg.Rules[0].SendProxy = "v1" }))
		client, server := r.pair()
		send(t, client, "GET / HTTP/1.1\r\nHost: video.example\r\n\r\n")
		require.NoError(t, client.CloseWrite())
		header, request, _ := strings.Cut(receive(t, server), "\r\n")
		assert.Equal(t, "PROXY TCP4 127.0.0.1 127.0.0.1", header[:30])
		assert.Equal(t, "GET / HTTP/1.1\r\nHost: video.example\r\n\r\n", request)
	})
}

func TestNobodyWaitsWhereNoRuleNeedsTheName(t *testing.T) {
	r := newRig(t, byName(t, func(cfg *config.Config) {
		cfg.Rules = append([]policy.RuleSettings{{Name: "first", Match: policy.Match{Sources: loopbackAllowed}}}, cfg.Rules...)
	}))
	r.pair()
	flow := r.relayed()
	assert.Equal(t, "first", flow.Rule)
	assert.Empty(t, flow.ServerName)
}

// A request for a whole URL shows its name in whatever form the rest of it has.
func TestTheServerNameOfAURL(t *testing.T) {
	for name, request := range map[string]string{
		"as usual":              "GET http://Loopback.Test:%s/ HTTP/1.1\r\n\r\n",
		"a method in lowercase": "get http://loopback.test:%s/ HTTP/1.1\r\n\r\n",
		"a long header":         "GET http://loopback.test:%s/ HTTP/1.1\r\nX: " + strings.Repeat("x", 16_310) + "\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, asking(byName(t, func(cfg *config.Config) {
				cfg.Listeners[0].Allow = append(slices.Clone(loopbackAllowed),
					netip.MustParsePrefix("::1/128"))
				cfg.Rules[1].Match.ServerNames = serverNames(t, need.LoopbackName)
			})))
			conn, err := net.Dial("tcp", r.addr())
			require.NoError(t, err)
			defer conn.Close() //nolint:errcheck // it is reset
			_, err = fmt.Fprintf(conn, request, port(r.backend.Addr().String()))
			require.NoError(t, err)
			require.Eventually(t, r.rejected(proxy.RejectedRule), patience, time.Millisecond)
		})
	}
}
