package linktrace

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

func TestRatesBecomeATraceAndBack(t *testing.T) {
	trace, err := ReadRates("rates", strings.NewReader("seconds,mbit\n0,12\n# a pause\n\n2;0\n3 24\n4,6\n"))
	require.NoError(t, err)
	s := Summarise(trace)
	assert.Equal(t, 5*time.Second, s.Length, "the last holds as long as the one before it")
	assert.InDelta(t, (12+12+0+24+6)/5., s.Mean.Mbps(), 0.05)
	assert.InDelta(t, 12, s.P50.Mbps(), 0.05)
	assert.InDelta(t, 24, s.P95.Mbps(), 0.05)
	assert.InDelta(t, 1000, float64(s.Gap.Milliseconds()), 2)
	var out bytes.Buffer
	require.NoError(t, WriteRates(&out, trace, time.Second))
	again, err := ReadRates("again", &out)
	require.NoError(t, err)
	assert.InDelta(t, s.Mean.Mbps(), again.MeanRate().Mbps(), 0.05)
}

// What is left of an opportunity at the end of a span is the next one's: of fine spans none is lost.
func TestFineSpansCarryWhatTheySay(t *testing.T) {
	for _, mbit := range []float64{0.05, 0.1, 1, 7.7} {
		var text strings.Builder
		for i := range 200 {
			fmt.Fprintf(&text, "%g,%g\n", float64(i)/10, mbit)
		}
		trace, err := ReadRates("fine", strings.NewReader(text.String()))
		require.NoError(t, err)
		assert.Equal(t, 20*time.Second, trace.Duration())
		assert.InDelta(t, mbit, trace.MeanRate().Mbps(), 0.001, "but for one opportunity at the end")
	}
	trace, err := Read("lte.down", strings.NewReader(strings.Repeat("7\n", 3)+"90\n95\n101\n102\n199\n200\n"))
	require.NoError(t, err)
	var rates bytes.Buffer
	require.NoError(t, WriteRates(&rates, trace, 10*time.Millisecond))
	again, err := ReadRates("again", &rates)
	require.NoError(t, err)
	assert.Equal(t, trace.MeanRate(), again.MeanRate(), "there and back")
}

// The trace ends within the last span: the rest of that is silence, not the beginning of the next loop.
func TestTheLastSpanCarriesWhatIsLeftOfTheTrace(t *testing.T) {
	trace, err := ReadRates("rates", strings.NewReader("0,12\n1.5,0\n2,0\n"))
	require.NoError(t, err)
	require.Equal(t, 2500*time.Millisecond, trace.Duration())
	var rates bytes.Buffer
	require.NoError(t, WriteRates(&rates, trace, time.Second))
	again, err := ReadRates("again", &rates)
	require.NoError(t, err)
	assert.Equal(t, 3*time.Second, again.Duration())
	assert.Equal(t, Summarise(trace).Opportunities, Summarise(again).Opportunities)
}

func TestAFileIsATraceOrRatesByItsName(t *testing.T) {
	for name, text := range map[string]string{
		"mine.csv": "\ufeff0,12\r\n1,12\r\n", "mine.CSV": "# by me\n\nseconds;mbit\n0;12\n1;12\n",
		"mine.down": "\ufeff# 1500 bytes in each millisecond\r\n\r\n1\r\n2\r\n",
	} {
		trace, err := Read(name, strings.NewReader(text))
		require.NoError(t, err, name)
		assert.InDelta(t, 12, trace.MeanRate().Mbps(), 0.1, name)
	}
	_, err := Read("mine.txt", strings.NewReader("0,12\n1,12\n"))
	require.ErrorContains(t, err, `line 1: "0,12" is not a whole number of milliseconds (if these are times and rates, end `+
		"the file's name in .csv)")
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err = w.Write([]byte("1\n2\n"))
	require.NoError(t, err)
	require.NoError(t, w.Close())
	for _, name := range []string{"mine.down.gz", "mine.csv"} {
		_, err = Read(name, bytes.NewReader(packed.Bytes()))
		require.EqualError(t, err, "trace "+name+" is compressed by gzip: unpack it first")
	}
	_, err = ReadDelays("delays.gz", bytes.NewReader(packed.Bytes()))
	require.EqualError(t, err, "trace delays.gz is compressed by gzip: unpack it first")
	delays, err := ReadDelays("delays", strings.NewReader("\ufeff30\r\n20\r\n"))
	require.NoError(t, err)
	assert.Equal(t, 30*time.Millisecond, delays.First())
	assert.Equal(t, 20*time.Millisecond, delays.Duration())
}

func TestRatesAreRefused(t *testing.T) {
	for text, says := range map[string]string{
		"":                "it needs two lines at least",
		"0,1\n":           "it needs two lines at least",
		"1,1\n2,2\n":      "rates: line 1: the first time is 1 s, but must be 0",
		"0,1\n1\n":        "rates: line 2: expected a time in seconds and a rate",
		"0;5,3\n1;2,5\n":  "rates: line 1: expected a time in seconds and a rate in Mbit/s, decimals with a point",
		"t,x,y\n0,1,2\n":  "rates: line 2: expected a time in seconds and a rate in Mbit/s, decimals with a point",
		"0,1e9\n1,2\n":    `rates: line 1: "1e9" is not a number from 0 to 1000000`,
		"0,NaN\n0,2\n":    `rates: line 1: "NaN" is not a number`,
		"0,1\n1,x\n":      `rates: line 2: "x" is not a number`,
		"0,0\n1,0\n":      "rates carries nothing in 2s: give it a rate above 0",
		"0,1e-6\n1,0\n":   "rates carries nothing in 2s",
		"0,1\n1,-1\n":     `rates: line 2: "-1" is not a number`,
		"0,1\n1,1\n1,2\n": "rates: line 3: the time 1s is not after",
	} {
		_, err := ReadRates("rates", strings.NewReader(text))
		assert.ErrorContains(t, err, says, text)
	}
}

