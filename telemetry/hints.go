package telemetry

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// hintRate is how many hints are taken in a second, and how many at once, over TCP and the Unix socket together.
const hintRate = 1000

// HintReceiver takes what the network says about paths: over TCP from this machine or with a token, and over a Unix
// socket from any program that may open it. It is safe for concurrent use.
type HintReceiver struct {
	// Pass hands a hint to the groups of flows to p, and returns how many there are.
	Pass  func(p netip.Prefix, h cc.Hint) (groups int)
	Clock func() cc.Time // the flows' clock
	Log   *slog.Logger   // nil: silent

	token    token
	outcomes tally[HintOutcome]

	// A token bucket of hintRate.
	mu      sync.Mutex
	allowed float64 // hints that may come at once
	filled  cc.Time // when allowed was last raised; 0: never
}

// HintOutcome is what became of a hint.
type HintOutcome string

// The outcomes. A request that is refused before it is read counts as one hint.
const (
	HintHeard    HintOutcome = "heard"        // by a group of flows at least
	HintUnheard  HintOutcome = "unheard"      // no flow goes there
	HintInvalid  HintOutcome = "invalid"      // not understood; none of the request's hints counts
	HintRefused  HintOutcome = "unauthorized" // without the token, or from where none are taken
	HintTooOften HintOutcome = "limited"      // more than hintRate
)

// SetToken sets the token that hints over TCP must carry from now on; empty: they need none.
func (k *HintReceiver) SetToken(secret string) { k.token.setSecret(secret) }

// Outcomes returns how many hints have come so far, by what became of them.
func (k *HintReceiver) Outcomes() map[HintOutcome]uint64 {
	return k.outcomes.outcomeCounts(HintHeard, HintUnheard, HintInvalid, HintRefused, HintTooOften)
}

// refusal is the answer to a request with hints that are not taken.
type refusal struct {
	code    int
	outcome HintOutcome
	err     error
}

// answerHints takes the hints of a request. forbidden is why it may send none; nil: it may.
func (k *HintReceiver) answerHints(w http.ResponseWriter, r *http.Request, forbidden error) {
	hints, refused := k.receiveHints(w, r, forbidden)
	if refused != nil {
		k.outcomes.countOutcome(refused.outcome, max(1, len(hints)))
		switch refused.code {
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
		case http.StatusTooManyRequests:
			w.Header().Set("Retry-After", "1")
		}
		http.Error(w, refused.err.Error(), refused.code)
		return
	}
	total := 0
	for _, h := range hints {
		groups := k.Pass(h.about, h.hint)
		total += groups
		if groups > 0 {
			k.outcomes.countOutcome(HintHeard, 1)
		} else {
			k.outcomes.countOutcome(HintUnheard, 1)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, "{\"groups\":%d}\n", total)
}

// pathHint is a hint with the hosts that its path leads to.
type pathHint struct {
	about netip.Prefix
	hint  cc.Hint
}

// receiveHints returns the hints of a request, or a refusal of them all. With a refusal for too many hints in a second
// it returns the hints as well, to be counted.
func (k *HintReceiver) receiveHints(
	w http.ResponseWriter, r *http.Request, forbidden error,
) ([]pathHint, *refusal) {
	if fromWebPage(r) { // even with the token, because a browser may have it
		return nil, &refusal{http.StatusForbidden, HintRefused, errors.New("hints are not taken from web pages")}
	}
	if forbidden != nil {
		code := http.StatusForbidden
		if errors.Is(forbidden, errToken) {
			code = http.StatusUnauthorized
		}
		return nil, &refusal{code, HintRefused, forbidden}
	}
	if !isJSON(r) {
		return nil, &refusal{
			http.StatusUnsupportedMediaType, HintInvalid,
			errors.New("a hint is JSON: send Content-Type: application/json"),
		}
	}
	hints, err := readHints(http.MaxBytesReader(w, r.Body, maxHintBytes))
	if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
		return nil, &refusal{
			http.StatusRequestEntityTooLarge, HintInvalid,
			fmt.Errorf("a request has at most %d bytes", maxHintBytes),
		}
	}
	if errors.Is(err, errTooMany) {
		return nil, &refusal{http.StatusRequestEntityTooLarge, HintInvalid, errTooMany}
	}
	if err != nil {
		return nil, &refusal{http.StatusBadRequest, HintInvalid, err}
	}
	now := k.Clock()
	out := make([]pathHint, len(hints))
	for i, h := range hints {
		about, err := h.checkHint()
		if err != nil && len(hints) > 1 {
			err = fmt.Errorf("hint %d of %d: %w", i+1, len(hints), err)
		}
		if err != nil {
			return nil, &refusal{http.StatusBadRequest, HintInvalid, err}
		}
		out[i] = pathHint{about, h.hintAt(now)}
	}
	if !k.admitHints(now, len(out)) {
		return out, &refusal{
			http.StatusTooManyRequests, HintTooOften,
			fmt.Errorf("at most %d hints a second are taken", hintRate),
		}
	}
	return out, nil
}

