package alcc

import "net"

// plainLeg is a connection that the kernel alone controls.
type plainLeg struct{ *net.TCPConn }

// Reset implements leg.
func (l plainLeg) Reset() error {
	_ = l.SetLinger(0) // an error shows in Close
	return l.Close()
}
