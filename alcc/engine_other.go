//go:build !linux

package alcc

import (
	"errors"
	"net"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// sockets is the kernel datapath, which only Linux has.
type sockets struct{}

// openSockets fails: this is not Linux.
func openSockets(*engine, string) (*sockets, error) {
	return nil, errors.New("windows over the kernel's TCP are held on Linux only")
}

// Close does nothing.
func (*sockets) Close() error { return nil }

// manage is not called without sockets.
func (*engine) manage(*net.TCPConn, *settings) (*Conn, error) { return nil, errors.ErrUnsupported }

// openWindow returns nil: the system's congestion control stays.
func (*engine) openWindow(*net.TCPConn, flow.Terms) datapath.Conn { return nil }

// agents are reached on Linux only.
type agents struct{}

// lookupAlgorithm finds an algorithm. Without agents ccp:NAME is its fallback.
func (*agents) lookupAlgorithm(name string) (cc.Spec, error) { return cc.Lookup(name) }

// reachAgent does nothing.
func (*engine) reachAgent(*settings) error { return nil }

// limitUnsent does nothing.
func limitUnsent(net.Conn) {}

// readOutOfOrder returns 0.
func readOutOfOrder(net.Conn) cc.Bytes { return 0 }
