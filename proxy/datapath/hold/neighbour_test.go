package hold

import (
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	arpAnswer = "0001080006040002" + "020000000007" + "cb007109" + "020000000001" + "00000000"
	// advertisement says that fd77:1::2 is at 02:00:00:00:00:07.
	advertisement = "8800000060000000" + "fd770001000000000000000000000002"
	targetOption  = "0201020000000007"
)

func TestAnswersOfNeighboursAreRead(t *testing.T) {
	a, ok := parseARP(fromHex(t, arpAnswer))
	require.True(t, ok)
	assert.Equal(t, netip.MustParseAddr("203.0.113.9"), a.from)
	assert.Equal(t, netip.IPv4Unspecified(), a.to)
	assert.Equal(t, "02:00:00:00:00:07", a.hardware.String())
	a, ok = parseAdvertisement(fromHex(t, advertisement, targetOption))
	require.True(t, ok)
	assert.Equal(t, netip.MustParseAddr("fd77:1::2"), a.from)
	assert.Equal(t, "02:00:00:00:00:07", a.hardware.String())
	_, ok = parseAdvertisement(fromHex(t, advertisement))
	assert.True(t, ok, "the option may be left out")
	for name, packet := range map[string]string{
		"a request":              "0001080006040001" + arpAnswer[16:],
		"of another network":     "0006" + arpAnswer[4:],
		"cut":                    arpAnswer[:54],
		"not solicited":          "8800000020000000" + advertisement[16:],
		"an option without size": advertisement + "0200020000000007",
		"an option that is cut":  advertisement + "0202020000000007",
	} {
		_, arp := parseARP(fromHex(t, packet))
		_, six := parseAdvertisement(fromHex(t, packet))
		assert.False(t, arp || six, name)
	}
}

func FuzzAnswersOfNeighbours(f *testing.F) {
	f.Add(fromHex(f, arpAnswer))
	f.Add(fromHex(f, advertisement, targetOption))
	f.Fuzz(func(t *testing.T, packet []byte) {
		if a, ok := parseARP(packet); ok {
			assert.True(t, a.from.Is4() && a.to.Is4() && len(a.hardware) == 6)
		}
		if a, ok := parseAdvertisement(packet); ok {
			assert.True(t, a.from.Is6() && (a.hardware == nil || len(a.hardware) == 6))
		}
		(&neighbourAnswer{}).readControls(packet)
	})
}

// joinNeighbour connects this namespace to a host in another one by Ethernet, at 203.0.113.1 and fd77::1.
// The host answers no echo requests.
func joinNeighbour(t *testing.T) {
	t.Helper()
	here, err := netns.Get()
	require.NoError(t, err)
	there, err := netns.New() // enters it
	require.NoError(t, err)
	t.Cleanup(func() { _ = there.Close() })
	for _, setting := range []string{"ipv4/icmp_echo_ignore_all", "ipv6/icmp/echo_ignore_all"} {
		require.NoError(t, os.WriteFile("/proc/sys/net/"+setting, []byte("1"), 0))
	}
	require.NoError(t, netns.Set(here))
	require.NoError(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "lan0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(there),
	}))
	remote, err := netlink.NewHandleAt(there)
	require.NoError(t, err)
	defer remote.Close()
	local, err := netlink.NewHandle()
	require.NoError(t, err)
	defer local.Close()
	for _, end := range []struct {
		handle *netlink.Handle
		device string
		last   byte
	}{{local, "lan0", 1}, {remote, "eth0", 2}} {
		link, err := end.handle.LinkByName(end.device)
		require.NoError(t, err)
		for _, ip := range []net.IP{{203, 0, 113, end.last}, {0xfd, 0x77, 15: end.last}} {
			bits := len(ip) * 8
			require.NoError(t, end.handle.AddrAdd(link, &netlink.Addr{
				IPNet: &net.IPNet{IP: ip, Mask: net.CIDRMask(bits/4*3, bits)}, Flags: unix.IFA_F_NODAD,
			}))
		}
		require.NoError(t, end.handle.LinkSetUp(link))
	}
}

// awaits calls condition on this goroutine, which is in a namespace of its own, until it is true.
func awaits(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !condition(); time.Sleep(10 * time.Millisecond) {
		require.True(t, time.Now().Before(end), what)
	}
}

// TestANeighbourAnswersThoughItDropsPings asks a host in a namespace, as the kernel knows it once something was sent.
func TestANeighbourAnswersThoughItDropsPings(t *testing.T) {
	enterNamespace(t)
	joinNeighbour(t)
	s, err := OpenEchoSocket()
	require.NoError(t, err)
	defer s.Close()
	require.NotNil(t, s.neighbourSocket)
	for _, address := range []string{"203.0.113.2", "fd77::2"} {
		address := netip.MustParseAddr(address)
		var n Neighbour
		awaits(t, "the kernel knows "+address.String(), func() (ok bool) {
			if c, err := net.Dial("udp", netip.AddrPortFrom(address, 9).String()); err == nil {
				_, _ = c.Write([]byte("x")) // the kernel looks for its hardware address
				_ = c.Close()
			}
			n, ok = s.FindNeighbour(address)
			return ok
		})
		for _, marked := range []bool{false, true} {
			seen := map[bool]int{}
			awaits(t, "an answer of "+address.String(), func() bool {
				s.AskNeighbour(&n, marked)
				s.neighbourSocket.receiveAnswers(func(a neighbourAnswer) {
					if ok, isMarked := a.matchRequest(&n); ok {
						seen[isMarked]++
					}
				})
				return seen[marked] > 0
			})
		}
	}
	_, ok := s.FindNeighbour(netip.MustParseAddr("198.51.100.1"))
	assert.False(t, ok, "no route")
}

// TestTheUDPOfANeighbourIsHeldThoughItDropsPings sends to a host in a namespace through a kernel's queue.
func TestTheUDPOfANeighbourIsHeldThoughItDropsPings(t *testing.T) {
	enterNamespace(t)
	joinNeighbour(t)
	queueUDP(t, 9, 9)
	h, end := serveQueue(t, 9)
	sender, err := net.Dial("udp", "203.0.113.2:9")
	require.NoError(t, err)
	defer sender.Close()
	awaits(t, "an answer of the neighbour", func() bool {
		_, _ = sender.Write([]byte("datagram")) // refused: nothing listens there
		states := h.States()
		return len(states) == 1 && states[0].AcknowledgedBy == "neighbour" && states[0].Flow.Delivered > 100
	})
	end()
}
