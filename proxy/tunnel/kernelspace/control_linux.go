package kernelspace

import (
	"errors"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// answerWithin bounds one call of control.
const answerWithin = 2 * time.Second

// errSilent says that the program behind an interface does not answer.
var errSilent = errors.New("the program that made the interface does not answer")

// control reads and configures WireGuard interfaces. If the program that has made an interface does not answer, a call
// ends with errSilent, and so does each later call until that program has answered the first one.
type control struct {
	client *wgctrl.Client
	// busy has room for one call.
	busy chan struct{}
}

// openControl opens sockets to the kernel, and to programs that speak WireGuard's configuration protocol.
func openControl() (*control, error) {
	client, err := wgctrl.New()
	return &control{client, make(chan struct{}, 1)}, err
}

// Device returns the state of an interface.
func (c *control) Device(name string) (*wgtypes.Device, error) {
	answer := make(chan *wgtypes.Device, 1)
	err := c.callWithin(func() error {
		device, err := c.client.Device(name)
		answer <- device
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-answer, nil
}

// ConfigureDevice changes an interface.
func (c *control) ConfigureDevice(name string, cfg wgtypes.Config) error {
	return c.callWithin(func() error { return c.client.ConfigureDevice(name, cfg) })
}

// callWithin calls f, and waits for its end for at most answerWithin.
func (c *control) callWithin(f func() error) error {
	select {
	case c.busy <- struct{}{}:
	default:
		return errSilent
	}
	ended := make(chan error, 1)
	go func() {
		err := f()
		<-c.busy
		ended <- err
	}()
	timer := time.NewTimer(answerWithin)
	defer timer.Stop()
	select {
	case err := <-ended:
		return err
	case <-timer.C:
		return errSilent
	}
}

// Close closes the sockets.
func (c *control) Close() error { return c.client.Close() }
