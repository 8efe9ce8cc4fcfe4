package access

import (
	"net/netip"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// UDPSettings say what becomes of the UDP of a listener's clients that this machine forwards past the proxy. "penstock
// rules apply --udp" sends it into netfilter queues.
type UDPSettings struct {
	// The netfilter queue that the proxy serves: packets wait there until their host's window has room. The number of
	// "penstock rules apply --udp-queue", which is 2510 unless given. 0: UDP passes.
	Queue int `yaml:"queue" min:"0" max:"65535"`
	// The queue for what clients send, where this machine stands in front of the uplink: the number of "penstock rules
	// apply --udp-up-queue", which is 2511 unless given. 0: it passes.
	UplinkQueue int `yaml:"up_queue" min:"0" max:"65535"`
	// A host behind the uplink, such as the provider's name server, that answers echo requests about what clients send:
	// they tell what the uplink has carried. Not set: the gateway that packets leave to.
	UplinkEcho netip.Addr `yaml:"up_echo"`
}

// isZero reports whether no key is set.
func (u UDPSettings) isZero() bool { return u == UDPSettings{} }

// HoldsAny reports whether any direction has a queue.
func (u UDPSettings) HoldsAny() bool { return u.Queue > 0 || u.UplinkQueue > 0 }

// validate refuses an echo host for the uplink without a queue for what clients send.
func (u UDPSettings) validate() error {
	if u.UplinkEcho.IsValid() && u.UplinkQueue == 0 {
		return check.Errorf("udp.up_echo", "nothing that clients send is held without udp.up_queue; set it, such as "+
			"to 2511")
	}
	return nil
}
