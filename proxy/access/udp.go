package access

// UDPSettings say what becomes of the UDP that a listener's clients receive past the proxy. "penstock rules apply
// --udp" sends it into a netfilter queue.
type UDPSettings struct {
	// The netfilter queue that the proxy serves: packets wait there until their host's window has room. The number of
	// "penstock rules apply --udp-queue", which is 2510 unless given. 0: UDP passes.
	Queue int `yaml:"queue" min:"0" max:"65535"`
}

// isZero reports whether no key is set.
func (u UDPSettings) isZero() bool { return u == UDPSettings{} }
