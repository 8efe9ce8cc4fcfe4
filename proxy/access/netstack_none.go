//go:build nonetstack

package access

// Netstack reports whether this build has a network stack of its own, and QUIC: what ends
// tunnels in this process.
const Netstack = false
