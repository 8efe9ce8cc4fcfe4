// Package initial reads the TLS ClientHello out of the first packets that a QUIC client sends. Their keys are public:
// they come from a connection ID in the packet (RFC 9001 §5.2). It does no I/O.
package initial

import (
	"cmp"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
)

// Bounds of a Handshake. Clients that split a ClientHello send fewer and shorter parts.
const (
	maxHello = 16 << 10 // bytes of a ClientHello
	maxParts = 256      // CRYPTO frames
)

// version is what tells versions of QUIC apart in an Initial packet.
type version struct {
	kind         byte // long packet type of an Initial
	salt         []byte
	key, iv, mac string // labels of the packet key, its nonce and the header key
}

// versions are the versions of QUIC with known Initial keys: RFC 9001 §5.2 and RFC 9369 §3.
var versions = map[uint32]version{
	0x00000001: {
		0, []byte("\x38\x76\x2c\xf7\xf5\x59\x34\xb3\x4d\x17\x9a\xe6\xa4\xc8\x0c\xad\xcc\xbb\x7f\x0a"),
		"quic key", "quic iv", "quic hp",
	},
	0x6b3343cf: {
		1, []byte("\x0d\xed\xe3\xde\xf7\x00\xa6\xdb\x81\x93\x81\xbe\x6e\x26\x9d\xcb\xf9\xbd\x2e\xd9"),
		"quicv2 key", "quicv2 iv", "quicv2 hp",
	},
}

// Handshake collects what a client's Initial packets carry of its ClientHello. The parts may come in any order, more
// than once, and in several datagrams. The zero value is ready. Calls must not overlap.
type Handshake struct {
	first []byte // connection ID that the first packet was sent to, which keys stay with until a Retry
	parts []part // by offset
	size  int    // bytes in parts
	hello []byte // nil: not whole yet
}

// part is the content of a CRYPTO frame.
type part struct {
	offset int // in the stream of TLS messages
	data   []byte
}

// Add reads a datagram of the client. It returns the ClientHello, with the header of its TLS message, once all of that
// has come; nil before. The datagram is not kept or changed. What is no Initial packet of a client is passed over.
func (h *Handshake) Add(datagram []byte) (hello []byte) {
	for len(datagram) > 0 && h.hello == nil {
		p, rest, ok := splitPacket(datagram)
		if !ok {
			break
		}
		datagram = rest
		if payload := h.decrypt(p); payload != nil {
			h.addFrames(payload)
			h.hello = h.assemble()
		}
	}
	return h.hello
}

// packet is a packet with a long header, still encrypted.
type packet struct {
	whole       []byte
	number      int // offset of the packet number
	destination []byte
	version     version
	isInitial   bool
}

// splitPacket reads the first of a datagram's packets (RFC 9000 §12.2 and §17.2); rest follows it.
func splitPacket(datagram []byte) (p packet, rest []byte, ok bool) {
	const longHeader, fixedBit = 0x80, 0x40
	if len(datagram) < 6 || datagram[0]&(longHeader|fixedBit) != longHeader|fixedBit {
		return p, nil, false
	}
	v, known := versions[binary.BigEndian.Uint32(datagram[1:])]
	if !known {
		return p, nil, false
	}
	r := reader{left: datagram[5:]}
	p.version = v
	p.destination = r.readBytes(r.readByte())
	r.readBytes(r.readByte()) // the client's connection ID
	kind := datagram[0] >> 4 & 3
	if p.isInitial = kind == v.kind; p.isInitial {
		r.readBytes(r.readVarint()) // token
	} else if retry := (v.kind + 3) % 4; kind == retry {
		return p, nil, false
	}
	length := r.readVarint()
	p.number = len(datagram) - len(r.left)
	r.readBytes(length)
	if r.short || len(p.destination) > maxConnectionID {
		return p, nil, false
	}
	p.whole = datagram[:len(datagram)-len(r.left)]
	return p, r.left, true
}

const maxConnectionID = 20 // RFC 9000 §17.2

// decrypt returns the frames of a client's Initial packet; nil: it is none. The keys stay those of the first packet
// when the client has learnt the server's connection ID, but a Retry makes new ones (RFC 9001 §5.2).
func (h *Handshake) decrypt(p packet) []byte {
	if !p.isInitial {
		return nil
	}
	if h.first != nil {
		if payload := p.decryptFor(h.first); payload != nil || slices.Equal(h.first, p.destination) {
			return payload
		}
	}
	payload := p.decryptFor(p.destination)
	if payload != nil { // the ClientHello begins anew, too
		*h = Handshake{first: slices.Clone(p.destination)}
	}
	return payload
}

