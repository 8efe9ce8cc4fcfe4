package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/takeover"
	"github.com/penstock-net/penstock/telemetry"
)

// The roles of telemetry's sockets in a takeover are their keys in the configuration.
const (
	pagesRole  = "telemetry.address"
	healthRole = "telemetry.health"
	hintsRole  = "telemetry.hints.socket"
)

// takeoverPath returns the Unix socket at which this process offers its sockets to the next one. Empty: there is none,
// because neither --state-directory nor systemd has given a directory.
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

// takeSockets returns the predecessor's sockets of a role, or those that systemd has stored.
func (h *service) takeSockets(role string, want func(address string) bool) []takeover.Socket {
	if sockets := h.predecessor.TakeSockets(role, want); len(sockets) > 0 {
		return sockets
	}
	return h.stored.Take(role, want)
}

// takeSocket returns the predecessor's or the stored socket of a role at an address; nil: there is none.
func (h *service) takeSocket(role, address string) (net.Listener, error) {
	sockets := h.takeSockets(role, func(at string) bool { return at == address || takeover.SameAddress(address, at) })
	if len(sockets) == 0 {
		return nil, nil
	}
	return sockets[0].Listener()
}

// takeListeners adds the sockets of the predecessor, or from systemd's store, at addresses of the configuration's
// listeners. It leaves out addresses that sockets has already.
func (h *service) takeListeners(sockets []proxy.GivenSocket) []proxy.GivenSocket {
	given := func(at string) bool {
		return slices.ContainsFunc(sockets, func(s proxy.GivenSocket) bool { return s.Address == at })
	}
	for _, s := range h.takeSockets(proxy.TakeoverRole, func(at string) bool {
		return !given(at) && slices.ContainsFunc(h.cfg.Listeners, func(l access.Listener) bool {
			return takeover.SameAddress(l.Address, at)
		})
	}) {
		sockets = append(sockets, proxy.GivenSocket{Socket: s})
	}
	return sockets
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

// beginTakeover tells the predecessor that this process serves. On an error the predecessor goes on.
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

// listenTakeover listens at takeoverPath; nil: there is none, or it cannot be opened.
func (h *service) listenTakeover() *net.UnixListener {
	path := h.takeoverPath()
	if path == "" {
		return nil
	}
	h.state.makeDirectory()
	ln, err := takeover.Listen(path)
	if err != nil {
		h.log.Warn("no process can take over from this one: an upgrade will refuse connections for a moment", "err",
			err)
		return nil
	}
	return ln
}

// offerTakeover lets another process take over until ctx is done. It closes ln.
func (h *service) offerTakeover(ctx context.Context, ln *net.UnixListener) {
	offer := takeover.Offer{
		Sockets: h.offeredSockets,
		Leave: func(pid int) {
			if h.hintsListener != nil {
				telemetry.Abandon(h.hintsListener.Listener)
			}
			h.notifySystemd(fmt.Sprintf("MAINPID=%d", pid)) // systemd takes it from the present main process only
			select {
			case h.successor <- pid:
			case <-ctx.Done():
			}
		},
		Open: func() int { return h.proxy.Counters().Active },
		Left: h.proxy.DrainLeft,
		Park: h.proxy.Mover().Park,
		Log:  h.log,
	}
	offer.Serve(ctx, ln)
}

// offeredSockets returns descriptors of all listening sockets for a process that takes over.
func (h *service) offeredSockets() (all takeover.Sockets, stays []string, err error) {
	if h.isEnding() {
		return nil, nil, errors.New("this process is ending")
	}
	return h.listeningSockets()
}

// listeningSockets returns descriptors of all listening sockets. stays names what cannot be taken over.
func (h *service) listeningSockets() (all takeover.Sockets, stays []string, err error) {
	all, stays, err = h.proxy.TakeoverSockets()
	for role, port := range map[string]*telemetry.BoundedListener{
		pagesRole: h.pagesListener, healthRole: h.healthListener, hintsRole: h.hintsListener,
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

// storedName is what the names of descriptors in systemd's store begin with. The role follows.
const storedName = "penstock."

// storeSockets sends the listening sockets to systemd's store, which keeps them until the next start if the unit has
// FileDescriptorStoreMax=. Clients that connect in between wait. If no start follows, systemd closes them.
func (h *service) storeSockets() {
	if os.Getenv("NOTIFY_SOCKET") == "" {
		return
	}
	all, _, err := h.listeningSockets()
	defer func() { all.CloseAll() }()
	if err != nil {
		h.log.Warn("systemd keeps no sockets until the next start", "err", err)
		return
	}
	for _, s := range all {
		if s.Role != hintsRole { // systemd removes its file with RuntimeDirectory=
			h.notifySystemd("FDSTORE=1\nFDNAME="+storedName+s.Role, s.FD)
		}
	}
}

// forgetStored removes from systemd's store what an earlier process has put there, and closes what this one does not
// use.
func (h *service) forgetStored() {
	h.stored.CloseAll()
	if !h.wasStored {
		return
	}
	for _, role := range []string{proxy.TakeoverRole, pagesRole, healthRole} {
		h.notifySystemd("FDSTOREREMOVE=1\nFDNAME=" + storedName + role)
	}
}
