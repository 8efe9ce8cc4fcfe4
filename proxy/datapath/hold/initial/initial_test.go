package initial

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/quicvarint"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// recorder is a socket that keeps what is sent, and loses the first of it.
type recorder struct {
	net.PacketConn
	mu   sync.Mutex
	lose int
	sent [][]byte
}

func (r *recorder) WriteTo(b []byte, to net.Addr) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent = append(r.sent, slices.Clone(b))
	if len(r.sent) <= r.lose {
		return len(b), nil
	}
	return r.PacketConn.WriteTo(b, to)
}

// recordDatagrams returns what a client sends to a server that asks for a Retry or does not, up to an answer or the
// end of the test's patience.
func recordDatagrams(t *testing.T, name string, v quic.Version, retry bool, lose int) [][]byte {
	t.Helper()
	listen := func() net.PacketConn {
		conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	server := &quic.Transport{Conn: listen(), VerifySourceAddress: func(net.Addr) bool { return retry }}
	t.Cleanup(func() { _ = server.Close() })
	versions := &quic.Config{Versions: []quic.Version{v}}
	_, err := server.Listen(&tls.Config{MinVersion: tls.VersionTLS13}, versions) // it has no certificate
	require.NoError(t, err)
	sent := &recorder{PacketConn: listen(), lose: lose}
	client := &quic.Transport{Conn: sent}
	t.Cleanup(func() { _ = client.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	config := &tls.Config{MinVersion: tls.VersionTLS13, ServerName: name, NextProtos: []string{"h3"}}
	_, err = client.Dial(ctx, server.Conn.LocalAddr(), config, versions)
	require.Error(t, err)
	sent.mu.Lock()
	defer sent.mu.Unlock()
	return slices.Clone(sent.sent)
}

func TestTheClientHelloOfAQUICClientIsRead(t *testing.T) {
	name := strings.Repeat("a-long-name.", 20) + "test"
	for what, c := range map[string]struct {
		version quic.Version
		retry   bool
		lose    int
		inOrder func([][]byte) [][]byte
	}{
		"version 1":      {version: quic.Version1},
		"version 2":      {version: quic.Version2},
		"behind a Retry": {version: quic.Version1, retry: true},
		"whose first datagram is lost": {version: quic.Version2, lose: 1, inOrder: func(d [][]byte) [][]byte {
			return d[1:]
		}},
		"in another order": {version: quic.Version1, lose: 2, inOrder: func(d [][]byte) [][]byte {
			return [][]byte{d[1], d[0]}
		}},
		"each datagram twice": {version: quic.Version1, inOrder: func(d [][]byte) [][]byte {
			return slices.Concat(d, d)
		}},
		"all datagrams in one": {version: quic.Version1, inOrder: func(d [][]byte) [][]byte {
			return [][]byte{slices.Concat(d...)}
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			datagrams := recordDatagrams(t, name, c.version, c.retry, c.lose)
			require.Greater(t, len(datagrams), 1, "a ClientHello with post-quantum keys takes more than one")
			if c.retry { // of those before it, the first alone is left
				first := datagrams[0]
				destination := func(d []byte) string { return string(d[6 : 6+d[5]]) }
				datagrams = slices.DeleteFunc(datagrams, func(d []byte) bool { return destination(d) == destination(first) })
				datagrams = slices.Insert(datagrams, 0, first)
			}
			if c.inOrder != nil {
				datagrams = c.inOrder(datagrams)
			}
			var h Handshake
			var hello []byte
			for _, d := range datagrams {
				before := slices.Clone(d)
				hello = h.Add(d)
				require.Equal(t, before, d)
			}
			require.NotNil(t, hello)
			assert.Equal(t, 1, strings.Count(string(hello), name))
		})
	}
}

// seal protects the payload of an Initial packet as a client does.
func seal(number uint32, v uint32, connectionID, payload []byte) []byte {
	if len(payload) < 4 {
		payload = append(slices.Clip(payload), 0, 0, 0, 0) // for the sample
	}
	is := versions[v]
	packet := []byte{0xc3 | is.kind<<4}
	packet = binary.BigEndian.AppendUint32(packet, v)
	packet = append(append(packet, byte(len(connectionID))), connectionID...)
	packet = append(packet, 3, 1, 2, 3, 2, 8, 8) // the client's connection ID, and a token
	packet = quicvarint.Append(packet, uint64(4+len(payload)+16))
	at := len(packet)
	packet = binary.BigEndian.AppendUint32(packet, number)

	secret, _ := hkdf.Extract(sha256.New, connectionID, is.salt)
	secret = expandLabel(secret, "client in", 32)
	nonce := expandLabel(secret, is.iv, 12)
	for i, b := range packet[at:] {
		nonce[8+i] ^= b
	}
	block, _ := aes.NewCipher(expandLabel(secret, is.key, 16))
	aead, _ := cipher.NewGCM(block)
	packet = aead.Seal(packet, nonce, payload, packet)
	block, _ = aes.NewCipher(expandLabel(secret, is.mac, 16))
	mask := make([]byte, 16)
	block.Encrypt(mask, packet[at+4:at+20])
	packet[0] ^= mask[0] & 0xf
	for i := range 4 {
		packet[at+i] ^= mask[1+i]
	}
	return packet
}

// appendCrypto appends a CRYPTO frame.
func appendCrypto(b []byte, offset int, data []byte) []byte {
	b = quicvarint.Append(append(b, cryptoFrame), uint64(offset))
	return append(quicvarint.Append(b, uint64(len(data))), data...)
}

func TestPartsOfAClientHelloComeInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.SampledFrom([]uint32{0x00000001, 0x6b3343cf}).Draw(t, "version")
		connectionID := rapid.SliceOfN(rapid.Byte(), 0, maxConnectionID).Draw(t, "connection ID")
		length := rapid.IntRange(0, 3000).Draw(t, "length")
		hello := append([]byte{1, 0, byte(length >> 8), byte(length)}, make([]byte, length)...)
		for i := range length {
			hello[4+i] = byte(i * 7)
		}
		type span struct{ from, to int }
		var spans []span
		for at := 0; at < len(hello); {
			to := at + rapid.IntRange(1, 600).Draw(t, "bytes")
			spans = append(spans, span{max(0, at-rapid.IntRange(0, 9).Draw(t, "overlap")), min(to, len(hello))})
			at = to
		}
		var h Handshake
		for i, s := range rapid.Permutation(spans).Draw(t, "order") {
			payload := []byte{pingFrame, ackECNFrame, 9, 0, 1, 2, 3, 4, 5, 6, 7, 0}
			payload = appendCrypto(payload, s.from, hello[s.from:s.to])
			got := h.Add(seal(uint32(i), v, connectionID, append(payload, 0, 0)))
			if i < len(spans)-1 && got == nil {
				continue
			}
			require.Equal(t, hello, got)
		}
	})
}

