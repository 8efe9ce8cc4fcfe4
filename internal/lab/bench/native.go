package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/internal/lab/native"
	"github.com/penstock-net/penstock/internal/netlab"
)

// nativeDownload is a native sender at the server and its receiver at the client.
type nativeDownload struct {
	sender   *native.Sender
	receiver net.PacketConn
	stop     context.CancelFunc
	failed   chan error // one value, if an end fails by itself
	done     chan error // two values, one for each end
}

func startNative(lab *netlab.Cellular, algorithm string) (d *nativeDownload, err error) {
	d = &nativeDownload{failed: make(chan error, 2), done: make(chan error, 2)}
	at := netip.AddrPortFrom(lab.ClientAddr.V4, serverPort)
	err = lab.Client.Do(func() error {
		d.receiver, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("start the native receiver: %w", err)
	}
	token := native.NewToken()
	err = lab.Server.Do(func() error {
		d.sender, err = native.Open(at, token, algorithm)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, d.receiver.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	d.stop = stop
	run := func(end func() error) {
		err := end()
		if err != nil {
			d.failed <- err
		}
		d.done <- err
	}
	go run(func() error { return native.Receive(d.receiver, token) })
	go run(func() error { return d.sender.Run(ctx) })
	return d, nil
}

// close stops the sender, then the receiver, and returns what the sender sent.
func (d *nativeDownload) close() (sent socket, err error) {
	d.stop()
	first := <-d.done // the sender, unless the receiver failed before
	err = errors.Join(first, d.receiver.Close(), <-d.done)
	sent.sent, sent.resent = d.sender.Sent()
	return sent, err
}
