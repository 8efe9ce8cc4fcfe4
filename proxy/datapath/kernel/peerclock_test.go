//go:build linux

package kernel

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

// FuzzParseAck takes in what a stranger may send.
func FuzzParseAck(f *testing.F) {
	ack := []byte{
		0x45, 0, 0, 52, 0, 0, 0x40, 0, 64, 6, 0, 0, 192, 0, 2, 1, 198, 51, 100, 2, // IPv4
		0x1f, 0x90, 0, 80, 0, 0, 0, 1, 0, 0, 0, 2, 0x80, 0x10, 1, 0, 0, 0, 0, 0, // TCP
		1, 1, 8, 10, 0, 0, 1, 2, 0, 0, 0, 9, // timestamps behind padding
	}
	f.Add(ack)
	f.Add(ack[:len(ack)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		ends, value, ok := parseAck(b)
		if string(b) == string(ack) {
			assert.True(t, ok)
			assert.Equal(t, "192.0.2.1:8080 198.51.100.2:80", ends.remote.String()+" "+ends.local.String())
			assert.Equal(t, uint32(0x102), value)
		}
		if ok {
			assert.True(t, ends.remote.Addr().IsValid() && len(b) >= 32, "a timestamp without an address, or room for it")
		}
	})
}
