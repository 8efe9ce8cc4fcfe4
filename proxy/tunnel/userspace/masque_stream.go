package userspace

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"

	"github.com/quic-go/quic-go/http3"

	"github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// waitingRequests bounds the CONNECTs that wait for Serve.
const waitingRequests = 1024

// request is a CONNECT over HTTP/3 before and while it is a leg.
type request struct {
	*quic.Conn
	writer http.ResponseWriter
	source netip.AddrPort
	target netip.AddrPort
	host   string
	// peer is the name of the client.
	peer string

	mu sync.Mutex
	// answered is set once the request has got its answer, or has ended without.
	answered bool
	// done is closed with answered. The handler may return then.
	done chan struct{}
}

// Peer returns the name of the client, whatever its address.
func (r *request) Peer() string { return r.peer }

// answerOnce calls answer unless the request was answered before.
func (r *request) answerOnce(how func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.answered {
		return net.ErrClosed
	}
	r.answered = true
	defer close(r.done)
	return how()
}

// ingressClient returns the ingress.Client of the request.
func (r *request) ingressClient() ingress.Client {
	return ingress.Client{
		Conn: r.Conn, Source: r.source, Target: r.target, Host: r.host, Peer: r.peer,
		Answer: func(_ netip.AddrPort, err error) error {
			answer := r.admitRequest
			if err != nil {
				answer = func() error { return r.failRequest(err) }
			}
			if err := r.answerOnce(answer); err != nil {
				return fmt.Errorf("tunnel: answer a CONNECT: %w", err)
			}
			return nil
		},
	}
}

func (r *request) admitRequest() error {
	r.writer.WriteHeader(http.StatusOK)
	stream, err := r.writer.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		return err
	}
	return r.Admit(stream)
}

func (r *request) failRequest(err error) error {
	status, why, reason := ingress.HTTPFailure(err)
	r.writer.Header().Set("Proxy-Status", why)
	refuseWith(r.writer, status, reason)
	return nil
}

// refuseWith answers with a sentence for people.
func refuseWith(w http.ResponseWriter, status int, reason string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = fmt.Fprintln(w, reason)
}
