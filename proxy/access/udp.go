package access

import (
	"errors"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// UDPSettings say what becomes of the UDP that a listener's clients receive past the proxy. "penstock rules apply
// --udp" sends it into a netfilter queue.
type UDPSettings struct {
	// The netfilter queue that the proxy serves: packets wait there until their host's window has room. The number of
	// "penstock rules apply --udp-queue", which is 2510 unless given. 0: UDP passes.
	Queue int `yaml:"queue" min:"0" max:"65535"`
	// The part of a host's rate that its UDP may take while its TCP wants it and the host answers no echo request,
	// which else tell what has arrived. 0.5 where not set.
	Share *check.Fraction `yaml:"share"`
}

// isZero reports whether no key is set.
func (u UDPSettings) isZero() bool { return u == UDPSettings{} }

// ShareOfWindow returns Share with its default.
func (u UDPSettings) ShareOfWindow() float64 { return float64(valueOr(u.Share, defaultUDPShare)) }

// validate wants a queue where there is a share, and a share above 0.
func (u UDPSettings) validate() error {
	var errs []error
	if u.Share != nil && u.Queue == 0 {
		errs = append(errs, check.Errorf("udp.share", "nothing is held without udp.queue; set it, such as to 2510"))
	}
	if u.Share != nil && *u.Share == 0 {
		errs = append(errs, check.Errorf("udp.share", "it must be above 0; to let UDP pass, remove udp"))
	}
	return errors.Join(errs...)
}