// decryptFor returns the payload if its keys come from connectionID (RFC 9001 §5.3 and §5.4), else nil. The mask of
// the header comes from a sample of the payload, and says how long the packet number is.
func (p packet) decryptFor(connectionID []byte) []byte {
	const sample = 16
	if len(p.whole) < p.number+4+sample {
		return nil
	}
	secret, err := hkdf.Extract(sha256.New, connectionID, p.version.salt)
	if err != nil {
		return nil // only where FIPS 140 forbids such a salt
	}
	secret = expandLabel(secret, "client in", sha256.Size)
	block, err := aes.NewCipher(expandLabel(secret, p.version.mac, aes.BlockSize))
	if err != nil {
		return nil
	}
	var mask [aes.BlockSize]byte
	block.Encrypt(mask[:], p.whole[p.number+4:p.number+4+sample])
	first := p.whole[0] ^ mask[0]&0x0f
	length := int(first&3) + 1 // of the packet number
	// The whole header is authenticated as it was before its protection.
	head := slices.Clone(p.whole[:p.number+length])
	head[0] = first
	nonce := expandLabel(secret, p.version.iv, 12)
	for i := range length {
		head[p.number+i] ^= mask[1+i]
		// The number is taken as whole: a client sends fewer Initial packets than a truncated one would need.
		nonce[len(nonce)-length+i] ^= head[p.number+i]
	}
	if block, err = aes.NewCipher(expandLabel(secret, p.version.key, 16)); err != nil {
		return nil
	}
	sealed, err := cipher.NewGCM(block)
	if err != nil {
		return nil
	}
	payload, err := sealed.Open(nil, nonce, p.whole[p.number+length:], head)
	if err != nil {
		return nil
	}
	return payload
}

// expandLabel is HKDF-Expand-Label of TLS 1.3 without a context (RFC 8446 §7.1).
func expandLabel(secret []byte, label string, length int) []byte {
	info := binary.BigEndian.AppendUint16(nil, uint16(length))
	info = append(info, byte(len("tls13 ")+len(label)))
	info = append(info, "tls13 "+label+"\x00"...)
	out, err := hkdf.Expand(sha256.New, secret, string(info), length)
	if err != nil {
		panic(err) // the length is a constant
	}
	return out
}

// Frames of Initial packets (RFC 9000 §12.4 and §19). All others are forbidden in them.
const (
	paddingFrame = 0x00
	pingFrame    = 0x01
	ackFrame     = 0x02
	ackECNFrame  = 0x03
	cryptoFrame  = 0x06
)

// addFrames keeps what CRYPTO frames carry, up to the first frame that has no place in an Initial packet.
func (h *Handshake) addFrames(payload []byte) {
	r := reader{left: payload}
	for len(r.left) > 0 && !r.short {
		switch kind := r.readByte(); kind {
		case paddingFrame, pingFrame:
		case ackFrame, ackECNFrame:
			r.readVarint() // largest acknowledged
			r.readVarint() // delay
			ranges := r.readVarint()
			r.readVarint() // first range
			for ; ranges > 0 && !r.short; ranges-- {
				r.readVarint() // gap
				r.readVarint() // range
			}
			for range 3 * (kind - ackFrame) {
				r.readVarint() // ECN counts
			}
		case cryptoFrame:
			offset := r.readVarint()
			data := r.readBytes(r.readVarint())
			if !r.short && len(data) > 0 {
				h.addPart(offset, data)
			}
		default:
			return
		}
	}
}

// addPart keeps a part of the ClientHello. It passes over what exceeds the bounds, and what is known already. Parts may
// overlap: the bytes are the same then, unless a client deceives, which would change its own name only.
func (h *Handshake) addPart(offset int, data []byte) {
	at, known := slices.BinarySearchFunc(h.parts, offset, func(p part, offset int) int {
		return cmp.Compare(p.offset, offset)
	})
	if known && len(h.parts[at].data) >= len(data) || offset > maxHello-len(data) {
		return
	}
	if len(h.parts) == maxParts || h.size+len(data) > 2*maxHello {
		return
	}
	h.size += len(data)
	h.parts = slices.Insert(h.parts, at, part{offset, slices.Clone(data)})
}

// assemble returns the ClientHello if all of it has come, nil otherwise.
func (h *Handshake) assemble() []byte {
	const header, clientHello = 4, 1
	var message []byte
	for _, p := range h.parts {
		if p.offset > len(message) {
			break
		}
		if from := len(message) - p.offset; from < len(p.data) {
			message = append(message, p.data[from:]...)
		}
	}
	if len(message) < header || message[0] != clientHello {
		return nil
	}
	length := header + int(binary.BigEndian.Uint32(message)&0xff_ffff)
	if len(message) < length {
		return nil
	}
	return message[:length]
}

// reader takes fields from the front of bytes.
type reader struct {
	left  []byte
	short bool // a field was not whole; all further ones are empty
}

// readBytes takes n bytes.
func (r *reader) readBytes(n int) []byte {
	if r.short || n > len(r.left) {
		r.short = true
		return nil
	}
	var b []byte
	b, r.left = r.left[:n], r.left[n:]
	return b
}

// readByte takes a byte.
func (r *reader) readByte() int {
	if b := r.readBytes(1); b != nil {
		return int(b[0])
	}
	return 0
}

// readVarint takes an integer of 1, 2, 4 or 8 bytes (RFC 9000 §16). What an int may not hold is math.MaxInt32.
func (r *reader) readVarint() int {
	first := r.readByte()
	n := uint64(first & 0x3f)
	for _, b := range r.readBytes(1<<(first>>6) - 1) {
		n = n<<8 | uint64(b)
	}
	return int(min(n, math.MaxInt32))
}
