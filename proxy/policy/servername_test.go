package policy_test

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/cryptobyte"

	"github.com/penstock-net/penstock/proxy/policy"
)

// hello is what crypto/tls sends first.
func hello(tb testing.TB, cfg *tls.Config) []byte {
	tb.Helper()
	client, server := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- tls.Client(client, cfg).Handshake() }()
	head := make([]byte, 5)
	_, err := io.ReadFull(server, head)
	require.NoError(tb, err)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, err = io.ReadFull(server, body)
	require.NoError(tb, err)
	require.NoError(tb, server.Close())
	require.Error(tb, <-done, "nobody answers")
	require.NoError(tb, client.Close())
	return append(head, body...)
}

// named is a ClientHello for a host.
func named(tb testing.TB, host string) []byte {
	return hello(tb, &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12})
}

// fragmented cuts the one record of a ClientHello into records of n bytes.
func fragmented(record []byte, n int) []byte {
	var out []byte
	for body := record[5:]; len(body) > 0; {
		m := min(n, len(body))
		out = append(append(out, record[0], record[1], record[2], byte(m>>8), byte(m)), body[:m]...)
		body = body[m:]
	}
	return out
}

// echConfigs is a list of one configuration for Encrypted Client Hello (RFC 9849 §4).
func echConfigs(tb testing.TB, public string) []byte {
	tb.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	require.NoError(tb, err)
	var b cryptobyte.Builder
	b.AddUint16LengthPrefixed(func(list *cryptobyte.Builder) {
		list.AddUint16(0xfe0d)
		list.AddUint16LengthPrefixed(func(c *cryptobyte.Builder) {
			c.AddUint8(7)       // id
			c.AddUint16(0x0020) // DHKEM(X25519, HKDF-SHA256)
			c.AddUint16LengthPrefixed(func(k *cryptobyte.Builder) { k.AddBytes(key.PublicKey().Bytes()) })
			// HKDF-SHA256, AES-128-GCM
			c.AddUint16LengthPrefixed(func(s *cryptobyte.Builder) { s.AddUint16(1); s.AddUint16(1) })
			c.AddUint8(0)
			c.AddUint8LengthPrefixed(func(n *cryptobyte.Builder) { n.AddBytes([]byte(public)) })
			c.AddUint16(0) // no extensions
		})
	})
	return b.BytesOrPanic()
}

// crafted is a ClientHello record with the given extensions, or with none at all.
func crafted(extensions ...func(*cryptobyte.Builder)) []byte {
	var b cryptobyte.Builder
	b.AddBytes([]byte{22, 3, 1})
	b.AddUint16LengthPrefixed(func(r *cryptobyte.Builder) {
		r.AddUint8(1)
		r.AddUint24LengthPrefixed(func(h *cryptobyte.Builder) {
			h.AddUint16(0x0303)
			h.AddBytes(make([]byte, 32))
			h.AddUint8(0)
			h.AddUint16LengthPrefixed(func(c *cryptobyte.Builder) { c.AddUint16(0x1301) })
			h.AddUint8LengthPrefixed(func(c *cryptobyte.Builder) { c.AddUint8(0) })
			if extensions == nil {
				return
			}
			h.AddUint16LengthPrefixed(func(list *cryptobyte.Builder) {
				for _, e := range extensions {
					e(list)
				}
			})
		})
	})
	return b.BytesOrPanic()
}

// sni is a server_name extension with names of type host_name.
func sni(names ...string) func(*cryptobyte.Builder) {
	return func(b *cryptobyte.Builder) {
		b.AddUint16(0)
		b.AddUint16LengthPrefixed(func(d *cryptobyte.Builder) {
			d.AddUint16LengthPrefixed(func(l *cryptobyte.Builder) {
				for _, n := range names {
					l.AddUint8(0)
					l.AddUint16LengthPrefixed(func(e *cryptobyte.Builder) { e.AddBytes([]byte(n)) })
				}
			})
		})
	}
}

// flipped is b with another byte at i.
func flipped(b []byte, i int, to byte) []byte {
	out := append([]byte(nil), b...)
	out[i] = to
	return out
}