// admitHints takes n hints out of the token bucket, or none of them. The bucket is there because each hint takes the
// locks of groups, which connections need.
func (k *HintReceiver) admitHints(now cc.Time, n int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.filled == 0 {
		k.allowed = hintRate
	}
	k.allowed = min(hintRate, k.allowed+now.Sub(k.filled).Seconds()*hintRate)
	k.filled = max(k.filled, now)
	if k.allowed < float64(n) {
		return false
	}
	k.allowed -= float64(n)
	return true
}

// errToken refuses a request over TCP without the token.
var errToken = errors.New("hints over TCP need the token of telemetry.hints.token_file here: send Authorization: " +
	"Bearer TOKEN")

// permitTCP returns an error if a request over TCP may send no hints. It must have the token if one is set, or else be
// local.
func (k *HintReceiver) permitTCP(r *http.Request, local bool) error {
	switch given, carried := k.token.carriedBy(r); {
	case given && !carried:
		return errToken
	case !given && !local:
		return errors.New("without telemetry.hints.token_file hints are taken on a loopback address only, from " +
			"this machine; set it, move telemetry.address there, or use telemetry.hints.socket")
	}
	return nil
}

// Serve takes hints, and does nothing else, from ln until ctx ends. Any program that may connect to ln may send hints.
func (k *HintReceiver) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/hints", func(w http.ResponseWriter, r *http.Request) {
		k.answerHints(w, r, nil)
	})
	return serveHTTP(ctx, ln, mux, k.Log)
}

const (
	maxHintBytes = 64 << 10 // of a request
	maxHints     = 256      // in a request
	maxHintAge   = time.Minute
	maxHintRate  = 1e15 // bit/s
	maxHintSize  = 1e15 // bytes
	maxHintFlows = 1e9
)

// Hint is one hint as /v1/hints takes it. What is left out, or 0, is not known.
type Hint struct {
	// Host is the address that the path leads to: the client's for downloads. This or Prefix is required.
	Host   string `json:"host"`
	Prefix string `json:"prefix"` // the same for many hosts, such as a cell's: 192.0.2.0/24
	// Age is how long ago the values below were measured, up to a minute.
	Age float64 `json:"age_ms"`
	// Capacity is what the link would carry for this host now, without headers: its own part and its share of what is
	// idle. For pbe and hint_cap.
	Capacity float64 `json:"capacity_bits_per_second"`
	// FairShare is what it would carry if every active host had as much. For pbe.
	FairShare   float64 `json:"fair_share_bits_per_second"`
	LinkRate    float64 `json:"link_rate_bits_per_second"`    // of the whole link; for nacc, as all that follow
	ArrivalRate float64 `json:"arrival_rate_bits_per_second"` // at the link's queue, of all flows
	QueueRoom   float64 `json:"queue_room_bytes"`             // free in that queue
	Flows       float64 `json:"flows"`                        // how many go through it
	RadioLost   float64 `json:"radio_lost_bytes"`             // of this host's, lost to bad reception; cumulative
	// Share is the part of the link's rate that this host has by priority: above 0, up to 1. 0: the proxy works it out.
	Share float64 `json:"share"`
}

// errTooMany is the answer to more hints than a request may have.
var errTooMany = fmt.Errorf("a request has at most %d hints", maxHints)

// readHints parses one hint or an array of them, and nothing else. Unknown keys are errors, because a misspelt one
// would be a hint that says nothing.
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
		err = checkEnd(d)
	}
	if err != nil {
		return nil, fmt.Errorf("read the hint: %w", err)
	}
	return hints, nil
}

// opensArray reports whether the first byte that is no space opens an array. It leaves that byte to be read.
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

// readArray reads the hints between two brackets. It stops at the first one too many, before it takes memory for more.
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

// checkHint returns the hosts that h is about. An error says what is wrong with h.
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

// hintAt returns h for the algorithms. Age counts back from now.
func (h Hint) hintAt(now cc.Time) cc.Hint {
	return cc.Hint{
		At:       max(1, now.Add(-time.Duration(h.Age*float64(time.Millisecond)))),
		Capacity: cc.Rate(h.Capacity), FairShare: cc.Rate(h.FairShare),
		LinkRate: cc.Rate(h.LinkRate), ArrivalRate: cc.Rate(h.ArrivalRate),
		QueueRoom: cc.Bytes(h.QueueRoom), Flows: int(h.Flows), RadioLost: cc.Bytes(h.RadioLost), Share: h.Share,
	}
}
