package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Side is the party that ended a connection.
type Side string

// The sides of a connection.
const (
	ClientSide Side = "client"
	ServerSide Side = "server"
	ProxySide  Side = "proxy"
)

// Reason is why a connection ended, or why it was never relayed. The values are
// metric labels: they are not changed, only added to.
type Reason string

// Why a connection that was relayed ended.
const (
	ClosedEOF         Reason = "eof"   // both sides had finished; Cause.Who finished first
	ClosedReset       Reason = "reset" // a RST arrived
	ClosedError       Reason = "error" // any other failure of a leg: timed out, unreachable, …
	ClosedIdle        Reason = "idle_timeout"
	ClosedHalfClosed  Reason = "half_closed_timeout" // one side had finished and nothing came from the other
	ClosedShutdown    Reason = "shutdown"
	ClosedRevoked     Reason = "revoked"      // its peer, or the one it led to, has gone from the tunnel
	ClosedAddressGone Reason = "address_gone" // that of a leg has left the machine
	ClosedMoved       Reason = "moved"        // it goes on in the process that has taken over
)

// Why a connection was never relayed.
const (
	RejectedGlobalLimit   Reason = "limit"
	RejectedListenerLimit Reason = "listener_limit"
	RejectedSourceLimit   Reason = "source_limit"
	RejectedHandshake     Reason = "handshake" // malformed, refused or too slow
	RejectedAuth          Reason = "auth"      // a wrong name, password or token
	RejectedDenied        Reason = "denied"    // the destination guard
	RejectedRule          Reason = "rule"      // a rule with refuse
	RejectedLoop          Reason = "loop"      // it would have come back to us
	RejectedDialRefused   Reason = "dial_refused"
	RejectedDialTimeout   Reason = "dial_timeout"
	RejectedUnreachable   Reason = "dial_unreachable"
	RejectedName          Reason = "dial_name" // the host name has no address
	RejectedDescriptors   Reason = "descriptors"
	RejectedPorts         Reason = "local_ports" // none is left to reach the server from
	RejectedDialError     Reason = "dial_error"
	RejectedClientGone    Reason = "client_gone" // while its server was dialled, or before it was answered
	RejectedShutdown      Reason = "shutdown"
	RejectedRevoked       Reason = "revoked" // its peer has gone from the tunnel
)

// Cause is who ended a connection, and how. The zero value is: it has not ended.
type Cause struct {
	Who Side
	How Reason
}

// rejection is why a connection was not relayed.
type rejection struct {
	reason     Reason
	err        error
	unanswered bool // the client still gets an answer in its protocol
}

// refusal is an error of our own about where a connection may go.
type refusal struct {
	reason Reason
	err    error
}

// Error returns the reason in words.
func (r *refusal) Error() string { return r.err.Error() }

// Unwrap adds ErrNotAllowed, by which the ingress finds its protocol's answer for "not allowed".
func (r *refusal) Unwrap() []error { return []error{r.err, ingress.ErrNotAllowed} }

// dialReason returns the reason that a failed dial is counted under.
func dialReason(err error) Reason {
	var own *refusal
	var dns *net.DNSError
	var timeout net.Error
	switch {
	case errors.As(err, &own):
		return own.reason
	case errors.Is(err, kernel.ErrNearReset):
		return RejectedClientGone
	case errors.Is(err, kernel.ErrNoPort):
		return RejectedPorts
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNRESET):
		return RejectedDialRefused
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH),
		errors.Is(err, syscall.ENETDOWN), errors.Is(err, syscall.EHOSTDOWN), errors.Is(err, syscall.EADDRNOTAVAIL):
		return RejectedUnreachable
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS):
		return RejectedDescriptors
	case errors.As(err, &dns) && !dns.IsTimeout:
		return RejectedName
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return RejectedDialTimeout
	}
	return RejectedDialError
}

// legReason returns the reason for the failure of a leg that was in use.
func legReason(err error) Reason {
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ClosedReset
	}
	return ClosedError
}