func FuzzReadRates(f *testing.F) {
	f.Add([]byte("0,12\n1,6\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if trace, err := ReadRates("fuzz", bytes.NewReader(text)); err == nil {
			assert.Positive(t, trace.Duration())
			Summarise(trace)
		}
	})
}

// The way from a server on this machine carries what the server sends.
func TestAWayIsRecorded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	udp, err := net.ListenPacket("udp", l.Addr().String())
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	over := make(chan error)
	go func() { over <- serve(ctx, l, udp.(*net.UDPConn), 8e6) }()
	for range 2 {
		trace, err := Record(ctx, l.Addr().String(), 100e6, 1500*time.Millisecond)
		require.NoError(t, err)
		s := Summarise(trace)
		assert.Equal(t, 1500*time.Millisecond, s.Length)
		assert.Positive(t, s.Opportunities)
		assert.LessOrEqual(t, s.Mean.Mbps(), 12., "no more than the server gives, and what waited in the socket")
	}
	stop()
	require.NoError(t, <-over)
}

// A trace of a link that carried nothing would be one of an unused link.
func TestALinkThatCarriedNothingIsNotRecorded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	udp, err := net.ListenPacket("udp", l.Addr().String())
	require.NoError(t, err)
	defer udp.Close()
	need.Serve(t, l, func(conn net.Conn) {
		word := make([]byte, nonce)
		_, _ = io.ReadFull(conn, word[:request])
		_, _ = conn.Write(word)
		if _, from, err := udp.ReadFrom(word); err == nil {
			_, _ = udp.WriteTo(make([]byte, payload), from) // which says that the way is open
		}
		_, _ = io.Copy(io.Discard, conn)
	})
	_, err = Record(t.Context(), l.Addr().String(), 8e6, 20*time.Millisecond)
	assert.ErrorContains(t, err, "carried less than one packet of 1500 bytes in 20ms: record for longer")
}

// A server that is gone is no outage of the link; silence is one.
func TestADeadServerIsNoOutage(t *testing.T) {
	stopped := errors.New("stopped")
	for name, c := range map[string]struct {
		end    func(conn *net.TCPConn, udp net.PacketConn, stop context.CancelCauseFunc)
		before bool // a datagram has come
		says   error
	}{
		"ends": {end: func(conn *net.TCPConn, _ net.PacketConn, _ context.CancelCauseFunc) {
			_ = conn.Close()
		}, says: io.EOF},
		"refuses": {end: func(_ *net.TCPConn, udp net.PacketConn, _ context.CancelCauseFunc) {
			_ = udp.Close()
		}, before: true, says: unix.ECONNREFUSED},
		"resets": {end: func(conn *net.TCPConn, _ net.PacketConn, _ context.CancelCauseFunc) {
			_ = conn.SetLinger(0)
			_ = conn.Close()
		}, says: unix.ECONNRESET},
		"goes on, but we are told to end": {end: func(_ *net.TCPConn, _ net.PacketConn, stop context.CancelCauseFunc) {
			stop(stopped)
		}, says: stopped},
		"is silent": {end: func(*net.TCPConn, net.PacketConn, context.CancelCauseFunc) {}},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			udp, err := net.ListenPacket("udp", l.Addr().String())
			require.NoError(t, err)
			defer udp.Close()
			ctx, stop := context.WithCancelCause(t.Context())
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				word := make([]byte, nonce)
				_, _ = io.ReadFull(conn, word[:request])
				if c.before {
					c.end(conn.(*net.TCPConn), udp, stop)
				}
				_, _ = conn.Write(word)
				if _, from, err := udp.ReadFrom(word); err == nil {
					for range 3 {
						_, _ = udp.WriteTo(make([]byte, payload), from)
					}
				}
				if !c.before {
					c.end(conn.(*net.TCPConn), udp, stop)
				}
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			}()
			lasts := time.Minute
			if c.says == nil {
				lasts = 20 * time.Millisecond
			}
			trace, err := Record(ctx, l.Addr().String(), 8e6, lasts)
			require.ErrorIs(t, err, c.says)
			if c.says == nil {
				assert.Equal(t, lasts, trace.Duration())
			}
		})
	}
}

func TestNobodyIsFloodedWhoDidNotAsk(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	udp, err := net.ListenPacket("udp", l.Addr().String())
	require.NoError(t, err)
	defer udp.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	conn, err := l.Accept()
	require.NoError(t, err)
	over := make(chan error)
	go func() { over <- fill(conn, udp.(*net.UDPConn), 8e6) }()
	_, err = client.Write(make([]byte, request-1))
	require.NoError(t, err)
	require.NoError(t, client.Close())
	assert.Error(t, <-over, "half a request")
	require.NoError(t, l.Close())
}
