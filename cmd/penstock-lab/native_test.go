package main

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/internal/cli"
)

func TestNativeEndsAreRefusedWhatCannotBe(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if assert.NoError(t, err) {
		defer taken.Close()
	}
	for says, args := range map[string][]string{
		`--over "quic": must be one of udp, tcp, own-acks`:           {"receive", "--over", "quic"},
		"--every is 0s, but must be at least 1ms":                    {"receive", "--every", "0s"},
		"address already in use":                                     {"receive", "--over", "tcp", "--listen", taken.Addr().String()},
		`"localhost" is no address and port, such as 127.0.0.1:9100`: {"send", "localhost"},
		`--algorithm: no algorithm "coppa"`:                          {"send", "127.0.0.1:1", "-a", "coppa"},
	} {
		code, _, stderr := run(t, append([]string{"native"}, args...)...)
		assert.Equal(t, cli.ExitInput, code, says)
		assert.Contains(t, stderr, says)
	}
}
