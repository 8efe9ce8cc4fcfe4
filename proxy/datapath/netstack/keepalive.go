package netstack

import (
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// The keep-alive times of a kernel leg: an idle peer that has vanished is noticed after four
// minutes.
const (
	keepAliveIdle     = 2 * time.Minute
	keepAliveInterval = 30 * time.Second
	keepAliveCount    = 4
)

// enableKeepAlive turns on TCP keep-alive.
func enableKeepAlive(endpoint tcpip.Endpoint) error {
	idle, interval := tcpip.KeepaliveIdleOption(keepAliveIdle), tcpip.KeepaliveIntervalOption(keepAliveInterval)
	err := endpoint.SetSockOpt(&idle)
	if err == nil {
		err = endpoint.SetSockOpt(&interval)
	}
	if err == nil {
		err = endpoint.SetSockOptInt(tcpip.KeepaliveCountOption, keepAliveCount)
	}
	if err != nil {
		return kernelError(err)
	}
	endpoint.SocketOptions().SetKeepAlive(true)
	return nil
}
