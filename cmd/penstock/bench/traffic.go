package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
)

// piece is what the ends read and write at once: few enough wakeups to leave the
// processors to the emulator.
const piece = 256 << 10

// request is what a client says before a server sends.
const request = "GET /bulk HTTP/1.0\r\n\r\n"

// server writes to every client, once it has asked, until the client is gone.
type server struct {
	ln   net.Listener
	done sync.WaitGroup

	mu     sync.Mutex
	conns  []net.Conn
	closed bool
}

// serve starts a server whose sockets use the kernel's algorithm.
func serve(node *netlab.Node, algorithm string) (*server, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
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
	}}
	lc.SetMultipathTCP(false)
	ln, err := node.ListenWith(context.Background(), &lc, "tcp4", portText(serverPort))
	if err != nil {
		return nil, fmt.Errorf("start server: %w", err)
	}
	s := &server{ln: ln}
	s.done.Go(s.accept)
	return s, nil
}

func (s *server) accept() {
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = conn.Close() // came too late to matter
			return
		}
		s.conns = append(s.conns, conn)
		s.mu.Unlock()
		s.done.Go(func() { pour(conn) })
	}
}

// pour sends until it is stopped, by whichever end.
func pour(conn net.Conn) {
	buf := make([]byte, piece)
	if _, err := conn.Read(buf); err != nil {
		return
	}
	clear(buf)
	for {
		if _, err := conn.Write(buf); err != nil {
			return
		}
	}
}

func (s *server) close() error {
	err := s.ln.Close()
	s.mu.Lock()
	s.closed = true
	for _, c := range s.conns {
		_ = c.Close() // the client hung up already: an error would say so
	}
	s.mu.Unlock()
	s.done.Wait()
	return err
}

// download is a client that reads as fast as it can.
type download struct {
	conn  net.Conn
	local netip.AddrPort
	ended chan error // one value, when it ends by itself
	done  chan struct{}
}

func startDownload(ctx context.Context, node *netlab.Node, target netip.AddrPort) (*download, error) {
	conn, err := node.DialContext(ctx, "tcp4", target.String())
	if err != nil {
		return nil, fmt.Errorf("connect the client: %w", err)
	}
	if _, err := conn.Write([]byte(request)); err != nil {
		return nil, errors.Join(fmt.Errorf("send the client's request: %w", err), conn.Close())
	}
	d := &download{conn: conn, ended: make(chan error, 1), done: make(chan struct{})}
	if a, ok := conn.LocalAddr().(*net.TCPAddr); ok {
		d.local = a.AddrPort()
	}
	go d.read()
	return d, nil
}

func (d *download) read() {
	defer close(d.done)
	buf := make([]byte, piece)
	for {
		if _, err := d.conn.Read(buf); err != nil {
			d.ended <- err
			return
		}
	}
}

func (d *download) close() error {
	err := d.conn.Close()
	<-d.done
	return err
}

// readSocket looks, through sock_diag, at the node's connection to remote.
func readSocket(node *netlab.Node, remote netip.AddrPort) (s socket, err error) {
	err = node.Do(func() error {
		// A listener for both families makes sockets of the second kind only.
		for _, family := range []uint8{unix.AF_INET6, unix.AF_INET} {
			all, err := netlink.SocketDiagTCPInfo(family)
			if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
				return fmt.Errorf("read sockets of %s: %w", node.Name(), err)
			}
			for _, r := range all {
				if r.TCPInfo != nil && isPeer(r.InetDiagMsg.ID, remote) {
					s = socketOf(r.TCPInfo)
					return nil
				}
			}
		}
		return fmt.Errorf("%s has no connection to %s", node.Name(), remote)
	})
	return s, err
}

func isPeer(id netlink.SocketID, remote netip.AddrPort) bool {
	addr, ok := netip.AddrFromSlice(id.Destination)
	return ok && addr.Unmap() == remote.Addr() && id.DestinationPort == remote.Port()
}

func socketOf(i *netlink.TCPInfo) socket {
	return socket{
		cwnd: float64(i.Snd_cwnd),
		// What the kernel itself counts as being on the wire, RFC 6675's pipe.
		pipe: float64(i.Unacked) - float64(i.Sacked) - float64(i.Lost) + float64(i.Retrans),
		mss:  cc.Bytes(i.Snd_mss),
		sent: cc.Bytes(i.Bytes_sent), resent: cc.Bytes(i.Bytes_retrans),
	}
}
