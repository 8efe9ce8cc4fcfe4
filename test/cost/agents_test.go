//go:build linux

package cost

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/netlab"
)

// BenchmarkAgent has the agent agents/go/reno decide for each flow, beside the Reno that is
// built in, over a link whose queue each window fills until a packet is lost: so each binds,
// and the agent is asked in each round trip. Held is how many legs have their window in force
// at the end. The processor time is the proxy's; the agent's comes on top.
func BenchmarkAgent(b *testing.B) {
	const (
		rate   = 500e6 // bits per second
		least  = 20    // ms of queue, which are the round trip: nothing else takes time here
		packet = 1514
		window = 10 // packets that there is room for, of each flow
	)
	executable := build(b)
	dir := b.TempDir()
	program, socket := filepath.Join(dir, "reno"), filepath.Join(dir, "socket")
	reno := "github.com/penstock-net/penstock/agents/go/reno"
	out, err := exec.Command("go", "build", "-o", program, reno).CombinedOutput()
	require.NoError(b, err, "%s", out)
	agent := exec.Command(program, socket)
	agent.Stderr = os.Stderr
	require.NoError(b, agent.Start())
	defer func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	}()
	for _, flows := range []int{1, 16, 64, 1000} {
		l := load{
			name: fmt.Sprintf("%dflows-500mbit", flows), flows: flows, rate: rate, wall: 8 * time.Second,
			queue: max(least*rate/8/1000, flows*window*packet),
		}
		compare(b, executable, l, []carrier{
			{name: "reno-ebpf", envelope: "ebpf", algorithm: "reno", terms: eachAlone},
			{
				name: "agent-ebpf", envelope: "ebpf", algorithm: "ccp:reno", terms: eachAlone,
				more: fmt.Sprintf("agents: [{name: reno, socket: %q}]\n", socket),
			},
		})
	}
}

// narrow has what comes to a node pass a link of a rate, with a queue of so many bytes. The queue
// is at the far end, so that the sending kernel does not count it as its own (TCP small queues).
func narrow(b *testing.B, node *netlab.Node, rate float64, queue int) {
	const burst = 128 << 10 // bytes: a segment that is yet to be cut stays whole
	err := node.Do(func() error {
		h, err := netlink.NewHandle()
		if err != nil {
			return err
		}
		defer h.Close()
		near, err := h.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "narrow0"
		link := &netlink.Ifb{LinkAttrs: attrs}
		if err := h.LinkAdd(link); err != nil {
			return fmt.Errorf("a device with a queue (CONFIG_IFB): %w", err)
		}
		of := func(index int, parent uint32) netlink.QdiscAttrs {
			return netlink.QdiscAttrs{LinkIndex: index, Parent: parent, Handle: netlink.MakeHandle(1, 0)}
		}
		ingress := &netlink.Ingress{QdiscAttrs: of(near.Attrs().Index, netlink.HANDLE_INGRESS)}
		ingress.Handle = netlink.MakeHandle(0xffff, 0)
		return errors.Join(
			h.LinkSetUp(link),
			h.QdiscAdd(&netlink.Tbf{
				QdiscAttrs: of(link.Index, netlink.HANDLE_ROOT), Rate: uint64(rate / 8), Limit: uint32(queue),
				Buffer: uint32(burst * 8 / rate * 1e6 * netlink.TickInUsec()),
			}),
			h.QdiscAdd(ingress),
			h.FilterAdd(&netlink.U32{
				FilterAttrs: netlink.FilterAttrs{
					LinkIndex: near.Attrs().Index, Parent: ingress.Handle, Priority: 1, Protocol: unix.ETH_P_ALL,
				},
				Actions: []netlink.Action{netlink.NewMirredAction(link.Index)},
			}),
		)
	})
	require.NoError(b, err)
}
