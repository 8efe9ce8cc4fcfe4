package greeting

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
)

// outcome is what comes of a greeting, and what the server is sent of it.
type outcome struct {
	said   string // to the client
	result string // of the machine; empty: it wants more
	rest   string // was not consumed
}

// feed is a machine's Feed. After an error the rest does not count.
type feed func(b []byte) (n int, said []byte, result string, err error)

// play feeds data in pieces of that many bytes, as a connection would bring them. No machine may leave more unconsumed
// than held bytes.
func play(t *testing.T, f feed, data []byte, piece, held int) (o outcome) {
	t.Helper()
	var in []byte
	for {
		k := min(piece, len(data))
		in, data = append(in, data[:k]...), data[k:]
		for {
			n, said, result, err := f(in)
			if n < 0 || n > len(in) {
				t.Fatalf("%d of %d bytes are consumed", n, len(in))
			}
			in = in[n:]
			o.said += string(said)
			switch {
			case err != nil:
				o.result = "error: " + err.Error()
				return o
			case result != "":
				o.result, o.rest = result, string(in)+string(data)
				return o
			}
			if n == 0 {
				break
			}
		}
		if k == 0 {
			o.rest = string(in)
			return o
		}
		if len(in) > held {
			t.Fatalf("%d bytes are held", len(in))
		}
	}
}

// comparePieces holds that it makes no difference in which pieces bytes come. fresh returns a new machine.
func comparePieces(t *testing.T, fresh func() feed, data []byte, held int) {
	t.Helper()
	whole := play(t, fresh(), data, max(1, len(data)), max(held, len(data)))
	for _, piece := range []int{1, 3, 100} {
		if got := play(t, fresh(), data, piece, held+piece); got != whole {
			t.Fatalf("pieces of %d: %+v, as a whole: %+v", piece, got, whole)
		}
	}
}

func FuzzSOCKS5(f *testing.F) {
	f.Add([]byte("\x05\x01\x00\x05\x01\x00\x01\xc0\x00\x02\x50\x01\xbbearly"), false)
	f.Add([]byte("\x05\x02\x00\x02\x01\x05alice\x06secret\x05\x01\x00\x03\x04a.bc\x00\x50"), true)
	f.Add([]byte("\x05\x01\x00\x05\x02\x00\x04"+
		"\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x50"), false)
	f.Fuzz(func(t *testing.T, data []byte, needsPassword bool) {
		comparePieces(t, func() feed {
			s := &SOCKS5{NeedsPassword: needsPassword}
			return func(b []byte) (n int, said []byte, result string, err error) {
				n, said, next, err := s.Feed(b)
				switch {
				case err == nil && next == CheckUser && s.Name != s.Password:
					said = append(said, s.AllowUser()...)
				case err == nil && next == CheckUser:
					said, err = append(said, s.DenyUser()...), errors.New("denied")
				case next == Done:
					result = fmt.Sprintf("%s %d for %q %q", s.Host, s.Port, s.Name, s.Password)
				}
				return n, said, result, err
			}
		}, data, 513)
	})
}

func FuzzHTTPHead(f *testing.F) {
	f.Add([]byte("\r\n\nGET / HTTP/1.1\r\na: b\n\r\nbody"))
	f.Add(append([]byte("GET / HTTP/1.1\r\n"), bytes.Repeat([]byte("a: b\r\n"), 3000)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		comparePieces(t, func() feed {
			var h HTTPHead
			return func(b []byte) (int, []byte, string, error) {
				head, n, err := h.Feed(b)
				if n > 0 && (len(head) == 0 || len(head) > n || head[0] == '\n' ||
					!bytes.HasSuffix(head, []byte("\n"))) {
					t.Fatalf("head %q of %q", head, b[:n])
				}
				return n, nil, string(head), err
			}
		}, data, MaxHTTPHead)
	})
}

func FuzzProxyHeader(f *testing.F) {
	f.Add([]byte("PROXY TCP4 203.0.113.5 192.0.2.80 1234 443\r\nearly"))
	f.Add([]byte("PROXY UNKNOWN whatever\r\n"))
	f.Add([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0e\xcb\x00\x71\x05\xc0\x00\x02\x50\x04\xd2\x01\xbb\x00\x00early"))
	f.Fuzz(func(t *testing.T, data []byte) {
		comparePieces(t, func() feed {
			var h ProxyHeader
			return func(b []byte) (n int, said []byte, result string, err error) {
				n, done, err := h.Feed(b)
				if done {
					result = fmt.Sprint(h.Source, " to ", h.Destination)
				}
				if h.Source.Addr().Is4In6() || h.Source.Addr().Zone() != "" {
					t.Fatalf("source %v would slip past a prefix", h.Source)
				}
				return n, nil, result, err
			}
		}, data, 107)
	})
}
