package native

import (
	"context"
	"encoding/binary"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) { os.Exit(need.Run(m)) }

func data(token, tx uint64) []byte {
	b := make([]byte, DataBytes)
	writeData(b, token, tx, 0, 0)
	return b
}

func TestAnAcknowledgementRepeatsWhatEarlierOnesTold(t *testing.T) {
	r := arrivals{token: 7}
	for _, tx := range []uint64{1, 2, 5, 4, 67} {
		_, ok := r.take(data(7, tx))
		require.True(t, ok)
	}
	a, ok := r.take(data(7, 3))
	require.True(t, ok)
	read, ok := parseAck(a.write(nil, 7), 7)
	require.True(t, ok)
	assert.Equal(t, a, read)
	var told []uint64
	read.each(func(tx uint64) { told = append(told, tx) })
	assert.Equal(t, []uint64{67, 5, 4, 3}, told, "1 and 2 are too long ago, and 6 has not come")
}

func TestASegmentArrivesOnce(t *testing.T) {
	r := arrivals{token: 7}
	var fresh []bool
	for tx, segment := range []uint64{0, 2, 2, 1, 0, 3, 1 << 62, 1 << 62} {
		b := data(7, uint64(tx)+1)
		writeData(b, 7, uint64(tx)+1, segment, 0)
		fresh = append(fresh, r.isNew(b))
	}
	assert.Equal(t, []bool{true, true, false, true, false, true, true, false}, fresh)
	assert.EqualValues(t, 4, r.next)
	assert.Len(t, r.above, 1, "what has no hole below it is forgotten")
}

func TestStrangersAreNotAnswered(t *testing.T) {
	r := arrivals{token: 7}
	for name, b := range map[string][]byte{
		"another's": data(8, 1), "too short": data(7, 1)[:100], "no number": data(7, 0), "nothing": nil,
	} {
		_, ok := r.take(b)
		assert.False(t, ok, name)
	}
	for name, a := range map[string]ack{"nothing yet": {}, "beyond the highest": {tx: 5, highest: 4}} {
		_, ok := parseAck(a.write(nil, 7), 7)
		assert.False(t, ok, name)
	}
	_, ok := parseAck(ack{tx: 1, highest: 1}.write(nil, 8), 7)
	assert.False(t, ok, "another's")
}

func FuzzForecasts(f *testing.F) {
	f.Add(writeForecast(nil, 7, cc.SproutForecast{ReceivedOrLost: 9, Counts: [8]int{0, 1, 1, 2, 3, 5, 8, 13}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if read, ok := parseForecast(b, 7); ok {
			assert.Equal(t, b, writeForecast(nil, 7, read))
			assert.True(t, slices.IsSorted(read.Counts[:]))
		}
	})
}

// TestForecastsGoOnForASecond has a receiver forecast for Sprout's sender while the link is silent, and then rest.
func TestForecastsGoOnForASecond(t *testing.T) {
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	require.NoError(t, err)
	received := make(chan error, 1)
	go func() { received <- Receive(conn, func(cc.Bytes) {}) }()
	sender, err := net.Dial("udp4", conn.LocalAddr().String())
	require.NoError(t, err)
	defer sender.Close()
	listen := func(wants uint16, tx uint64) (acks, forecasts int) {
		b := data(7+uint64(wants), tx)
		binary.BigEndian.PutUint16(b[24:], wants)
		_, err := sender.Write(b)
		require.NoError(t, err)
		require.NoError(t, sender.SetReadDeadline(time.Now().Add(silence+silence/2)))
		for reply := make([]byte, 100); ; {
			n, err := sender.Read(reply)
			if err != nil {
				return acks, forecasts
			}
			if _, ok := parseForecast(reply[:n], 7+uint64(wants)); ok {
				forecasts++
			} else {
				acks++
			}
		}
	}
	acks, forecasts := listen(1, 1)
	assert.Equal(t, 1, acks)
	assert.Greater(t, forecasts, 1)
	assert.LessOrEqual(t, forecasts, 1+int((silence+silence/4)/cc.SproutTick))
	acks, forecasts = listen(0, 1) // another sender, of another algorithm
	assert.Equal(t, 1, acks)
	assert.Zero(t, forecasts)
	require.NoError(t, conn.Close())
	require.NoError(t, <-received)
}

func FuzzAcknowledgements(f *testing.F) {
	f.Add(ack{tx: 3, highest: 9, mask: 0xff}.write(nil, 7), 12)
	f.Add(ack{tx: 1, highest: 1 << 63, mask: 1<<64 - 1}.write(nil, 7), 1)
	f.Fuzz(func(t *testing.T, b []byte, sent int) {
		o, now := newOutstanding(), cc.Time(time.Second)
		for range min(max(sent, 0), 300) {
			o.send(now)
		}
		if a, ok := parseAck(b, 7); ok {
			o.take(now.Add(time.Millisecond), a, 0)
		}
		assert.GreaterOrEqual(t, o.report.Pipe, cc.Bytes(0))
		assert.LessOrEqual(t, o.report.Acked+o.report.Pipe, o.report.Written)
	})
}

// Whatever a path loses, delays and reorders, all of the stream arrives, and what the
// reports say is what happened.
func TestAllArrivesOverAnyPath(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const segments = 200
		loss := rapid.Float64Range(0, 0.4).Draw(t, "loss")
		window := cc.Bytes(rapid.IntRange(1, 50).Draw(t, "window")) * payload
		longest := rapid.SampledFrom([]int{50, 1000}).Draw(t, "longest") // so long that timers fire too soon
		type event struct {
			at  cc.Time
			run func()
		}
		var queue []event
		now := cc.Time(time.Second)
		plan := func(after int, run func()) { // ms
			queue = append(queue, event{now.Add(time.Duration(after) * time.Millisecond), run})
		}
		lost := func() bool { return rapid.Float64Range(0, 1).Draw(t, "chance") < loss }
		delay := func() int { return rapid.IntRange(1, longest).Draw(t, "delay") }
		o, r := newOutstanding(), arrivals{token: 1}
		arrivedOnce := map[int64]bool{}
		send := func() {
			for o.allows(window) {
				n, again := o.next()
				if !again && n >= segments {
					return
				}
				tx := o.send(now)
				if lost() {
					continue
				}
				plan(delay(), func() {
					a, ok := r.take(data(1, tx))
					require.True(t, ok)
					arrivedOnce[n] = true
					if lost() {
						return
					}
					plan(delay(), func() {
						if o.take(now, a, window) {
							assert.Positive(t, o.report.Acked)
						}
					})
				})
			}
		}
		var acked cc.Bytes
		for steps := 0; o.report.Acked < segments*payload; steps++ {
			require.Less(t, steps, 200_000, "it goes on for ever")
			send()
			next := -1
			for i, e := range queue {
				if next < 0 || e.at < queue[next].at {
					next = i
				}
			}
			if due := o.Deadline(); next < 0 || due < queue[next].at {
				require.NotEqual(t, cc.Never, due, "nothing is on its way, and nothing will be")
				now = max(now, due)
				require.True(t, o.look(now))
				continue
			}
			e := queue[next]
			queue = append(queue[:next], queue[next+1:]...)
			now = e.at
			e.run()
			assert.GreaterOrEqual(t, o.report.Acked, acked)
			acked = o.report.Acked
			assert.GreaterOrEqual(t, o.report.Pipe, cc.Bytes(0))
			assert.GreaterOrEqual(t, o.report.Sacked, cc.Bytes(0))
			assert.LessOrEqual(t, o.report.Newest, o.report.Written)
		}
		assert.Len(t, arrivedOnce, segments)
		assert.Zero(t, o.report.Pipe)
	})
}

