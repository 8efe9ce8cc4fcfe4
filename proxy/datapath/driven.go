package datapath

import (
	"errors"
	"time"
)

// ErrWait is what Read, Write and carriers return in place of waiting while a loop drives a leg:
// it is worth trying again once the loop says so.
var ErrWait = errors.New("datapath: not yet")

// The keep-alive of legs over TCP. A vanished peer is found after four minutes. The first probe comes after two, so
// that it seldom wakes the radio of a phone.
const (
	KeepAliveIdle     = 2 * time.Minute
	KeepAliveInterval = 30 * time.Second
	KeepAliveCount    = 4
)

// KeepAliver is implemented by legs that find out by themselves that their peer has vanished only
// once they are asked to: a short connection ends before that matters.
type KeepAliver interface{ KeepAlive() error }

// Driven is implemented by legs that a loop can drive.
type Driven interface {
	// Driven reports whether a loop drives the leg, so that its calls return ErrWait in place of waiting.
	Driven() bool
}
