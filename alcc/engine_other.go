//go:build !linux

package alcc

import (
	"errors"
	"net"

	"github.com/penstock-net/penstock/cc"
)

// engine needs the sockets of Linux.
type engine struct{}

// sharedEngine fails: no window can be held here.
func sharedEngine() (*engine, error) {
	return nil, errors.New("windows of the kernel's TCP are held on Linux only")
}

func (e *engine) now() cc.Time                                { return 0 }
func (e *engine) reachAgent(*settings) error                  { return nil }
func (e *engine) manage(*net.TCPConn, *settings) (*Conn, error) { return nil, errors.ErrUnsupported }
