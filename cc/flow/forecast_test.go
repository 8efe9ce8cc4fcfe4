package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// forecastLink is a link between a flow and a receiver that forecasts.
type forecastLink struct {
	rate   float64 // segments per second
	oneWay time.Duration
}

// play runs a flow of sprout over the link and returns the part of the link that it uses and the mean time in the
// queue.
func (l forecastLink) play(
	t *testing.T, drain float64, length time.Duration,
) (utilisation float64, queueing time.Duration) {
	t.Helper()
	type packet struct {
		cc.SproutPacket
		sent, at cc.Time
	}
	type answer struct {
		acked    cc.Bytes
		forecast *cc.SproutForecast
		at       cc.Time
	}
	p := newTestbed(t)
	f := p.open(Terms{Group: "a flow", Algorithm: "sprout", Params: cc.Params{"drain": drain}})
	receiver, err := cc.NewSproutReceiver(p.now, nil)
	require.NoError(t, err)
	var queue, flying []packet
	var answers []answer
	var came, received cc.Bytes
	credit, delivered := 0.0, 0
	for start := p.now; p.now < start.Add(length); p.wait(time.Millisecond) {
		for credit += l.rate / 1000; credit >= 1; credit-- {
			if len(queue) > 0 {
				queueing += p.now.Sub(queue[0].sent)
				queue[0].at = p.now.Add(l.oneWay)
				flying, queue = append(flying, queue[0]), queue[1:]
				delivered++
			}
		}
		before := received
		for ; len(flying) > 0 && flying[0].at <= p.now; flying = flying[1:] {
			receiver.OnPacket(p.now, flying[0].SproutPacket)
			received += flying[0].Size
		}
		a := answer{acked: received, at: p.now.Add(l.oneWay)}
		if p.now.Sub(start)%(20*time.Millisecond) == 0 {
			forecast := receiver.Forecast(p.now)
			a.forecast = &forecast
		}
		if a.forecast != nil || received > before {
			answers = append(answers, a)
		}
		for ; len(answers) > 0 && answers[0].at <= p.now; answers = answers[1:] {
			a := answers[0]
			if n := a.acked - came; n > 0 {
				came = a.acked
				f.r.RTT = 2 * l.oneWay
				f.ack(n)
			}
			if a.forecast != nil {
				f.TakeForecast(p.now, f.r.Written, *a.forecast)
			}
		}
		for wakes := -1; wakes != f.wakes; {
			wakes = f.wakes
			next := f.r.Written
			for n := f.send(200 * mss); n > 0; n -= mss {
				queue = append(queue, packet{cc.SproutPacket{Seq: next, Size: min(n, mss)}, p.now, 0})
				next += min(n, mss)
				if n <= mss {
					queue[len(queue)-1].Pause = 50 * time.Millisecond
				}
			}
		}
	}
	return float64(delivered) / (l.rate * length.Seconds()), queueing / time.Duration(max(1, delivered))
}

func TestFlowFollowsForecasts(t *testing.T) {
	for _, tt := range []struct {
		drain float64
		rates []float64 // segments per second
	}{
		{0, []float64{200, 450, 900}},
		{1, []float64{100, 200, 450, 900}},
	} {
		for _, rate := range tt.rates {
			link := forecastLink{rate: rate, oneWay: 10 * time.Millisecond}
			utilisation, queueing := link.play(t, tt.drain, 20*time.Second)
			assert.Greater(t, utilisation, 0.98, "drain %v, %v segments/s", tt.drain, rate)
			assert.Less(t, queueing, 60*time.Millisecond, "drain %v, %v segments/s", tt.drain, rate)
		}
	}
}
