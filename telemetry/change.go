package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
)

// maxChangeBytes bounds a request for a change.
const maxChangeBytes = 4 << 10

// Change is another algorithm for the connections of a rule, as POST /v1/algorithm takes it.
type Change struct {
	Rule      *string `json:"rule"`      // its name; empty: the defaults
	Direction string  `json:"direction"` // down or up; empty: both
	Algorithm string  `json:"algorithm"` // with parameters, as in the configuration
}

// Rule is what the connections of a rule get, as GET /v1/rules tells it.
type Rule struct {
	Name   string `json:"rule"` // empty: the defaults
	Refuse string `json:"refuse,omitempty"`
	Down   string `json:"down,omitempty"`
	Up     string `json:"up,omitempty"`
}

// Rules is the answer to GET /v1/rules: the rules in force.
type Rules struct {
	Rules      []Rule   `json:"rules"`      // in order, and last the defaults
	Algorithms []string `json:"algorithms"` // those that a change may name
}

// Changer lets those who have a token change algorithms. It is safe for concurrent use.
type Changer struct {
	Rules func() (Rules, error)
	// Change puts c into force and says in words what it changed. client is the address of who asks.
	Change func(c Change, client string) (string, error)

	token    token
	outcomes tally[ChangeOutcome]
}

// ChangeOutcome is what became of a request for a change.
type ChangeOutcome string

// The outcomes.
const (
	ChangeMade     ChangeOutcome = "changed"
	ChangeForeign  ChangeOutcome = "foreign"      // another web page asked
	ChangeDisabled ChangeOutcome = "disabled"     // no token is configured
	ChangeRefused  ChangeOutcome = "unauthorized" // without the token, or with a wrong one
	ChangeInvalid  ChangeOutcome = "invalid"      // not understood
	ChangeFailed   ChangeOutcome = "failed"       // no such rule or algorithm, or not as the rule needs it
)

// Outcomes returns how many changes were asked for so far, by what became of them.
func (k *Changer) Outcomes() map[ChangeOutcome]uint64 {
	return k.outcomes.outcomeCounts(ChangeMade, ChangeForeign, ChangeDisabled, ChangeRefused, ChangeInvalid,
		ChangeFailed)
}

// SetToken sets the token that changes must carry from now on; empty: no changes are taken.
func (k *Changer) SetToken(secret string) { k.token.setSecret(secret) }

// TakesChanges reports whether there is a token, without which no changes are taken.
func (k *Changer) TakesChanges() bool { return k.token.isSet() }

// registerPages adds the pages of rules and algorithms.
func (k *Changer) registerPages(mux *http.ServeMux) {
	mux.HandleFunc("GET /v1/rules", k.serveRules)
	mux.HandleFunc("POST /v1/algorithm", k.serveChange)
}

// serveRules answers with the rules in force. It needs no token, because it changes nothing.
func (k *Changer) serveRules(w http.ResponseWriter, _ *http.Request) {
	rules, err := k.Rules()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, rules)
}

// serveChange makes one change or says why not, and counts which.
func (k *Changer) serveChange(w http.ResponseWriter, r *http.Request) {
	refuse := func(code int, o ChangeOutcome, err error) {
		k.outcomes.countOutcome(o, 1)
		if code == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		http.Error(w, err.Error(), code)
	}
	if code, o, err := k.permitChange(r); err != nil {
		refuse(code, o, err)
		return
	}
	c, code, err := readChange(w, r)
	if err != nil {
		refuse(code, ChangeInvalid, err)
		return
	}
	words, err := k.Change(c, r.RemoteAddr)
	if err != nil {
		refuse(http.StatusUnprocessableEntity, ChangeFailed, err)
		return
	}
	k.outcomes.countOutcome(ChangeMade, 1)
	fmt.Fprintln(w, words)
}

// permitChange returns an error if a request may change nothing. It refuses requests of other web pages, because a
// browser may have the token.
func (k *Changer) permitChange(r *http.Request) (code int, o ChangeOutcome, err error) {
	if err := new(http.CrossOriginProtection).Check(r); err != nil {
		return http.StatusForbidden, ChangeForeign, errors.New("changes are not taken from other web pages")
	}
	switch given, carried := k.token.carriedBy(r); {
	case !given:
		return http.StatusForbidden, ChangeDisabled, errors.New("changes need a token: give " +
			"telemetry.change_token_file in the configuration, and reload")
	case !carried:
		return http.StatusUnauthorized, ChangeRefused, errors.New("changes need the token of " +
			"telemetry.change_token_file: send Authorization: Bearer TOKEN")
	}
	return 0, "", nil
}

// readChange reads one change, and nothing else.
func readChange(w http.ResponseWriter, r *http.Request) (c Change, code int, err error) {
	if !isJSON(r) {
		return c, http.StatusUnsupportedMediaType, errors.New("a change is JSON: send Content-Type: application/json")
	}
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxChangeBytes))
	d.DisallowUnknownFields()
	if err = d.Decode(&c); err == nil {
		err = checkEnd(d)
	}
	if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
		return c, http.StatusRequestEntityTooLarge, fmt.Errorf("a change has at most %d bytes", maxChangeBytes)
	}
	if err == nil && c.Rule == nil {
		err = errors.New(`rule is missing: a rule's name, or "" for the defaults`)
	}
	if err != nil {
		return c, http.StatusBadRequest, fmt.Errorf("read the change: %w", err)
	}
	return c, 0, nil
}
