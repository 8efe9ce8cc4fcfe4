package stage

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/native"
)

// nativePort is the first receiver's.
const nativePort = 20_000

// nativeBulk sends by the algorithm that the stage's edge names, and by no edge.
func (a *actor) nativeBulk(ctx context.Context) error {
	managed, terms, err := a.run.stage.terms(a.number)
	if err != nil {
		return err
	}
	if !managed {
		return fmt.Errorf("native: %q has no algorithm", a.Name)
	}
	return a.sendNative(ctx, terms.Algorithm, terms.Params)
}

// sendNative makes the server send by an algorithm over UDP until the actor stops, and counts what comes to its host.
func (a *actor) sendNative(ctx context.Context, algorithm string, params cc.Params) error {
	to := netip.AddrPortFrom(a.host, uint16(nativePort+a.number))
	var receiver net.PacketConn
	err := a.run.lab.Client.Do(func() (err error) {
		receiver, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(to))
		return err
	})
	if err != nil {
		return fmt.Errorf("start the native receiver: %w", err)
	}
	token := native.NewToken()
	var sender *native.Sender
	err = a.run.lab.Server.Do(func() (err error) {
		sender, err = native.Open(to, token, algorithm, params)
		return err
	})
	if err != nil {
		return errors.Join(err, receiver.Close())
	}
	received := make(chan error, 1)
	go func() { received <- native.Receive(receiver, token, func(n cc.Bytes) { a.read(int(n)) }) }()
	a.sender.Store(sender)
	err = sender.Run(ctx)
	return errors.Join(err, receiver.Close(), <-received)
}
