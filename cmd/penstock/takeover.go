package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/takeover"
	"github.com/penstock-net/penstock/telemetry"
)

// Roles of telemetry's sockets in a takeover: the keys of the configuration that they are of.
const (
	pagesRole  = "telemetry.address"
	healthRole = "telemetry.health"
	hintsRole  = "telemetry.hints.socket"
)

// takeoverPath is where this process offers its sockets to the next one. It is empty without a state directory of our
// own.
func (h *service) takeoverPath() string {
	if !h.flags.ownState {
		return ""
	}
	return filepath.Join(h.flags.stateDirectory, "takeover")
}

// askPredecessor takes the sockets of the running proxy, if --takeover was given and one runs.
func (h *service) askPredecessor() error {
	if !h.flags.takeover {
		return nil
	}
	path := h.takeoverPath()
	if path == "" {
		return cli.BadInput(errors.New("--takeover needs --state-directory DIR (under systemd StateDirectory=), with " +
			"the directory of the running proxy: its socket is there"))
	}
	p, err := takeover.Ask(path)
	if errors.Is(err, takeover.ErrNoProxy) {
		h.log.Info("no proxy runs that could be taken over", "socket", path)
		return nil
	}
	if err != nil {
		return err
	}
	h.predecessor = p
	h.log.Info("taking over", "pid", p.PID)
	return nil
}

// takeSocket returns the predecessor's socket of a role at an address; nil: it has none there.
func (h *service) takeSocket(role, address string) (net.Listener, error) {
	if h.predecessor == nil {
		return nil, nil
	}
	sockets := h.predecessor.Take(role, func(at string) bool {
		return at == address || takeover.SameAddress(address, at)
	})
	if len(sockets) == 0 {
		return nil, nil
	}
	return sockets[0].Listener()
}

// takeListeners adds the predecessor's sockets that listeners of the configuration have to sockets.
func (h *service) takeListeners(sockets []proxy.GivenSocket) ([]proxy.GivenSocket, error) {
	if h.predecessor == nil {
		return sockets, nil
	}
	given := func(at string) bool {
		return slices.ContainsFunc(sockets, func(s proxy.GivenSocket) bool { return s.Addr().String() == at })
	}
	for _, s := range h.predecessor.Take(proxy.TakeoverRole, func(at string) bool {
		return !given(at) && slices.ContainsFunc(h.cfg.Listeners, func(l access.Listener) bool {
			return takeover.SameAddress(l.Address, at)
		})
	}) {
		ln, err := s.Listener()
		if err != nil {
			return nil, err
		}
		tcp, ok := ln.(*net.TCPListener)
		if !ok {
			return nil, errors.Join(fmt.Errorf("takeover: the socket at %s is none of TCP", s.Address), ln.Close())
		}
		sockets = append(sockets, proxy.GivenSocket{TCPListener: tcp})
	}
	return sockets, nil
}

// listenHints opens the Unix socket for hints, or takes the predecessor's.
func (h *service) listenHints(path string) (net.Listener, error) {
	ln, err := h.takeSocket(hintsRole, path)
	switch {
	case err != nil:
		return nil, err
	case ln != nil:
		return telemetry.AdoptSocket(ln, path)
	}
	return telemetry.ListenSocket(path)
}

// beginTakeover tells the predecessor that this process serves. An error says that the predecessor goes on.
func (h *service) beginTakeover() error {
	err := h.predecessor.Begin(h.proxy.Adopt, func() {
		h.log.Info("the process before this one has ended", "pid", h.predecessor.PID, "connections_taken_over",
			h.proxy.Adopted())
	})
	switch {
	case errors.Is(err, takeover.ErrRefused):
		return err
	case err != nil:
		h.log.Warn("the process before this one does not say that it ends; this one serves", "pid", h.predecessor.PID,
			"err", err)
	default:
		h.log.Info("taken over", "pid", h.predecessor.PID, "connections_left_there", h.predecessor.Open())
	}
	return nil
}

// offerTakeover lets another process take over until ctx is done.
func (h *service) offerTakeover(ctx context.Context) {
	path := h.takeoverPath()
	if path == "" {
		return
	}
	h.state.makeDirectory()
	ln, err := takeover.Listen(path)
	if err != nil {
		h.log.Warn("no process can take over from this one: an upgrade will refuse connections for a moment", "err",
			err)
		return
	}
	offer := takeover.Offer{
		Sockets: h.offeredSockets,
		Leave: func(pid int) {
			if h.hintSocket != nil {
				telemetry.Abandon(h.hintSocket.Listener)
			}
			select {
			case h.successor <- pid:
			case <-ctx.Done():
			}
		},
		Open: func() int { return h.proxy.Counters().Active },
		Park: h.proxy.Mover().Park,
		Log:  h.log,
	}
	offer.Serve(ctx, ln)
}

// offeredSockets returns descriptors of all listening sockets.
func (h *service) offeredSockets() (all []takeover.Socket, stays []string, err error) {
	if h.isEnding() {
		return nil, nil, errors.New("this process is ending")
	}
	all, stays, err = h.proxy.TakeoverSockets()
	for role, port := range map[string]*telemetry.BoundedListener{
		pagesRole: h.pages, healthRole: h.probe, hintsRole: h.hintSocket,
	} {
		if port == nil || err != nil {
			continue
		}
		var s takeover.Socket
		if s, err = takeover.Duplicate(role, port.Listener.(takeover.Listening)); err != nil {
			continue
		}
		if role == hintsRole {
			s.Address = h.cfg.Telemetry.Hints.Socket
		}
		all = append(all, s)
	}
	return all, stays, err
}
