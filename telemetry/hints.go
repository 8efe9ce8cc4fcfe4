package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

const (
	maxHintBytes = 4 << 10
	maxHintAge   = time.Minute
	maxHintRate  = 1e15 // bit/s
	maxHintSize  = 1e15 // bytes
	maxHintFlows = 1e9
)

// Hint is cc.Hint as /v1/hints takes it. What is left out is not known.
type Hint struct {
	Host        string  `json:"host"` // address of the host that the path leads to
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

// hint takes one. Who may is whoever reaches a loopback listener; a page in a
// browser there cannot send JSON here without asking first, and is not answered.
func (p Pages) hint(w http.ResponseWriter, r *http.Request, local bool) {
	if !local {
		http.Error(w, "hints are taken on a loopback address only; move telemetry.address there", http.StatusForbidden)
		return
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		http.Error(w, "a hint is JSON: send Content-Type: application/json", http.StatusUnsupportedMediaType)
		return
	}
	h, err := readHint(http.MaxBytesReader(w, r.Body, maxHintBytes))
	if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
		http.Error(w, fmt.Sprintf("a hint has at most %d bytes", maxHintBytes), http.StatusRequestEntityTooLarge)
		return
	}
	var host netip.Addr
	if err == nil {
		host, err = h.check()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	groups := p.Hint(netip.PrefixFrom(host, host.BitLen()), h.at(p.Clock()))
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, "{\"groups\":%d}\n", groups)
}

// readHint parses one hint and nothing else.
func readHint(r io.Reader) (h Hint, err error) {
	d := json.NewDecoder(r)
	d.DisallowUnknownFields()
	if err = d.Decode(&h); err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return h, nil
		}
		if err == nil {
			err = errors.New("something follows it")
		}
	}
	return h, fmt.Errorf("read the hint: %w", err)
}

// check returns the host, and what is wrong with the rest.
func (h Hint) check() (netip.Addr, error) {
	host, err := netip.ParseAddr(h.Host)
	if err != nil {
		return host, fmt.Errorf("host is %q, but must be an address such as 192.0.2.7", h.Host)
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
			return host, fmt.Errorf("%s is %v, but must be from 0 to %v", v.name, v.value, v.most)
		}
	}
	return host, nil
}

// at is the hint as of now.
func (h Hint) at(now cc.Time) cc.Hint {
	return cc.Hint{
		At:       max(1, now.Add(-time.Duration(h.Age*float64(time.Millisecond)))),
		Capacity: cc.Rate(h.Capacity), FairShare: cc.Rate(h.FairShare),
		LinkRate: cc.Rate(h.LinkRate), ArrivalRate: cc.Rate(h.ArrivalRate),
		QueueRoom: cc.Bytes(h.QueueRoom), Flows: int(h.Flows), RadioLost: cc.Bytes(h.RadioLost), Share: h.Share,
	}
}
