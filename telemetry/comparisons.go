package telemetry

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/proxy/policy"
)

// registerPages adds the pages of comparisons. fromHere reports whether a request comes from this machine: proofs are
// begun and ended from here alone, because they change what a host gets.
func (o *Observer) registerPages(mux *http.ServeMux, fromHere func(*http.Request) bool) {
	mux.HandleFunc("GET /v1/compare", o.serveCompare)
	mux.HandleFunc("GET /v1/proof", o.serveProof)
	fromHereOnly := func(serve http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if !fromHere(r) || !namesThisHost(r.Host) || fromWebPage(r) {
				http.Error(w, "proofs are begun and ended from this machine only, by a loopback address or its own, and not "+
					"by web pages", http.StatusForbidden)
				return
			}
			serve(w, r)
		}
	}
	mux.HandleFunc("POST /v1/proof", fromHereOnly(o.beginProof))
	mux.HandleFunc("DELETE /v1/proof", fromHereOnly(func(w http.ResponseWriter, r *http.Request) {
		o.StopProof()
		o.serveProof(w, r)
	}))
}

// serveCompare answers with what the rule "first" gains over the rule "second". The defaults are called "defaults",
// and are the second where none is named.
func (o *Observer) serveCompare(w http.ResponseWriter, r *http.Request) {
	rules := [2]string{r.URL.Query().Get("first"), r.URL.Query().Get("second")}
	for i, rule := range rules {
		if rule == RuleName("") {
			rules[i] = ""
		}
	}
	result, err := o.Compare(rules[0], rules[1])
	if err != nil {
		http.Error(w, err.Error(), http.StatusNotFound)
		return
	}
	writeJSON(w, result)
}

// serveProof answers with the state of the last proof.
func (o *Observer) serveProof(w http.ResponseWriter, _ *http.Request) {
	p, ok := o.LastProof()
	if !ok {
		http.Error(w, "no proof has been begun; penstock prove begins one", http.StatusNotFound)
		return
	}
	writeJSON(w, p)
}

// beginProof begins a proof of the host "host" that lasts "for", such as 2m.
func (o *Observer) beginProof(w http.ResponseWriter, r *http.Request) {
	host := r.FormValue("host")
	if address, err := netip.ParseAddr(host); err == nil {
		host = policy.ClientHost(address, "")
	}
	last, err := time.ParseDuration(r.FormValue("for"))
	if host == "" || err != nil {
		http.Error(w, fmt.Sprintf("a proof needs host, an address or the name of a tunnel's peer, and for, a time such as "+
			"2m; not %q and %q", host, r.FormValue("for")), http.StatusBadRequest)
		return
	}
	if err := o.StartProof(host, last); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	o.serveProof(w, r)
}

// writeJSON answers with a value. It ignores errors, which mean that the client has gone.
func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