func TestThreeLaterArrivalsAreALoss(t *testing.T) {
	o, now := newOutstanding(), cc.Time(time.Second)
	for range 5 {
		o.send(now)
	}
	now = now.Add(10 * time.Millisecond)
	require.True(t, o.take(now, ack{tx: 3, highest: 3, mask: 0b01}, 0))
	assert.Equal(t, cc.Time(time.Second).Add(10*time.Millisecond*9/8), o.Deadline(), "transmission 1 may yet come")
	require.True(t, o.take(now, ack{tx: 4, highest: 4, mask: 0b011}, 0))
	n, lost := o.next()
	assert.True(t, lost)
	assert.Zero(t, n)
	assert.Equal(t, 10*time.Millisecond, o.report.RTT)
	assert.Equal(t, 3*payload, o.report.Sacked)
	assert.Zero(t, o.report.Lost, "until it is sent again")
	o.send(now)
	assert.Equal(t, payload, o.report.Lost)
}

// A sender with a fixed window fills the path to its receiver, and ends when it is told.
func TestDataReachTheReceiver(t *testing.T) {
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	require.NoError(t, err)
	got := &counter{PacketConn: conn, enough: make(chan struct{})}
	received, came := make(chan error, 1), cc.Bytes(0)
	go func() { received <- Receive(got, func(n cc.Bytes) { came += n }) }()
	local, ok := conn.LocalAddr().(*net.UDPAddr)
	require.True(t, ok)
	s, err := Open(local.AddrPort(), "static", cc.Params{"cwnd_packets": 20})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	all, again := cc.Bytes(0), cc.Bytes(0)
	go func() { sent <- s.Run(ctx, func(a, b cc.Bytes) { all, again = a, b }) }()
	<-got.enough
	stop()
	require.NoError(t, <-sent)
	require.NoError(t, conn.Close())
	require.NoError(t, <-received)
	assert.GreaterOrEqual(t, all-again, enough*payload)
	assert.GreaterOrEqual(t, all-again, came)
	assert.Positive(t, came)
}

// enough is how many packets of a test's sender arrive.
const enough = 2000

// counter tells when enough packets have come.
type counter struct {
	net.PacketConn
	n      int
	enough chan struct{}
}

func (c *counter) ReadFrom(b []byte) (int, net.Addr, error) {
	n, from, err := c.PacketConn.ReadFrom(b)
	if c.n++; err == nil && c.n == enough {
		close(c.enough)
	}
	return n, from, err
}