func TestTheServerNameOfAClientHello(t *testing.T) {
	for _, row := range []struct {
		name, want string
		hello      []byte
	}{
		{"of TLS 1.0", "example.com", hello(t, &tls.Config{
			ServerName: "example.com", MinVersion: tls.VersionTLS10,
			MaxVersion: tls.VersionTLS10,
		})},
		{"of TLS 1.2", "example.com", hello(t, &tls.Config{ServerName: "example.com", MaxVersion: tls.VersionTLS12})},
		{"of TLS 1.3", "a.example.com", hello(t, &tls.Config{
			ServerName: "a.example.com",
			MinVersion: tls.VersionTLS13,
		})},
		{"with post-quantum key shares and protocols", "example.com", hello(t, &tls.Config{
			ServerName: "example.com", NextProtos: []string{
				"h2",
				"http/1.1",
			}, CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519},
		})},
		{"in capitals", "example.com", named(t, "Example.COM")},
		{"without a name", "", hello(t, &tls.Config{InsecureSkipVerify: true})},
		{"of an address, which has no name", "", named(t, "192.0.2.1")},
		{"with a port, which nginx takes off", "example.com", crafted(sni("example.com:443"))},
		{"encrypted, of which the outer name shows", "provider.example", hello(t, &tls.Config{
			ServerName: "secret.example", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfigs(t,
				"provider.example"),
		})},
		{"with a final dot", "example.com", crafted(sni("example.com."))},
		{"without extensions", "", crafted()},
		{
			"with another extension before", "example.com",
			crafted(func(b *cryptobyte.Builder) { b.AddUint16(0x0a0a); b.AddUint16(0) }, sni("example.com")),
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			name, more := policy.ServerName(row.hello)
			assert.Equal(t, row.want, name)
			assert.False(t, more)
			for i := range row.hello {
				name, more := policy.ServerName(row.hello[:i])
				require.True(t, more, "of %d bytes the first %d", len(row.hello), i)
				require.Empty(t, name)
			}
			for _, n := range []int{1, 2, 3, 5, 100, len(row.hello) - 6} {
				cut := fragmented(row.hello, n)
				name, more := policy.ServerName(append(cut, "what follows"...))
				require.Equal(t, row.want, name, "in records of %d bytes", n)
				require.False(t, more)
				for i := range cut {
					_, more := policy.ServerName(cut[:i])
					require.True(t, more, "in records of %d bytes the first %d", n, i)
				}
			}
		})
	}
}

func TestWhatIsNoClientHelloWithAName(t *testing.T) {
	good := named(t, "example.com")
	junk := func(b *cryptobyte.Builder) { b.AddUint16(0xff); b.AddUint16(9) }
	big := flipped(flipped(good[:9], 6, 1), 3, 1)
	for _, row := range []struct {
		name string
		sent []byte
	}{
		{"another record type", flipped(good, 0, 23)},
		{"SSL 2", []byte{0x80, 0x2e, 1, 0, 2}},
		{"a major version that is none", flipped(good, 1, 16)},
		{"a record that is too long", []byte{22, 3, 1, 0x40, 1}},
		{"another handshake message", flipped(good, 5, 2)},
		{"a message longer than is looked at", big},
		{"a message shorter than its record", flipped(good, 8, good[8]-1)},
		{"an alert in the midst of it", append(fragmented(good, 50)[:55], 21, 3, 1, 0, 2, 2)},
		{"an alert that is too long", []byte{21, 3, 1, 0, 3}},
		{"extensions that end early", crafted(junk)},
		{"two extensions of the kind", crafted(sni("a.example"), sni("b.example"))},
		{"two names", crafted(sni("a.example", "b.example"))},
		{"no names", crafted(sni())},
		{"an empty name", crafted(sni(""))},
		{"a name with a zero byte", crafted(sni("example.com\x00.evil.example"))},
		{"a name with a space", crafted(sni("exa mple.com"))},
		{"a name outside ASCII", crafted(sni("b\u00fccher.example"))},
		{"a name that is ASCII once in lower case", crafted(sni("\u212aexample.com"))},
		{"an IPv4 address", crafted(sni("192.0.2.1"))},
		{"an IPv6 address", crafted(sni("2001:db8::1"))},
		{"an empty label", crafted(sni("a..example"))},
		{"a label of 64 bytes", crafted(sni(strings.Repeat("a", 64) + ".example"))},
		{"a name of 254 bytes", crafted(sni(strings.Repeat("a.", 123) + "examples"))},
	} {
		t.Run(row.name, func(t *testing.T) {
			name, more := policy.ServerName(row.sent)
			assert.Empty(t, name)
			assert.False(t, more)
		})
	}
}

func TestAClientHelloMayHaveEmptyRecordsAndWarnings(t *testing.T) {
	good := named(t, "example.com")
	empty := []byte{22, 3, 1, 0, 0, 21, 3, 1, 0, 2, 1, 90}
	sent := append(append(append(slices.Clone(empty), empty...), fragmented(good, 100)[:105]...), empty...)
	sent = append(sent, fragmented(good, 100)[105:]...)
	for i := range sent {
		_, more := policy.ServerName(sent[:i])
		require.True(t, more, "the first %d bytes", i)
	}
	name, more := policy.ServerName(sent)
	assert.Equal(t, "example.com", name)
	assert.False(t, more)
}

