package hold

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/unix"
)

// packetMessage is a message by which the kernel queues a packet.
func packetMessage(id, mark, length uint32, content []byte) []byte {
	attrs := appendAttr(nil, packetHeaderAttr, binary.BigEndian.AppendUint32(nil, id))
	attrs = appendAttr(attrs, markAttr, binary.BigEndian.AppendUint32(nil, mark))
	attrs = appendAttr(attrs, lengthAttr, binary.BigEndian.AppendUint32(nil, length))
	return appendMessage(nil, messagePacket, 0, 1, appendAttr(attrs, payloadAttr, content))
}

// packetsOf returns the packets of a received message.
func packetsOf(message []byte) (all []Packet) {
	q := Queue{buffer: make([]byte, receiveBatch*messageRoom)}
	q.inbox = newInbox(q.buffer)
	q.inbox[0].length, q.received = uint32(copy(q.buffer, message[:min(len(message), messageRoom)])), 1
	q.ForEach(func(p Packet) { all = append(all, p) })
	return all
}

func TestPacketsOfMessages(t *testing.T) {
	want := Packet{ID: 7, Mark: 0x20, Length: 1250, Content: []byte("\x45")}
	message := packetMessage(7, 0x20, 1250, []byte("\x45"))
	assert.Equal(t, []Packet{want, want}, packetsOf(append(message, message...)))
	assert.Equal(t, []Packet{want}, packetsOf(append(message, message[:30]...)), "the second one is cut")
	assert.Empty(t, packetsOf(appendMessage(nil, messagePacket, 0, 1, nil)), "a packet without an identifier")
	assert.Empty(t, packetsOf(appendMessage(nil, unix.NLMSG_ERROR, 0, 1, nil)))
}

func FuzzPacketsOfMessages(f *testing.F) {
	f.Add(packetMessage(1, 0, 0, []byte{0x60}))
	f.Add(append(packetMessage(1, 0, 9, nil), packetMessage(2, 3, 4, []byte("abcde"))...))
	f.Fuzz(func(t *testing.T, messages []byte) {
		for _, p := range packetsOf(messages) {
			assert.GreaterOrEqual(t, p.Length, 0)
			assert.LessOrEqual(t, len(p.Content), len(messages))
		}
		errorCode(messages)
	})
}
