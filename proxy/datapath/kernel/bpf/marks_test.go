package bpf

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

// inLoopback runs f on a thread in the connections' namespace.
func inLoopback(t *testing.T, f func() error) {
	t.Helper()
	namespace, err := loopback()
	if err != nil {
		need.Namespaces(t, err)
	}
	require.NoError(t, aside(func() error {
		if err := unix.Setns(namespace, unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	}))
}

func setECN(t *testing.T, mode string) {
	t.Helper()
	inLoopback(t, func() error { return os.WriteFile("/proc/sys/net/ipv4/tcp_ecn", []byte(mode), 0) })
}

// markAll has all that goes to the receiver marked; the result ends it.
func markAll(t *testing.T, receiver *net.TCPConn) (stop func()) {
	t.Helper()
	nft := func(script string) {
		inLoopback(t, func() error {
			out, err := exec.Command("nft", script).CombinedOutput()
			if err != nil {
				return fmt.Errorf("nft: %w: %s", err, out)
			}
			return nil
		})
	}
	nft(fmt.Sprintf("table ip marks { chain in { type filter hook prerouting priority raw; tcp dport %d ip ecn != "+
		"not-ect ip ecn set ce; }; }",
		receiver.LocalAddr().(*net.TCPAddr).Port))
	return func() { nft("delete table ip marks") }
}

// TestAMarkThatIsNotAnsweredYetHalvesTheWindow: each round trip of them once, until
// the process says what it makes of it.
func TestAMarkThatIsNotAnsweredYetHalvesTheWindow(t *testing.T) {
	need.Programs(t, "nft")
	c := open(t, Config{Cells: 1})
	setECN(t, "1")
	defer setECN(t, "2")
	l := bound(t, c)
	const window = 40
	l.window(t, window)
	l.pass(t, 100*segment)
	l.window(t, window)
	require.EqualValues(t, window, l.settled(t).Cwnd)

	stop := markAll(t, l.receiver)
	for most := uint32(window / 2); most >= 2; most /= 2 {
		l.pass(t, 100*segment)
		s := l.settled(t)
		onTime(t, s)
		assert.LessOrEqual(t, s.Cwnd, most)
		assert.GreaterOrEqual(t, s.Cwnd, uint32(2))
	}
	assert.Positive(t, l.reading(t).Marked)
	stop()

	l.window(t, window)
	l.pass(t, 100*segment) // the first of them tells the receiver that its echo was heard
	l.settled(t)
	l.window(t, window)
	l.pass(t, segment)
	assert.EqualValues(t, window, l.settled(t).Cwnd, "once it is answered, what the process says")
}
