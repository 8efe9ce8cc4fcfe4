package userspace

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// FuzzEchoReplies looks for what an ICMP socket might read, or the kernel say of an
// error, that is taken for a reply and is none.
func FuzzEchoReplies(f *testing.F) {
	ip := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0, 192, 0, 2, 7, 10, 0, 0, 1}
	f.Add(append(ip, 0, 0, 0, 0, 0, 7, 0, 1), false, true)
	f.Add([]byte{0, 0, 0, 0, 0, 7, 0, 1}, false, false)
	f.Add([]byte{129, 0, 0, 0, 0, 7, 0, 1}, true, true)
	f.Add([]byte{0x4f}, false, true)
	f.Fuzz(func(t *testing.T, b []byte, six, raw bool) {
		news := received{payload: b, memory: new([largestDatagrams]byte)}
		s := socket{six: six, kind: forPing}
		if raw {
			s.kind = forRaw
		}
		ok := s.stripEchoReply(&news)
		require.NotNil(t, news.payload)
		if ok {
			assert.GreaterOrEqual(t, len(news.payload), icmpHeader)
			assert.Contains(t, []byte{echoReply4, echoReply6}, news.payload[0])
		}
		assert.GreaterOrEqual(t, segmentSize(b), 0)
		icmpErrorIn(b)
	})
}

// Linux makes these of Destination Unreachable codes 5, 7 and 8 (icmp_err_convert).
func TestAnErrorAboutOneDatagramEndsNoSocket(t *testing.T) {
	for _, err := range []error{unix.EOPNOTSUPP, unix.EHOSTDOWN, unix.ENONET, unix.ECONNREFUSED} {
		assert.True(t, isPendingError(err), "%v", err)
	}
	assert.False(t, isPendingError(unix.EBADF))
}
