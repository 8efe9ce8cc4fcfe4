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

// control configures WireGuard interfaces. The program behind an interface may not answer. A call
// then ends with errSilent, and so does every later one until the program has answered the first.
type control struct {
	client *wgctrl.Client
	// busy has room for one call.
	busy chan struct{}
}

// openControl opens sockets to the kernel, and to programs that speak WireGuard's configuration
// protocol.
func openControl() (*control, error) {
	client, err := wgctrl.New()
	return &control{client, make(chan struct{}, 1)}, err
}

// Device returns the state of an interface.
func (c *control) Device(name string) (is *wgtypes.Device, err error) {
	answer := make(chan *wgtypes.Device, 1)
	err = c.callWithin(func() error {
		is, err := c.client.Device(name)
		answer <- is
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
