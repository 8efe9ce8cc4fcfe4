package ingress

import (
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

func TestLocalIsWhatEndsOnThisMachine(t *testing.T) {
	open, err := OpenRoutes()
	require.NoError(t, err)
	t.Cleanup(open.Close)
	for range 4 { // at a time
		t.Run("one socket", func(t *testing.T) {
			t.Parallel()
			checkLocal(t, open)
		})
	}
	t.Run("a socket each", func(t *testing.T) { checkLocal(t, new(Routes)) })
}

func checkLocal(t *testing.T, routes *Routes) {
	here := []string{"127.0.0.1", "127.9.9.9", "::ffff:127.0.0.1"}
	list, err := net.InterfaceAddrs()
	require.NoError(t, err)
	for _, a := range list {
		here = append(here, a.(*net.IPNet).IP.String())
	}
	for _, a := range here {
		local, err := routes.Local(netip.MustParseAddr(a))
		require.NoError(t, err, a)
		assert.True(t, local, a)
	}
	for _, a := range []string{"192.0.2.1", "2001:db8::1", "255.255.255.254"} {
		local, err := routes.Local(netip.MustParseAddr(a))
		require.NoError(t, err, a)
		assert.False(t, local, a)
	}
}

// TestAnswersAreRememberedUntilSomethingChanges asks for an address that comes and goes, in a namespace of its own.
func TestAnswersAreRememberedUntilSomethingChanges(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the test, and its namespace with the thread
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		need.Namespaces(t, err)
	}
	routes, err := OpenRoutes()
	require.NoError(t, err)
	t.Cleanup(routes.Close)
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	require.NoError(t, netlink.LinkSetUp(lo))
	mine, err := netlink.ParseAddr("198.51.100.7/32")
	require.NoError(t, err)
	ask := func() bool {
		local, err := routes.Local(netip.MustParseAddr("198.51.100.7"))
		require.NoError(t, err)
		return local
	}
	routes.replaceAnswers(map[netip.Addr]bool{}) // what the link's coming up has not forgotten yet
	before := routes.asked
	for range 1000 {
		require.False(t, ask())
	}
	assert.LessOrEqual(t, routes.asked-before, 3, "connections to a known address ask for nothing")
	require.NoError(t, netlink.AddrAdd(lo, mine))
	require.Eventually(t, ask, 10*time.Second, time.Millisecond)
	require.NoError(t, netlink.AddrDel(lo, mine))
	require.Eventually(t, func() bool { return !ask() }, 10*time.Second, time.Millisecond)
}
