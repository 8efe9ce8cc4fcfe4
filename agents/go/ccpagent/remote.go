package ccpagent

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/cc/ccp"
)

const (
	waiting     = 1024                   // answers that TCP has not taken yet; beyond half of them nothing is read
	strangers   = 256                    // connections at a time with a handshake under way
	handshake   = 5 * time.Second        // it may take
	acceptAgain = 100 * time.Millisecond // after an error that passes
)

// ServeListener serves datapaths on other machines until ctx ends, as Serve does: those that
// connect to l, which is one of TLS that asks for certificates. It closes l. While 256
// handshakes are under way, further connections wait; each may take 5 s.
func (a *Agent) ServeListener(ctx context.Context, l net.Listener) error {
	if err := a.compilePrograms(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	context.AfterFunc(ctx, func() { _ = l.Close() })
	var running sync.WaitGroup
	defer running.Wait()
	room := make(chan struct{}, strangers)
	for {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return a.firstFault()
		}
		conn, err := acceptNext(ctx, l)
		if ctx.Err() != nil {
			return a.firstFault()
		}
		if err != nil {
			cancel(err)
			return fmt.Errorf("ccpagent: accept datapaths: %w", err)
		}
		running.Go(func() {
			err := finishHandshake(ctx, conn)
			<-room
			if err != nil {
				_ = conn.Close()
				return
			}
			a.serveConnection(ctx, conn)
			if err := a.firstFault(); err != nil {
				cancel(err)
			}
		})
	}
}

// acceptNext waits until a connection comes, also where there is no room for one now.
func acceptNext(ctx context.Context, l net.Listener) (net.Conn, error) {
	for {
		conn, err := l.Accept()
		passes := slices.ContainsFunc([]error{
			syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED,
		}, func(target error) bool { return errors.Is(err, target) })
		if !passes {
			return conn, err
		}
		again := time.NewTimer(acceptAgain)
		select {
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

// finishHandshake has the handshake of TLS end.
func finishHandshake(ctx context.Context, conn net.Conn) error {
	c, ok := conn.(interface{ HandshakeContext(context.Context) error })
	if !ok {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	return c.HandshakeContext(ctx)
}

var errBehind = errors.New("the datapath does not take what is sent")

// serveConnection serves one connection, in which messages follow one another.
func (a *Agent) serveConnection(ctx context.Context, conn net.Conn) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	context.AfterFunc(ctx, func() { _ = conn.Close() })
	queue, taken := make(chan []byte, waiting), make(chan struct{}, 1)
	running.Go(func() {
		defer cancel()
		w := bufio.NewWriter(conn)
		for {
			select {
			case <-ctx.Done():
				return
			case b := <-queue:
				select {
				case taken <- struct{}{}:
				default:
				}
				_, err := w.Write(b) // Flush has the error as well
				if len(queue) == 0 {
					err = w.Flush()
				}
				if err != nil {
					return
				}
			}
		}
	})
	p := a.newPeer(func(b []byte) error {
		select {
		case queue <- slices.Clone(b):
			return nil
		default:
			return errBehind
		}
	})
	defer p.closeFlows()
	r, buf := bufio.NewReader(conn), make([]byte, ccp.MaxToAgent)
	for a.firstFault() == nil {
		for len(queue) > waiting/2 { // as where a datapath announces all its flows
			select {
			case <-taken:
			case <-ctx.Done():
				return
			}
		}
		if _, err := io.ReadFull(r, buf[:ccp.HeaderLen]); err != nil {
			return
		}
		n, err := ccp.Length(buf)
		if err != nil || n > len(buf) {
			return // the next message cannot be found
		}
		if _, err := io.ReadFull(r, buf[ccp.HeaderLen:n]); err != nil {
			return
		}
		if p.takeDatagram(buf[:n]) != nil {
			return
		}
	}
}
