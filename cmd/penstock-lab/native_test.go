package main

import (
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestNativeEndsAreRefusedWhatCannotBe(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if assert.NoError(t, err) {
		defer taken.Close()
	}
	assertRefused(t, "native", map[string]string{
		"receive --over quic": `--over "quic": must be one of udp, tcp, own-acks`,
		"receive --every 0s":  "--every is 0s, but must be at least 1ms",
		"receive --over tcp --listen " + taken.Addr().String(): "address already in use",
		"send localhost":            `"localhost" is no address and port, such as 127.0.0.1:9100`,
		"send 127.0.0.1:1 -a coppa": `--algorithm: no algorithm "coppa"`,
	})
}
