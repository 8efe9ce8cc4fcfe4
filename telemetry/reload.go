package telemetry

import (
	"errors"
	"fmt"
	"net/http"
)

// Config tells which configuration is in force and how rereading it went.
type Config struct {
	Hash              string  // SHA-256 of the file; empty: built-in
	Succeeded, Failed uint64  // times it was reread, the start not counted
	OK                bool    // the last time, or the start, went well
	Since             float64 // when the one in force was put there, in Unix time
}

// ErrNoFile is what Pages.Reload returns where there is nothing to reread.
var ErrNoFile = errors.New("the proxy runs without --config: there is no file to reread")

// reload has the configuration be reread. Who may is whoever reaches a loopback
// listener, but no page in a browser there, which says where it comes from.
func (p Pages) reload(w http.ResponseWriter, r *http.Request, local bool) {
	if !local {
		http.Error(w, "reloads are taken on a loopback address only; move telemetry.address there, or send SIGHUP", http.StatusForbidden)
		return
	}
	if site := r.Header.Get("Sec-Fetch-Site"); r.Header.Get("Origin") != "" || site != "" && site != "none" {
		http.Error(w, "reloads are not taken from web pages", http.StatusForbidden)
		return
	}
	words, err := p.Reload()
	switch {
	case errors.Is(err, ErrNoFile):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case err != nil:
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
	default:
		fmt.Fprintln(w, words)
	}
}
