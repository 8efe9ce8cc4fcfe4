package native

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// silence is how long a sender must have sent nothing before a receiver takes up another.
const silence = time.Second

// startOf returns how many bytes were sent before a transmission.
func startOf(tx uint64) cc.Bytes { return cc.Bytes(tx-1) * payload } //nolint:gosec // transmissions are counted from 1

// receiver answers the packets of one sender at a time.
type receiver struct {
	conn  net.PacketConn
	began time.Time
	arrivals
	from  net.Addr
	heard cc.Time // when the sender's latest packet came; 0: there is no sender

	forecaster *cc.SproutReceiver // nil: the sender wants no forecasts
	forecastAt cc.Time            // when the next one is due; 0: none is
}

// Receive answers the packets of one sender at a time until conn is closed. It calls took with the payload of each
// segment that had not come before.
func Receive(conn net.PacketConn, took func(cc.Bytes)) error {
	r := receiver{conn: conn, began: time.Now()}
	buf, reply := make([]byte, DataBytes+1), make([]byte, 0, forecastBytes)
	for {
		n, from, err := conn.ReadFrom(buf)
		now := cc.Time(time.Since(r.began) + time.Second)
		switch {
		case err == nil:
			reply = r.answer(now, buf[:n], from, reply[:0], took)
		case errors.Is(err, os.ErrDeadlineExceeded): // of the next forecast, or of one that is not due any more
			reply = reply[:0]
			_ = conn.SetReadDeadline(time.Time{}) // an error shows in ReadFrom
		case errors.Is(err, net.ErrClosed):
			return nil
		default:
			return fmt.Errorf("native: receive: %w", err)
		}
		if err := r.send(reply); err != nil {
			return err
		}
		if r.forecastAt > 0 && now >= r.forecastAt {
			if err := r.forecast(now, reply[:0]); err != nil {
				return err
			}
		}
	}
}

// send sends a reply to the sender; an empty one is none.
func (r *receiver) send(reply []byte) error {
	if len(reply) == 0 {
		return nil
	}
	if _, err := r.conn.WriteTo(reply, r.from); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("native: answer: %w", err)
	}
	return nil
}

// answer takes in a packet and appends the acknowledgement of it to reply.
func (r *receiver) answer(now cc.Time, b []byte, from net.Addr, reply []byte, took func(cc.Bytes)) []byte {
	if len(b) == DataBytes && (r.heard == 0 || now.Sub(r.heard) > silence) {
		if token := binary.BigEndian.Uint64(b); token != r.token {
			r.arrivals, r.forecaster, r.forecastAt = arrivals{token: token}, nil, 0
		}
	}
	a, ok := r.take(b)
	if !ok {
		return reply
	}
	r.heard, r.from = now, from
	if wants := binary.BigEndian.Uint16(b[24:]); wants > 0 {
		r.noteForForecast(now, cc.SproutPacket{
			Seq: startOf(a.tx), Size: payload, Behind: sim.ReorderPackets * payload,
			Pause: time.Duration(wants-1) * time.Millisecond,
		})
	}
	if r.isNew(b) {
		took(payload)
	}
	return a.write(reply, r.token)
}

// noteForForecast takes in a packet of a sender that wants forecasts.
func (r *receiver) noteForForecast(now cc.Time, p cc.SproutPacket) {
	if r.forecaster == nil {
		r.forecaster, _ = cc.NewSproutReceiver(now, nil) // sprout's defaults are no error
	}
	r.forecaster.OnPacket(now, p)
	if r.forecastAt == 0 {
		r.forecastAt = now
	}
}

// forecast sends a forecast. The next one is due on a grid, so that one late forecast makes no others late. There is
// none after a silence.
func (r *receiver) forecast(now cc.Time, reply []byte) error {
	err := r.send(writeForecast(reply, r.token, r.forecaster.Forecast(now)))
	r.forecastAt = max(r.forecastAt.Add(cc.SproutTick), now.Add(cc.SproutTick/2))
	due := r.began.Add(time.Duration(r.forecastAt) - time.Second)
	if now.Sub(r.heard) > silence {
		r.forecastAt, due = 0, time.Time{}
	}
	_ = r.conn.SetReadDeadline(due) // an error shows in ReadFrom
	return err
}
