package sim

import "github.com/penstock-net/penstock/cc"

// forecastBytes is a forecast's size on the wire.
const forecastBytes = HeaderBytes + 50

// forecasts are what a receiver tells a sender that has an algorithm for them.
type forecasts struct {
	receiver *cc.SproutReceiver
	sends    alarm
	newest   cc.Time // when one was sent
}

// newForecasts returns those for an algorithm; nil: it takes none.
func (s *sender) newForecasts(algorithm string, params cc.Params) *forecasts {
	if !cc.TakesForecasts(algorithm, params) {
		return nil
	}
	receiver, err := cc.NewSproutReceiver(s.w.now, nil)
	if err != nil {
		s.w.err = err
	}
	return &forecasts{receiver: receiver, sends: s.w.alarm(s.sendForecast)}
}

// describeForForecast says what a packet of size bytes that leaves now tells the receiver.
func (s *sender) describeForForecast(size cc.Bytes) cc.SproutPacket {
	p := cc.SproutPacket{Seq: s.transmitted, Size: size, Behind: ReorderPackets * cc.DefaultMSS}
	s.transmitted += size
	n, _ := s.src.available(s.w.now)
	hasData := n > 0 || s.wrote > s.sent
	if !hasData || s.board.Pipe+cc.DefaultMSS > s.limit {
		p.Pause = cc.SproutPause(s.board.SRTT(), hasData)
	}
	return p
}

// noteForForecast takes in a packet at the receiver, and plans a forecast.
func (s *sender) noteForForecast(p cc.SproutPacket) {
	s.forecasts.receiver.OnPacket(s.w.now, p)
	s.forecasts.sends.planBy(max(s.forecasts.newest.Add(cc.SproutTick), s.w.now))
}

// sendForecast sends one to the sender.
func (s *sender) sendForecast() {
	if s.closed || s.w.now.Sub(s.rcv.newest) > cc.SproutSilence {
		return
	}
	f := s.forecasts.receiver.Forecast(s.w.now)
	s.forecasts.newest = s.w.now
	s.forecasts.sends.planBy(s.w.now.Add(cc.SproutTick))
	s.w.carry(!s.cfg.Upload, s.host, forecastBytes, s.number, NotECT, func(v Verdict) {
		if v.Dropped != DropNone {
			return
		}
		s.w.at(v.Arrives.Add(s.cfg.Delay), func() {
			if !s.closed {
				s.flow.TakeForecast(s.w.now, s.transmitted, f)
				s.pump()
			}
		})
	})
}
