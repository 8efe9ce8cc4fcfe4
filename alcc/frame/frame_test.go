package frame

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// sample is an acknowledgement with all fields.
var sample = Acknowledgement{
	Offset: 1 << 40, Records: 3, Gap: 12 * time.Millisecond, Held: 7 * time.Microsecond, Clock: 1 << 33,
	Full: true, Fin: true,
}

// forecast is one of a link that delivers less and less.
var forecast = cc.SproutForecast{ReceivedOrLost: 1 << 33, Counts: [8]int{9, 17, 24, 30, 35, 39, 42, 300}}

func TestAForecastIsReadAsItWasWritten(t *testing.T) {
	kind, body, _, err := Parse(AppendForecast(nil, forecast))
	require.NoError(t, err)
	assert.Equal(t, Forecast, kind)
	got, err := ParseForecast(body)
	require.NoError(t, err)
	assert.Equal(t, forecast, got)
	_, body, _, err = Parse(AppendIdle(nil, 50*time.Millisecond))
	require.NoError(t, err)
	pause, err := ParseIdle(body)
	require.NoError(t, err)
	assert.Equal(t, 50*time.Millisecond, pause)
	_, err = ParseForecast(body[:len(body)-1])
	require.ErrorIs(t, err, ErrFormat)
}

func TestRecordsAreReadAsTheyWereWritten(t *testing.T) {
	data := bytes.Repeat([]byte("x"), DataBytes)
	stream := AppendFin(AppendAck(AppendData(nil, data), sample))
	kind, body, n, err := Parse(stream)
	require.NoError(t, err)
	assert.Equal(t, Data, kind)
	assert.Equal(t, data, body)
	assert.Equal(t, 1448, n, "a full record fills a segment")
	kind, body, m, err := Parse(stream[n:])
	require.NoError(t, err)
	assert.Equal(t, Ack, kind)
	got, err := ParseAck(append(body[:len(body):len(body)], 9)) // of a later version
	require.NoError(t, err)
	assert.Equal(t, sample, got)
	kind, body, k, err := Parse(stream[n+m:])
	require.NoError(t, err)
	assert.Equal(t, Fin, kind)
	assert.Empty(t, body)
	assert.Len(t, stream, n+m+k)
	for cut := range m {
		_, _, size, err := Parse(stream[n : n+cut])
		require.NoError(t, err)
		assert.Zero(t, size, "a part of a record is none")
	}
}

func TestAnAcknowledgementOfALongDownloadIsShort(t *testing.T) {
	b := AppendAck(nil, Acknowledgement{
		Offset: 1 << 34, Records: 2, Gap: 2 * time.Millisecond, Held: 50, Clock: 1 << 20,
	})
	assert.LessOrEqual(t, len(b), 16)
}

func TestStrangersAndOtherVersionsAreTold(t *testing.T) {
	hello := AppendHello(nil, true)
	require.Len(t, hello, HelloBytes)
	got, err := ParseHello(hello)
	require.NoError(t, err)
	assert.Equal(t, Hello{Forecasts: true, Largest: MaxRecord}, got)
	_, err = ParseHello([]byte("GET / HTTP/1.1\r\n"))
	require.ErrorIs(t, err, ErrNoHello)
	other := bytes.Clone(hello)
	other[len(magic)] = 2
	_, err = ParseHello(other)
	require.ErrorIs(t, err, VersionError{2})
	require.ErrorContains(t, err, "update the older one")
	small := bytes.Clone(hello)
	copy(small[len(magic)+2:], []byte{0, 0, 0, 9})
	_, err = ParseHello(small)
	require.ErrorIs(t, err, ErrFormat)
}

func FuzzParse(f *testing.F) {
	f.Add(AppendHello(nil, false))
	acknowledged := AppendAck(AppendData(nil, []byte("data")), sample)
	f.Add(AppendForecast(AppendIdle(AppendFin(acknowledged), time.Second), forecast))
	f.Add([]byte{2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = ParseHello(b)
		for {
			kind, body, n, err := Parse(b)
			if err != nil || n == 0 {
				return
			}
			require.LessOrEqual(t, n, len(b))
			require.LessOrEqual(t, len(body), MaxRecord)
			_, _ = ParseIdle(body)
			if kind == Forecast {
				if f, err := ParseForecast(body); err == nil {
					again, err := ParseForecast(AppendForecast(nil, f)[2:])
					require.NoError(t, err)
					require.Equal(t, f, again)
				}
			}
			if kind == Ack {
				if a, err := ParseAck(body); err == nil {
					again, err := ParseAck(AppendAck(nil, a)[2:])
					require.NoError(t, err)
					require.Equal(t, a, again)
				}
			}
			b = b[n:]
		}
	})
}
