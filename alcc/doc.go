// Package alcc puts a congestion controller on connections of package net. It decides in user space how many bytes of
// a connection may be in flight, as the library of ALCC does (Park et al., ALCC: Migrating Congestion Control To The
// Application Layer In Cellular Networks, §4.1). Peers and kernel stay as they are.
//
// A server needs two lines more:
//
//	ln, err := net.Listen("tcp", ":80")
//	ln, err = alcc.NewListener(ln, alcc.Options{})
//	http.Serve(ln, handler)
//
// Connections to one host share one window, unless Options.Group says otherwise: eight downloads of one client queue
// no more than one. Windows belong to the process, so several listeners and dialers share them as well.
//
// # What holds the window
//
// The first connection starts the best of these that the process may use. Conn.Stats tells which one it is.
//
//	tier      the window is held by                 needs
//	ebpf      the kernel, packet by packet          Linux 6.10, root or CAP_BPF and CAP_NET_ADMIN
//	tcp_info  Write, which waits for room           Linux 5.4
//	own_acks  a sending queue of the connection     Options.OwnAcks at both ends; any system, any kind of connection
//	none      nothing: connections pass through     -
//
// One thread per process reads the state of all connections each millisecond while bytes are underway, and sleeps
// otherwise. A connection has no goroutine of its own.
//
// TLS stands above: wrap the TCP connection, then give it to tls.Server or tls.Client.
package alcc
