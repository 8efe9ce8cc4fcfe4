// Package traffic is the servers of an emulated network, with the congestion
// control that the caller names.
package traffic

import (
	"fmt"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/netlab"
)

// socketLimits keep the ends from being the bottleneck on systems with small
// defaults: they allow what a 2 MB queue needs, and 4 MB in flight.
var socketLimits = []struct{ key, value string }{
	{"net.ipv4.tcp_rmem", "4096 131072 33554432"},
	{"net.ipv4.tcp_wmem", "4096 16384 4194304"},
}

// Loosen keeps the nodes' socket buffers from being the bottleneck.
func Loosen(nodes ...*netlab.Node) error {
	for _, node := range nodes {
		for _, l := range socketLimits {
			if err := node.Sysctl(l.key, l.value); err != nil {
				return err
			}
		}
	}
	return nil
}

// Server gives every client's connection to a handler, until it closes.
type Server struct {
	ln     net.Listener
	handle func(net.Conn)
	conns  connections
	done   sync.WaitGroup
}

// Serve starts a server at the node's address, an IP literal or nothing, with a
// port. Its sockets use the kernel's algorithm. A connection closes when the
// handler returns, which it has to once the connection fails.
func Serve(node *netlab.Node, address, algorithm string, handle func(net.Conn)) (*Server, error) {
	return serve(node, "tcp4", address, Control(algorithm), handle)
}

// serve is Serve on a network of package net, with a socket that control prepares.
func serve(node *netlab.Node, network, address string, control func(string, string, syscall.RawConn) error,
	handle func(net.Conn),
) (*Server, error) {
	lc := net.ListenConfig{Control: control}
	lc.SetMultipathTCP(false)
	ln, err := node.ListenWith(&lc, network, address)
	if err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	s := &Server{ln: ln, handle: handle}
	s.done.Go(s.accept)
	return s, nil
}

// Control has a socket use the kernel's algorithm of that name, as a net.Dialer's or a
// net.ListenConfig's Control.
func Control(algorithm string) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var err error
		if cerr := c.Control(func(fd uintptr) {
			err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, algorithm)
		}); cerr != nil {
			return cerr
		}
		if err != nil {
			return fmt.Errorf("choose congestion control %s: %w", algorithm, err)
		}
		return nil
	}
}

func (s *Server) accept() {
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			return
		}
		if !s.conns.keep(conn) {
			return
		}
		s.done.Go(func() {
			s.handle(conn)
			s.conns.end(conn)
		})
	}
}

// Close hangs up on every client and waits for the handlers.
func (s *Server) Close() error {
	err := s.ln.Close()
	s.conns.close()
	s.done.Wait()
	return err
}
