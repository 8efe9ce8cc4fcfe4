// Package eventloop serves sockets on one goroutine per processor. It runs a task when its
// sockets may be read or written, so that an idle connection needs neither a goroutine nor
// a stack. It knows nothing of what the sockets carry.
package eventloop
