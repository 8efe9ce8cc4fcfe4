package telemetry

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
)

// Config tells which configuration is in force and how rereading it went.
type Config struct {
	Hash              string  // SHA-256 of the file; empty: built-in
	Succeeded, Failed uint64  // times it was reread, the start not counted
	OK                bool    // the last time, or the start, went well
	Since             float64 // when the one in force was put there, in Unix time

	Changed []string // rules that differ from the file since, in words
}

// fromHere reports whether who asks is on this machine: at the address of ours
// that was asked, or on loopback. A client whose connection the proxy relays to here is not.
func (p Pages) fromHere(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	own, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if err != nil || !ok {
		return false
	}
	return ofThisMachine(peer, own.AddrPort(), p.Dialled)
}

// ofThisMachine reports whether a connection comes from this machine, and not from a client by way of the proxy.
func ofThisMachine(peer, own netip.AddrPort, dialled func(from, to netip.AddrPort) bool) bool {
	from, to := peer.Addr().Unmap().WithZone(""), own.Addr().Unmap().WithZone("")
	return (from.IsLoopback() || from == to) && (dialled == nil || !dialled(peer, own))
}

// ErrNoFile is what Pages.Reload returns where there is nothing to reread.
var ErrNoFile = errors.New("the proxy runs without --config: there is no file to reread")

// fromWebPage reports whether a page in a browser asks, whichever page: none of ours has a use for it.
func fromWebPage(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site")
	return r.Header.Get("Origin") != "" || site != "" && site != "none"
}

// serveReload has the configuration be reread. Who may is whoever asks from this
// machine, but no page in a browser there, which says where it comes from.
func (p Pages) serveReload(w http.ResponseWriter, r *http.Request) {
	if !p.fromHere(r) || !namesThisHost(r.Host) {
		http.Error(w, "reloads are taken from this machine only, by a loopback address or its own; or send SIGHUP",
			http.StatusForbidden)
		return
	}
	if fromWebPage(r) {
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
