package main

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/penstock-net/penstock/internal/doctor"
	"github.com/penstock-net/penstock/proxy"
)

// listenTCP listens at an address of the configuration. An error names the key, who has the port, and the cure.
func listenTCP(key, address, cure string) (net.Listener, error) {
	ln, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE), errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, nameOwner(&proxy.ListenError{Key: key, Network: "tcp", Address: address, Cure: cure, Err: err})
	case err != nil:
		return nil, fmt.Errorf("%s: %w (%s)", key, err, cure)
	}
	return ln, nil
}

// explainListen adds to an error about a listener which process has the port, and the flag to change where there
// is no configuration file.
func (h *service) explainListen(err error) error {
	var failed *proxy.ListenError
	if !errors.As(err, &failed) {
		return err
	}
	if h.flags.config == "" {
		failed.Key, failed.Cure = "--listen", "name another by --listen, such as --listen 127.0.0.1:3128"
	}
	return nameOwner(failed)
}

// nameOwner adds who has the port.
func nameOwner(failed *proxy.ListenError) error {
	if failed.InUse() {
		failed.Owner = doctor.SocketOwner(failed.Network, failed.Address)
	}
	return failed
}
