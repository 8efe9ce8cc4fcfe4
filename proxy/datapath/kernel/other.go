//go:build !linux

package kernel

import (
	"errors"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Datapath exists on Linux only; this one cannot be made.
type Datapath struct{}

// Conn exists on Linux only.
type Conn struct{ datapath.Conn }

// New fails: this is not Linux.
func New(Config) (*Datapath, error) {
	return nil, errors.New("kernel: this datapath reads Linux's TCP_INFO and runs on Linux only")
}
