package netstack

import (
	"context"
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// sackOptions are a segment's: blocks of numbers from the first byte's on.
func sackOptions(first uint32, blocks ...[2]uint32) []byte {
	b := []byte{1, 1, 5, byte(2 + 8*len(blocks))}
	for _, e := range blocks {
		for _, at := range e {
			at += first
			b = append(b, byte(at>>24), byte(at>>16), byte(at>>8), byte(at))
		}
	}
	return b
}

// What was sent during a recovery, and lost, is sent again after its end: the stack
// takes packets that the recovery sent again off a count that they are not in.
func TestWhatIsLostBehindARecoveryIsSentAgain(t *testing.T) {
	const size = 1000
	a := newAlone(t)
	from := netip.AddrPortFrom(client, 40000)
	// MSS with room for SACK, and SACK permitted
	conn, answer := a.admit(from, server, []byte{2, 4, (size + 36) >> 8, (size + 36) & 0xff, 4, 2, 1, 1})
	first := answer.SequenceNumber() + 1
	ack := func(upTo uint32, blocks ...[2]uint32) {
		var options []byte
		if len(blocks) > 0 {
			options = sackOptions(first, blocks...)
		}
		a.Deliver(tcpPacket(from, server, header.TCPFlagAck, 101, first+upTo, options))
	}
	until := func(at uint32) header.TCP { // what else is sent is so by a loss probe or a timeout
		for {
			if s := segment(a.next()); s.SequenceNumber() == first+at {
				return s
			}
		}
	}
	_, err := conn.Write(make([]byte, 1)) // before which the stack takes nothing for lost
	require.NoError(t, err)
	until(0)
	ack(1)
	first++
	_, err = conn.Write(make([]byte, 10*size))
	require.NoError(t, err)
	until(9 * size)
	// The first and the fifth are lost.
	ack(0, [2]uint32{size, 2 * size})
	ack(0, [2]uint32{size, 4 * size})
	ack(0, [2]uint32{size, 4 * size}, [2]uint32{5 * size, 10 * size})
	until(0) // the recovery begins
	_, err = conn.Write(make([]byte, 64))
	require.NoError(t, err)
	until(10 * size)
	ack(4*size, [2]uint32{5 * size, 10 * size})
	until(4 * size)
	// The recovery ends. What was sent last is lost, and so is the stack's first attempt.
	ack(10 * size)
	until(10 * size)
	assert.Len(t, until(10*size).Payload(), 64)
	require.NoError(t, conn.Reset())
}

// halt has the stack stop its timers, as it does where it takes nothing to be in flight.
func halt(t *testing.T, c *Conn) {
	e := c.tcpEndpoint()
	e.LockUser()
	defer e.UnlockUser()
	snd, ok := senderOf(e)
	require.True(t, ok)
	running := 0
	for _, timer := range []*timer{snd.resend, snd.probe} {
		if timer.isRunning() {
			running++
			timer.state++ // disabled, as the stack does it
		}
	}
	assert.Equal(t, 1, running, "the stack's timers are where we look")
	snd.Outstanding = 0
}

func TestAStackThatHasStoppedSendsAgain(t *testing.T) {
	for name, end := range map[string]func(*Conn) error{
		"bytes":                  func(c *Conn) error { _, err := c.Write(make([]byte, 64)); return err },
		"the end":                (*Conn).CloseWrite,
		"the end of both":        (*Conn).Close,
		"bytes and their end":    func(c *Conn) error { _, err := c.Write(make([]byte, 64)); return errors.Join(err, c.CloseWrite()) },
		"bytes that were closed": func(c *Conn) error { _, err := c.Write(make([]byte, 64)); return errors.Join(err, c.Close()) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			conn, _ := a.admit(netip.AddrPortFrom(client, 40000), server, []byte{2, 4, 4, 0, 4, 2, 1, 1})
			require.NoError(t, end(conn))
			first := segment(a.next())
			halt(t, conn)
			for segment(a.next()).SequenceNumber() != first.SequenceNumber() {
			}
			assert.Positive(t, a.Counts().Stalls)
			_ = conn.Reset()
		})
	}
}

func TestAConnectionThatCannotBeMadeToSendIsReset(t *testing.T) {
	a := newAlone(t)
	conn, _ := a.admit(netip.AddrPortFrom(client, 40000), server, nil)
	conn.restarts = maxRestarts // so often it was tried
	_, err := conn.Write(make([]byte, 64))
	require.NoError(t, err)
	a.next()
	halt(t, conn)
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, errStalled)
	require.ErrorIs(t, err, syscall.ECONNABORTED)
	assert.True(t, conn.Aborted())
	require.NoError(t, conn.Reset())
}

// The stack stamps an answer to a SYN that it sends again with the time of the first.
func TestALostAnswerToASYNIsNoPartOfTheRoundTrip(t *testing.T) {
	for name, c := range map[string]struct {
		from netip.Addr
		to   netip.AddrPort
	}{"IPv4": {client, server}, "IPv6": {client6, server6}} {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			from := netip.AddrPortFrom(c.from, 40000)
			stamps := func(echo uint32) []byte {
				return binary.BigEndian.AppendUint32([]byte{1, 1, 8, 10, 0, 0, 0, 1}, echo)
			}
			a.Deliver(tcpPacket(from, c.to, header.TCPFlagSyn, 100, 0,
				append([]byte{2, 4, 5, 0, 4, 2, 1, 1}, stamps(0)...)))
			conn, err := a.Accept()
			require.NoError(t, err)
			admitted := make(chan error, 1)
			go func() { admitted <- conn.Admit(context.Background()) }()
			a.next()
			again := a.next() // a second later
			answer := segment(again)
			source, target := tcpip.AddrFromSlice(c.to.Addr().AsSlice()), tcpip.AddrFromSlice(c.from.AsSlice())
			assert.True(t, answer.IsChecksumValid(source, target, 0, 0))
			a.Deliver(tcpPacket(from, c.to, header.TCPFlagAck, 101, answer.SequenceNumber()+1,
				stamps(header.ParseSynOptions(answer.Options(), true).TSVal)))
			require.NoError(t, <-admitted)
			e := conn.tcpEndpoint()
			e.LockUser()
			snd, ok := senderOf(e)
			require.True(t, ok)
			assert.Less(t, snd.RTTState.SRTT, time.Second)
			assert.Less(t, snd.RTO, 3*time.Second)
			e.UnlockUser()
			require.NoError(t, conn.Reset())
		})
	}
}
