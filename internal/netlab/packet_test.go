//go:build linux

package netlab

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// wire lays a header out by hand, from the RFCs and not with the library that reads it.
type wire struct {
	extension []byte // between IPv6 and TCP
	options   []byte // of TCP
	payload   int
	length    int // written instead of the true one; -1: zero
	fragment  uint16
}

func (w wire) tcp() []byte {
	b := make([]byte, 20, 60)
	binary.BigEndian.PutUint16(b, 80)
	binary.BigEndian.PutUint16(b[2:], 50123)
	binary.BigEndian.PutUint32(b[4:], 0xfffffff0)
	binary.BigEndian.PutUint32(b[8:], 77)
	b[12], b[13] = byte((20+len(w.options))/4)<<4, 0x18
	binary.BigEndian.PutUint16(b[14:], 501)
	return append(append(b, w.options...), make([]byte, w.payload)...)
}

func (w wire) lengthOr(n int) uint16 {
	switch {
	case w.length < 0:
		return 0
	case w.length > 0:
		return uint16(w.length)
	}
	return uint16(n)
}

func (w wire) v4() []byte {
	t := w.tcp()
	b := make([]byte, 20, 20+len(t))
	b[0], b[8], b[9] = 0x45, 64, 6
	binary.BigEndian.PutUint16(b[2:], w.lengthOr(20+len(t)))
	binary.BigEndian.PutUint16(b[6:], w.fragment)
	copy(b[12:], []byte{10, 77, 1, 1})
	copy(b[16:], []byte{10, 77, 1, 2})
	return append(b, t...)
}

func (w wire) v6() []byte {
	t := append(slices.Clone(w.extension), w.tcp()...)
	b := make([]byte, 40, 40+len(t))
	b[0], b[6], b[7] = 0x60, 6, 64
	if w.extension != nil {
		b[6] = 60 // destination options
	}
	binary.BigEndian.PutUint16(b[4:], w.lengthOr(len(t)))
	copy(b[8:], netip.MustParseAddr("fd77:1::1").AsSlice())
	copy(b[24:], netip.MustParseAddr("fd77:1::2").AsSlice())
	return append(b, t...)
}

// Timestamps and two SACK blocks, the second of them across the wrap.
var sackOptions = slices.Concat(
	[]byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2},
	[]byte{1, 1, 5, 18, 0, 0, 0x10, 0, 0, 0, 0x20, 0, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0},
)

func TestHeadersAreRead(t *testing.T) {
	v4 := [2]string{"10.77.1.1:80", "10.77.1.2:50123"}
	v6 := [2]string{"[fd77:1::1]:80", "[fd77:1::2]:50123"}
	long := wire{payload: 1448, options: []byte{1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2}}
	for name, c := range map[string]struct {
		packet         []byte
		size           int // of the packet, where it is longer than what was kept
		ends           [2]string
		payload, whole cc.Bytes
		sack           []SACKBlock
	}{
		"IPv4 without data":            {wire{}.v4(), 0, v4, 0, 40, nil},
		"IPv6 without data":            {wire{}.v6(), 0, v6, 0, 60, nil},
		"IPv4, cut behind the headers": {long.v4()[:100], 1500, v4, 1448, 1500, nil},
		"IPv6, cut behind the headers": {long.v6()[:100], 1520, v6, 1448, 1520, nil},
		"behind an extension header": {
			wire{payload: 9, extension: []byte{6, 0, 1, 4, 0, 0, 0, 0}}.v6(), 0, v6,
			9, 77, nil,
		},
		"with selective acknowledgements": {
			wire{options: sackOptions}.v4(), 0, v4, 0, 72,
			[]SACKBlock{{0x1000, 0x2000}, {0xffffff00, 0x100}},
		},
		"and over IPv6": {
			wire{options: sackOptions}.v6(), 0, v6, 0, 92,
			[]SACKBlock{{0x1000, 0x2000}, {0xffffff00, 0x100}},
		},
		"to be segmented by the device":    {wire{payload: 100, length: -1}.v4(), 70_000, v4, 69_960, 70_000, nil},
		"padded to Ethernet's least frame": {append(wire{}.v4(), 0, 0, 0, 0, 0, 0), 46, v4, 0, 40, nil},
	} {
		t.Run(name, func(t *testing.T) {
			size := c.size
			if size == 0 {
				size = len(c.packet)
			}
			p, ok := decodePacket(c.packet, size)
			require.True(t, ok)
			assert.Equal(t, c.ends, [2]string{p.Src.String(), p.Dst.String()})
			assert.Equal(t, c.payload, p.Payload)
			assert.Equal(t, c.whole, p.Size)
			assert.Equal(t, uint32(0xfffffff0), p.Seq)
			assert.Equal(t, uint32(77), p.Ack)
			assert.Equal(t, uint16(501), p.Window)
			assert.Equal(t, PSH|ACK, p.Flags)
			assert.Equal(t, c.sack, append([]SACKBlock(nil), p.SACK()...))
		})
	}
}

func TestWhatIsNoTCPPacketIsLeftOut(t *testing.T) {
	udp := wire{}.v4()
	udp[9] = 17
	for name, b := range map[string][]byte{
		"nothing":               {},
		"UDP":                   udp,
		"half a header":         wire{}.v4()[:30],
		"the first fragment":    wire{payload: 100, fragment: 0x2000}.v4(),
		"a later fragment":      wire{payload: 100, fragment: 100}.v4(),
		"a length that is less": wire{length: 30}.v4(),
		"another protocol":      {0x45},
	} {
		_, ok := decodePacket(b, len(b))
		assert.False(t, ok, name)
	}
}

func TestDecodingAllocatesNothing(t *testing.T) {
	four, six := wire{options: sackOptions}.v4(), wire{payload: 100}.v6()
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		decodePacket(four, len(four))
		decodePacket(six, len(six))
	}))
}

func FuzzDecode(f *testing.F) {
	for _, w := range []wire{
		{},
		{options: sackOptions, payload: 3},
		{length: -1},
		{length: 30},
		{extension: []byte{6, 0, 1, 4, 0, 0, 0, 0}},
	} {
		f.Add(w.v4(), 1500)
		f.Add(w.v6(), 70_000)
	}
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		size = max(size, len(b)) // the kernel keeps no more than there is
		p, ok := decodePacket(b, size)
		if !ok {
			return
		}
		assert.GreaterOrEqual(t, p.Payload, cc.Bytes(0))
		assert.GreaterOrEqual(t, p.Size, p.Payload+40, "headers take room")
		assert.LessOrEqual(t, len(p.SACK()), maxSACKs)
		assert.True(t, p.Src.IsValid())
		assert.True(t, p.Dst.IsValid())
	})
}
