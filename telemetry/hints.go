package telemetry

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

const (
	maxHintBytes = 64 << 10 // of a request
	maxHints     = 256      // in a request
	maxHintAge   = time.Minute
	maxHintRate  = 1e15 // bit/s
	maxHintSize  = 1e15 // bytes
	maxHintFlows = 1e9
)

// Hint is cc.Hint as /v1/hints takes it. What is left out is not known.
type Hint struct {
	Host        string  `json:"host"`   // address of the host that the path leads to
	Prefix      string  `json:"prefix"` // or of the hosts
	Age         float64 `json:"age_ms"`
	Capacity    float64 `json:"capacity_bits_per_second"`
	FairShare   float64 `json:"fair_share_bits_per_second"`
	LinkRate    float64 `json:"link_rate_bits_per_second"`
	ArrivalRate float64 `json:"arrival_rate_bits_per_second"`
	QueueRoom   float64 `json:"queue_room_bytes"`
	Flows       float64 `json:"flows"`
	RadioLost   float64 `json:"radio_lost_bytes"` // cumulative
	Share       float64 `json:"share"`            // of the link's rate
}

// errTooMany is the answer to more hints than a request may have.
var errTooMany = fmt.Errorf("a request has at most %d hints", maxHints)

// readHints parses one hint or an array of them, and nothing else.
func readHints(r io.Reader) ([]Hint, error) {
	in := bufio.NewReader(r)
	many, err := opensArray(in)
	if err != nil {
		return nil, fmt.Errorf("read the hint: %w", err)
	}
	d := json.NewDecoder(in)
	d.DisallowUnknownFields()
	var hints []Hint
	if many {
		hints, err = readArray(d)
	} else {
		hints = make([]Hint, 1)
		err = d.Decode(&hints[0])
	}
	if err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return hints, nil
		}
		if err == nil {
			err = errors.New("something follows it")
		}
	}
	return nil, fmt.Errorf("read the hint: %w", err)
}

// opensArray looks at the first byte that means something.
func opensArray(in *bufio.Reader) (bool, error) {
	for {
		c, err := in.ReadByte()
		if err != nil {
			return false, err
		}
		switch c {
		case ' ', '\t', '\r', '\n':
		default:
			return c == '[', in.UnreadByte()
		}
	}
}

func readArray(d *json.Decoder) ([]Hint, error) {
	var hints []Hint
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	for d.More() {
		if len(hints) == maxHints {
			return nil, errTooMany
		}
		var h Hint
		if err := d.Decode(&h); err != nil {
			return nil, err
		}
		hints = append(hints, h)
	}
	_, err := d.Token()
	return hints, err
}

// checkHint returns whom h is about, and what is wrong with it.
func (h Hint) checkHint() (netip.Prefix, error) {
	about, err := h.hintPrefix()
	if err != nil {
		return about, err
	}
	for _, v := range []struct {
		name        string
		value, most float64
	}{
		{"age_ms", h.Age, float64(maxHintAge.Milliseconds())},
		{"capacity_bits_per_second", h.Capacity, maxHintRate},
		{"fair_share_bits_per_second", h.FairShare, maxHintRate},
		{"link_rate_bits_per_second", h.LinkRate, maxHintRate},
		{"arrival_rate_bits_per_second", h.ArrivalRate, maxHintRate},
		{"queue_room_bytes", h.QueueRoom, maxHintSize},
		{"flows", h.Flows, maxHintFlows},
		{"radio_lost_bytes", h.RadioLost, maxHintSize},
		{"share", h.Share, 1},
	} {
		if v.value < 0 || v.value > v.most {
			return about, fmt.Errorf("%s is %v, but must be from 0 to %v", v.name, v.value, v.most)
		}
	}
	return about, nil
}

// hintPrefix returns the hosts that the path leads to.
func (h Hint) hintPrefix() (netip.Prefix, error) {
	if h.Host != "" && h.Prefix != "" {
		return netip.Prefix{}, errors.New("a hint is about a host or a prefix, not both")
	}
	if h.Prefix != "" {
		p, err := netip.ParsePrefix(h.Prefix)
		if err != nil || p.Addr().Is4In6() {
			return p, fmt.Errorf("prefix is %q, but must be one such as 192.0.2.0/24 or 2001:db8:7::/48", h.Prefix)
		}
		return p.Masked(), nil
	}
	host, err := netip.ParseAddr(h.Host)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("host is %q, but must be an address such as 192.0.2.7", h.Host)
	}
	host = host.Unmap()
	return netip.PrefixFrom(host, host.BitLen()), nil
}

// hintAt is the hint as of now.
func (h Hint) hintAt(now cc.Time) cc.Hint {
	return cc.Hint{
		At:       max(1, now.Add(-time.Duration(h.Age*float64(time.Millisecond)))),
		Capacity: cc.Rate(h.Capacity), FairShare: cc.Rate(h.FairShare),
		LinkRate: cc.Rate(h.LinkRate), ArrivalRate: cc.Rate(h.ArrivalRate),
		QueueRoom: cc.Bytes(h.QueueRoom), Flows: int(h.Flows), RadioLost: cc.Bytes(h.RadioLost), Share: h.Share,
	}
}
