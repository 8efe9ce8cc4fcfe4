//go:build linux

// Package netlab builds small networks inside this process's reach: nodes are
// network namespaces, joined by veth pairs or by a path, a real-time emulation
// of a link with the schedule of package sim. It is for tests and benchmarks; it
// measures and never decides.
//
// The ready-made networks, with the addresses they use:
//
//	NewCellular   client ════ cell0 ════ edge ──── wan0 ──── server
//	              10.77.1.2    path    10.77.1.1
//	              fd77:1::2           fd77:1::1
//	                                   10.77.2.1    veth    10.77.2.2
//	                                   fd77:2::1            fd77:2::2
//
//	              of several hosts, the next have 10.77.1.3, fd77:1::3 and so on
//
//	NewRouted     the same, with a veth pair in place of the path
package netlab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// Lab is a set of nodes and what joins them. It lives in file descriptors and
// threads of this process only, so even a crash leaves nothing behind.
type Lab struct {
	ctx    context.Context // ends at Close; children of Command die with it
	cancel context.CancelFunc

	vethes atomic.Int64

	mu     sync.Mutex
	closed bool
	nodes  []*Node
	paths  []*Path
}

// New returns an empty lab.
func New() *Lab {
	ctx, cancel := context.WithCancel(context.Background())
	return &Lab{ctx: ctx, cancel: cancel}
}

// Node adds a node: a new network namespace with its loopback device up.
func (l *Lab) Node(name string) (*Node, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errClosed
	}
	for _, n := range l.nodes {
		if n.name == name {
			return nil, fmt.Errorf("netlab: node %q exists already", name)
		}
	}
	n, err := newNode(l.ctx, name)
	if err != nil {
		return nil, err
	}
	l.nodes = append(l.nodes, n)
	return n, nil
}

// Close stops the paths, kills the commands and lets the namespaces go. A
// namespace with sockets that are open elsewhere goes with the last of them.
// Closing twice is the same as closing once.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	l.cancel()
	var errs []error
	for _, p := range l.paths {
		errs = append(errs, p.close())
	}
	for _, n := range l.nodes {
		errs = append(errs, n.close())
	}
	return errors.Join(errs...)
}

var errClosed = errors.New("netlab: the lab is closed")
