package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/penstock-net/penstock/cc"
)

// hintRate is how many hints are taken in a second, over all ways in, and at once.
const hintRate = 1000

// HintReceiver takes what the network says about paths: over TCP from this machine or
// with a token, and from a Unix socket by whoever can open that. It is safe for
// concurrent use.
type HintReceiver struct {
	// Pass hands a hint on and returns how many groups of flows it was for.
	Pass  func(p netip.Prefix, h cc.Hint) (groups int)
	Clock func() cc.Time // the flows'
	Log   *slog.Logger   // nil: silent

	token    token
	outcomes tally[HintOutcome]
	mu       sync.Mutex
	allowed  float64 // hints that may come at once
	filled   cc.Time // when that was so
}

// HintOutcome is what became of a hint.
type HintOutcome string

// The outcomes. A request that is refused before it is read counts as one hint.
const (
	HintHeard    HintOutcome = "heard"        // by a group of flows at least
	HintUnheard  HintOutcome = "unheard"      // nobody sends there
	HintInvalid  HintOutcome = "invalid"      // not understood; none of the request's hints counts
	HintRefused  HintOutcome = "unauthorized" // without the token, or from where none are taken
	HintTooOften HintOutcome = "limited"      // more than hintRate
)

// SetToken has hints over TCP carry a token from now on; empty: no longer.
func (k *HintReceiver) SetToken(secret string) { k.token.setSecret(secret) }

// Outcomes returns how many hints have come so far, by what became of them.
func (k *HintReceiver) Outcomes() map[HintOutcome]uint64 {
	return k.outcomes.outcomeCounts(HintHeard, HintUnheard, HintInvalid, HintRefused, HintTooOften)
}

// refusal is an answer other than what was asked for.
type refusal struct {
	code    int
	outcome HintOutcome
	err     error
}

// answerHints takes the hints of a request for which permit says nothing else.
func (k *HintReceiver) answerHints(w http.ResponseWriter, r *http.Request, permit func(*http.Request) error) {
	hints, no := k.receiveHints(w, r, permit)
	if no != nil {
		k.outcomes.countOutcome(no.outcome, max(1, len(hints)))
		switch no.code {
		case http.StatusUnauthorized:
			w.Header().Set("WWW-Authenticate", "Bearer")
		case http.StatusTooManyRequests:
			w.Header().Set("Retry-After", "1")
		}
		http.Error(w, no.err.Error(), no.code)
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

// pathHint is a hint, and about which addresses.
type pathHint struct {
	about netip.Prefix
	hint  cc.Hint
}

// receiveHints returns the hints of a request, all of them or a refusal; with one for
// coming too often also those that are refused.
func (k *HintReceiver) receiveHints(
	w http.ResponseWriter, r *http.Request, permit func(*http.Request) error,
) ([]pathHint, *refusal) {
	if fromWebPage(r) { // also with the token, which a browser may have been given
		return nil, &refusal{http.StatusForbidden, HintRefused, errors.New("hints are not taken from web pages")}
	}
	if err := permit(r); err != nil {
		code := http.StatusForbidden
		if errors.Is(err, errToken) {
			code = http.StatusUnauthorized
		}
		return nil, &refusal{code, HintRefused, err}
	}
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
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

// admitHints lets n hints pass, or none of them.
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

// errToken is wrapped where a token is wanted.
var errToken = errors.New("hints over TCP need the token of telemetry.hints.token_file here: send Authorization: " +
	"Bearer TOKEN")

// permitTCP wants the token where there is one, and where there is none that who asks is
// local. A page in a browser there cannot send JSON here without asking first, and is not
// answered.
func (k *HintReceiver) permitTCP(local func(*http.Request) bool) func(*http.Request) error {
	return func(r *http.Request) error {
		given, carried := k.token.carriedBy(r)
		switch {
		case given && !carried:
			return errToken
		case !given && !local(r):
			return errors.New("without telemetry.hints.token_file hints are taken on a loopback address only, from " +
				"this machine; set it, move telemetry.address there, or use telemetry.hints.socket")
		}
		return nil
	}
}

// Serve takes hints, and does nothing else, from ln until ctx ends: who may open
// ln may hint.
func (k *HintReceiver) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/hints", func(w http.ResponseWriter, r *http.Request) {
		k.answerHints(w, r, func(*http.Request) error { return nil })
	})
	return serveHTTP(ctx, ln, mux, k.Log)
}
