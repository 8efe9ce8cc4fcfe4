package ingress

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"syscall"

	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// failure is the answer to a dial error in SOCKS5 and HTTP.
type failure struct {
	socks  byte   // reply field, RFC 1928 §6
	status int    // HTTP status code
	token  string // proxy error type, RFC 9209 §2.3
	reason string // for people; shows no more of our network than the status does
}

var (
	failedOther    = failure{1, 502, "proxy_internal_error", "the connection could not be made"}
	failedPolicy   = failure{2, 403, "destination_ip_prohibited", "this destination is not allowed"}
	failedNetwork  = failure{3, 502, "destination_ip_unroutable", "the network is unreachable"}
	failedHost     = failure{4, 502, "destination_ip_unroutable", "the host is unreachable"}
	failedName     = failure{4, 502, "dns_error", "the name could not be resolved"}
	failedRefused  = failure{5, 502, "connection_refused", "the server refused the connection"}
	failedTimeout  = failure{6, 504, "connection_timeout", "the server did not answer in time"}
	failedResource = failure{1, 503, "proxy_internal_error", "the proxy has no room for another connection"}
)

// HTTPFailure returns the parts of the HTTP answer to a dial error: the status code, the value of
// the Proxy-Status field (RFC 9209) and a sentence for people.
func HTTPFailure(err error) (status int, proxyStatus, reason string) {
	f := failureOf(err)
	return f.status, "penstock; error=" + f.token, f.reason
}

// failureOf returns the failure for a dial error. SOCKS5 has no reply for a timeout: other
// servers send 6, "TTL expired".
func failureOf(err error) failure {
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case errors.Is(err, ErrNotAllowed), errors.Is(err, fs.ErrPermission):
		return failedPolicy
	case errors.Is(err, syscall.ECONNREFUSED):
		return failedRefused
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.ENETDOWN):
		return failedNetwork
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EHOSTDOWN):
		return failedHost
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS),
		errors.Is(err, kernel.ErrNoPort):
		return failedResource
	case errors.As(err, &dns) && !dns.IsTimeout:
		return failedName
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return failedTimeout
	}
	return failedOther
}
