package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/proxy/policy"
)

// Trial leaves some of the new connections of one client host to the kernel, to compare them with the others.
// Connections that run keep what they have, because none and our own control cannot take over from each other.
type Trial struct {
	Host string // as policy.ClientHost names it
	// Unmanaged reports whether a connection that begins now is left to the kernel. It must not wait.
	Unmanaged func() bool
}

// leavesToKernel reports whether a connection that begins now is left to the kernel.
func (t *Trial) leavesToKernel(client netip.Addr, peer string) bool {
	return policy.ClientHost(client, peer) == t.Host && t.Unmanaged()
}
