package datapath

// Marker is implemented by legs over packets with a DSCP (RFC 2474).
type Marker interface {
	// ReceivedDSCP returns the DSCP of what the peer sent in the handshake; 0: none, or it is not known.
	ReceivedDSCP() uint8

	// SetDSCP sets the DSCP of the packets that leave from now on. Their ECN bits stay the transport's.
	SetDSCP(dscp uint8) error
}
