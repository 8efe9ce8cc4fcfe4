package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// errLookups wraps the error of a lack of descriptors, which bounds lookups.
var errLookups = fmt.Errorf("too many names are being looked up: %w", unix.EMFILE)

// resolver bounds the lookups of all clients. Each has a socket beside those that the connection is counted for.
type boundedResolver struct {
	happyeyeballs.Resolver
	places *datapath.Places
	client string
}

// LookupNetIP implements happyeyeballs.Resolver. It waits for a place.
func (r boundedResolver) LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error) {
	if !r.places.Wait(ctx, r.client) {
		return nil, fmt.Errorf("%w: %w", errLookups, context.Cause(ctx))
	}
	defer r.places.Leave(r.client)
	addrs, err := r.Resolver.LookupNetIP(ctx, network, host)
	return addrs, wrapShortage(err)
}

// wrapShortage has a DNS error wrap the lack of a descriptor, which package net tells in words alone.
func wrapShortage(err error) error {
	var dns *net.DNSError
	if !errors.As(err, &dns) {
		return err
	}
	for _, errno := range []error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS} {
		if strings.HasSuffix(dns.Err, errno.Error()) {
			short := *dns // lookups of the same name share it
			short.UnwrapErr = errno
			return &short
		}
	}
	return err
}