// Whichever byte of a ClientHello is another, there is a name of a host, more
// to come, or nothing.
func TestADamagedClientHelloIsHarmless(t *testing.T) {
	good := named(t, "example.com")
	for i := range good {
		for _, to := range []byte{0, 1, 0x7f, 0xff, good[i] + 1, good[i] - 1} {
			checkServerName(t, flipped(good, i, to), i+1)
		}
	}
}

func TestTheHostOfARequest(t *testing.T) {
	for _, row := range []struct{ name, sent, want string }{
		{"in its header", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{
			"with a port", "GET / HTTP/1.1\r\nUser-Agent: x\r\nhost:Example.COM:8080\r\nAccept: */*\r\n\r\n",
			"example.com",
		},
		{"with a final dot", "GET / HTTP/1.0\r\nHost: example.com.:80\r\n\r\n", "example.com"},
		{
			"in an absolute URI, which goes first", "GET http://a.example:81/x HTTP/1.1\r\nHost: b.example\r\n\r\n",
			"a.example",
		},
		{"of a CONNECT", "CONNECT a.example:443 HTTP/1.1\r\nHost: b.example\r\n\r\n", "a.example"},
		{"of a method with a hyphen", "M-SEARCH * HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"with bare line ends", "GET / HTTP/1.1\nHost: example.com\n\n", "example.com"},
		{"before a body", "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 4\r\n\r\nbody", "example.com"},
		{"that is missing", "GET / HTTP/1.0\r\n\r\n", ""},
		{"that is empty", "GET / HTTP/1.1\r\nHost:\r\n\r\n", ""},
		{"given twice", "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n", ""},
		{"that is an IPv4 address", "GET / HTTP/1.1\r\nHost: 192.0.2.1:80\r\n\r\n", ""},
		{"that is an IPv6 address", "GET / HTTP/1.1\r\nHost: [2001:db8::1]\r\n\r\n", ""},
		{"that is an IPv6 address with a port", "GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n", ""},
		{"that is no name", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", ""},
		{"behind a line that is no field", "GET / HTTP/1.1\r\nno header\r\nHost: example.com\r\n\r\n", "example.com"},
		{"behind a name that no field has", "GET / HTTP/1.1\r\nX(: y\r\nHost: example.com\r\n\r\n", "example.com"},
		{"behind an empty line", "\r\nGET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"behind empty lines of any kind", "\n\r\r\n\nGET / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"of a method with an underscore", "GET_IT / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"of a method in lowercase", "get / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"of a method of any letters", "!#$%&'*+.^`|~0 / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"of a long method", strings.Repeat("A", 1000) + " / HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"between more blanks", "GET   /  HTTP/1.1 \r\nHost:  \texample.com \t\r\n\r\n", "example.com"},
		{"of another minor version", "GET / HTTP/1.10\r\nHost: example.com\r\n\r\n", "example.com"},
		{"with a path that is none", "GET /%zz HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"with a URL as the query", "GET /?http://a.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com"},
		{"of a URL with a password", "GET HTTP://a:b@a.example?x HTTP/1.1\r\nHost: b.example\r\n\r\n", "a.example"},
		{"on the next line", "GET / HTTP/1.1\r\nHost:\r\n example.com\r\nX: y\r\n z\r\n\r\n", "example.com"},
		{"that goes on in the next line", "GET / HTTP/1.1\r\nHost: example.com\r\n .evil\r\n\r\n", ""},
		{"behind two returns", "GET / HTTP/1.1\r\nHost: example.com\r\r\n\r\r\n", "example.com"},
	} {
		t.Run(row.name, func(t *testing.T) {
			name, more := policy.ServerName([]byte(row.sent))
			assert.Equal(t, row.want, name)
			assert.False(t, more)
			for i := range len(strings.TrimSuffix(row.sent, "body")) {
				_, more := policy.ServerName([]byte(row.sent[:i]))
				require.True(t, more, "after %q", row.sent[:i])
			}
		})
	}
}

// Protocols in which the client speaks first are told at their first bytes.
func TestWhatIsNeitherTLSNorHTTP(t *testing.T) {
	for name, sent := range map[string]string{
		"SSH":                    "SSH-2.0-x\r\n",
		"a quotation":            "\"",
		"a blank":                " GET",
		"words":                  "hello\r\n",
		"HTTP/2 without TLS":     "PRI * HTTP/2.0\r\n",
		"a line without an end":  "GET\n",
		"a line of another kind": "EHLO client.example\r\n",
		"binary":                 "\x00\x00\x00\x08",
		"binary behind a word":   "GET \x01",
		"a return within":        "GET /\rx",
	} {
		t.Run(name, func(t *testing.T) {
			found, more := policy.ServerName([]byte(sent))
			assert.Empty(t, found)
			assert.False(t, more)
		})
	}
}

func TestNoMoreThan16KiBAreLookedAt(t *testing.T) {
	long := "GET / HTTP/1.1\r\nCookie: " + strings.Repeat("x", policy.MaxFirstBytes)
	_, more := policy.ServerName([]byte(long[:policy.MaxFirstBytes-1]))
	assert.True(t, more)
	name, more := policy.ServerName([]byte(long + "\r\nHost: example.com\r\n\r\n"))
	assert.False(t, more)
	assert.Empty(t, name)
}

func TestNamePatterns(t *testing.T) {
	for _, row := range []struct {
		pattern string
		matches []string
		not     []string
	}{
		{"example.com", []string{"example.com"}, []string{"", "a.example.com", "badexample.com", "example.co"}},
		{"Example.COM.", []string{"example.com"}, nil},
		{
			"*.video.example",
			[]string{"a.video.example", "a.b.video.example"},
			[]string{"", "video.example", "badvideo.example", ".video.example.com"},
		},
		{"*.example", []string{"video.example"}, []string{"example"}},
		{"_service.example", []string{"_service.example"}, nil},
	} {
		t.Run(row.pattern, func(t *testing.T) {
			pattern, err := policy.ParseNamePattern(row.pattern)
			require.NoError(t, err)
			again, err := policy.ParseNamePattern(pattern.String())
			require.NoError(t, err)
			assert.Equal(t, pattern, again)
			p, err := policy.New([]policy.Rule{{
				Name:  "named",
				Match: policy.Match{ServerNames: []policy.NamePattern{pattern}},
			}}, policy.Rule{})
			require.NoError(t, err)
			for _, name := range row.matches {
				assert.Equal(t, "named", p.Decide(policy.Facts{ServerName: name}).Rule, name)
			}
			for _, name := range row.not {
				assert.Empty(t, p.Decide(policy.Facts{ServerName: name}).Rule, name)
			}
		})
	}
}

func TestBadNamePatternsNameTheCure(t *testing.T) {
	for pattern, says := range map[string]string{
		"":                         "leave server_name out",
		"*":                        "leave server_name out",
		"*.":                       "leave server_name out",
		"a*.example":               `only in front: "*.example.com"`,
		"*.*.example":              `only in front: "*.example.com"`,
		".example.com":             `write "*.example.com"`,
		"https://example.com/path": "write the name alone: example.com",
		"http://example.com:8080":  "write example.com here, and 8080 under ports",
		"example.com:443":          "write example.com here, and 443 under ports",
		"192.0.2.1":                "write 192.0.2.1 under destination",
		"192.0.2.1:443":            "write 192.0.2.1 under destination",
		"[2001:db8::1]":            "write 2001:db8::1 under destination",
		"[2001:db8::1]:443":        "write 2001:db8::1 under destination",
		"b\u00fccher.example":      "xn--",
		"two words":                "write example.com",
		"-a.example":               "write example.com",
	} {
		t.Run(pattern, func(t *testing.T) {
			_, err := policy.ParseNamePattern(pattern)
			require.Error(t, err)
			assert.ErrorContains(t, err, says)
		})
	}
	_, err := policy.New([]policy.Rule{{Name: "a", Match: policy.Match{ServerNames: make([]policy.NamePattern, 1)}}},
		policy.Rule{})
	assert.ErrorContains(t, err, "server name")
}

// checkServerName holds for whatever was sent: a name is one that a rule can
// have, and once there is an answer more bytes do not change it.
func checkServerName(tb testing.TB, sent []byte, cut int) {
	tb.Helper()
	name, more := policy.ServerName(sent)
	early, wanted := policy.ServerName(sent[:min(cut, len(sent))])
	var errs error
	if name != "" {
		pattern, err := policy.ParseNamePattern(name)
		if errs = err; err == nil && pattern.String() != name {
			errs = errors.New("a name that is not in its plain form")
		}
	}
	switch {
	case errs != nil:
	case name != "" && more:
		errs = errors.New("a name, and more wanted")
	case more && len(sent) >= policy.MaxFirstBytes:
		errs = errors.New("more wanted than is looked at")
	case !wanted && (early != name || more):
		errs = errors.New("the answer to the beginning was another one")
	}
	require.NoError(tb, errs, "%q of %q, cut at %d", name, sent, cut)
}

func FuzzServerName(f *testing.F) {
	f.Add(named(f, "example.com"), 100)
	f.Add(fragmented(named(f, "example.com"), 7), 20)
	f.Add(crafted(sni("example.com.")), 60)
	f.Add([]byte("GET http://a.example:81/x HTTP/1.1\r\nHost: b.example\r\n\r\n"), 30)
	f.Fuzz(func(t *testing.T, sent []byte, cut int) { checkServerName(t, sent, max(0, cut)) })
}