func TestWhatIsNoClientsInitialIsPassedOver(t *testing.T) {
	id := []byte("12345678")
	hello := []byte{1, 0, 0, 2, 7, 7}
	good := seal(0, 1, id, appendCrypto(nil, 0, hello))
	manyRanges := []byte{ackFrame, 9, 9, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0}
	handshakePacket := append([]byte{0xe0, 0, 0, 0, 1, 1, 9, 0, 8}, make([]byte, 8)...)
	for what, c := range map[string]struct {
		datagram []byte
		want     []byte
	}{
		"whole":                        {good, hello},
		"behind a handshake packet":    {slices.Concat(handshakePacket, good), hello},
		"with zeros behind it":         {slices.Concat(good, make([]byte, 100)), hello},
		"empty":                        {nil, nil},
		"cut":                          {good[:len(good)-1], nil},
		"of an unknown version":        {slices.Concat(good[:4], []byte{9}, good[5:]), nil},
		"with a short header":          {slices.Concat([]byte{0x43}, good[1:]), nil},
		"with a changed byte":          {slices.Concat(good[:40], []byte{good[40] + 1}, good[41:]), nil},
		"of a server":                  {seal(0, 1, id, appendCrypto(nil, 0, []byte{2, 0, 0, 0})), nil},
		"behind a forbidden frame":     {seal(0, 1, id, appendCrypto([]byte{0x08}, 0, hello)), nil},
		"a length above the limit":     {seal(0, 1, id, appendCrypto(nil, 0, []byte{1, 1, 0, 0})), nil},
		"an offset above the limit":    {seal(0, 1, id, appendCrypto(nil, 1<<40, hello)), nil},
		"a connection ID above 20":     {seal(0, 1, make([]byte, 21), appendCrypto(nil, 0, hello)), nil},
		"a CRYPTO frame that is cut":   {seal(0, 1, id, appendCrypto(nil, 0, hello)[:6]), nil},
		"an ACK of many ranges":        {seal(0, 1, id, manyRanges), nil},
		"a part that is in the middle": {seal(0, 1, id, appendCrypto(nil, 2, hello)), nil},
	} {
		t.Run(what, func(t *testing.T) {
			var h Handshake
			assert.Equal(t, c.want, h.Add(c.datagram))
		})
	}
}

func TestAHandshakeIsBounded(t *testing.T) {
	var h Handshake
	for i := range 4 * maxParts {
		h.Add(seal(uint32(i), 1, []byte("12345678"), appendCrypto(nil, 1+i*3, make([]byte, 1000))))
	}
	assert.LessOrEqual(t, len(h.parts), maxParts)
	assert.LessOrEqual(t, h.size, 2*maxHello)
}

func FuzzAdd(f *testing.F) {
	id := []byte("12345678")
	f.Add(seal(0, 1, id, appendCrypto(nil, 0, []byte{1, 0, 0, 1, 5})))
	f.Add(appendCrypto([]byte{ackFrame, 1, 2, 0, 0}, 0, []byte{1, 0, 0, 1, 5}))
	f.Fuzz(func(t *testing.T, data []byte) {
		var h Handshake
		for i, datagram := range [][]byte{data, seal(0, 1, id, data), seal(1, 0x6b3343cf, id, data)} {
			hello := h.Add(datagram)
			if hello != nil && (hello[0] != 1 || len(hello) > maxHello) {
				t.Fatalf("datagram %d: %v", i, hello)
			}
		}
	})
}
