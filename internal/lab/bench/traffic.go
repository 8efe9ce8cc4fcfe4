package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

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
