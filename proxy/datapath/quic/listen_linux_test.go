package quic

import (
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestASocketIsSharedOnlyWhenItIsSaid(t *testing.T) {
	first, err := ListenUDP(nil)
	require.NoError(t, err)
	at := first.LocalAddr().(*net.UDPAddr)
	_, err = ListenUDP(at)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.NoError(t, first.Share(true))
	second, err := ListenUDP(at)
	require.NoError(t, err)
	require.NoError(t, first.Share(false))
	_, err = ListenUDP(at)
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	assert.NoError(t, first.Close())
	_, err = ListenUDP(at)
	require.ErrorIs(t, err, syscall.EADDRINUSE, "the second's")
	assert.NoError(t, second.Close())
}
