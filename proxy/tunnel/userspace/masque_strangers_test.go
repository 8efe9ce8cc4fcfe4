package userspace

import (
	"context"
	"crypto/tls"
	"net/http"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// crowd leaves room for so many clients that nobody knows.
func crowd(t *testing.T, m *MASQUE, room int) {
	for i := range maxUnauthenticated - room {
		require.True(t, m.unauthPerHost.Take(strconv.Itoa(i)))
	}
}

func TestClientsThatNobodyKnowsAreBounded(t *testing.T) {
	m, l := masque(t, nil)
	echoing(t, l)
	crowd(t, m, 2)
	c := dialMASQUE(t, m)
	_, err := connect(t, m)
	var refused *quicgo.TransportError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, quicgo.ConnectionRefused, refused.ErrorCode)
	assert.Positive(t, m.Refused(), "packets of its")

	exchange(t, c.mustStream("203.0.113.7:443"), []byte("hello"))
	exchange(t, dialMASQUE(t, m).mustStream("203.0.113.7:443"), []byte("there is room beside whom we know"))
	assert.Equal(t, maxUnauthenticated-2, m.unauthPerHost.Taken(), "and whom we knew is not counted once more as it goes")
}

func TestConnectionsOfAClientAreBounded(t *testing.T) {
	m, l := masque(t, nil)
	answering(t, l, nil, echo(t))
	known := func() int {
		m.mu.RLock()
		defer m.mu.RUnlock()
		return m.connsPerClient["phone"]
	}
	note := func(connections int) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.connsPerClient["phone"] += connections
	}
	first := dialMASQUE(t, m)
	exchange(t, first.mustStream("203.0.113.7:443"), []byte("hello"))
	note(maxConns - 1)
	c := dialMASQUE(t, m)
	_, said, err := c.stream("203.0.113.7:443", phoneToken)
	require.NoError(t, err)
	assert.Equal(t, http.StatusServiceUnavailable, said.status)
	exchange(t, first.mustStream("203.0.113.7:443"), []byte("who is known has more streams"))
	other, _, err := c.stream("203.0.113.7:443", tabletToken)
	require.NoError(t, err)
	exchange(t, other, []byte("others have room"))

	require.NoError(t, first.conn.CloseWithError(0, ""))
	require.Eventually(t, func() bool { return known() == maxConns-1 }, soon, time.Millisecond)
	exchange(t, dialMASQUE(t, m).mustStream("203.0.113.7:443"), []byte("there is room again"))
	assert.Equal(t, maxConns, known())
}

// Requests whose headers never come hold memory.
func TestAStrangerDoesNotBeginManyRequests(t *testing.T) {
	m, _ := masque(t, nil)
	c, err := quicgo.DialAddr(deadlineOf(t), m.Addr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, &quicgo.Config{})
	require.NoError(t, err)
	for range unauthRequests + 1 {
		s, err := c.OpenStreamSync(deadlineOf(t))
		if err != nil {
			break // it is closed already
		}
		_, _ = s.Write([]byte{1, 0x60, 0}) // HEADERS, of 8 KiB
	}
	var closed *quicgo.ApplicationError
	<-c.Context().Done()
	require.ErrorAs(t, context.Cause(c.Context()), &closed)
	assert.EqualValues(t, http3.ErrCodeRequestRejected, closed.ErrorCode)
}

// retries counts the Retry packets that a client gets.
type retries struct{ n *atomic.Int32 }

func (r retries) AddProducer() qlogwriter.Recorder { return r }
func (retries) SupportsSchemas(string) bool        { return false }
func (retries) Close() error                       { return nil }

func (r retries) RecordEvent(e qlogwriter.Event) {
	if p, ok := e.(qlog.PacketReceived); ok && p.Header.PacketType == qlog.PacketTypeRetry {
		r.n.Add(1)
	}
}

func TestWhereManyBeginAnAddressHasToBeProven(t *testing.T) {
	m, _ := masque(t, nil)
	retried := func() int32 {
		var n atomic.Int32
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		defer cancel()
		tracer := func(context.Context, bool, quicgo.ConnectionID) qlogwriter.Trace { return retries{&n} }
		c, err := quicgo.DialAddr(ctx, m.Addr().String(),
			&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
			&quicgo.Config{Tracer: tracer})
		require.NoError(t, err)
		require.NoError(t, c.CloseWithError(0, ""))
		return n.Load()
	}
	assert.Zero(t, retried())
	crowd(t, m, maxUnauthenticated-retryFrom)
	assert.EqualValues(t, 1, retried())
}
