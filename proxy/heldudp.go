package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
)

// heldQueuePackets is how many packets the kernel keeps of one queue.
const heldQueuePackets = 16_384

// heldUDP is the UDP of a listener's clients, in one direction, that waits in the kernel until windows have room.
type heldUDP struct {
	number uint16
	uplink bool // it is what clients send
	queue  *hold.Queue
	echoes *hold.EchoSocket
	copies *hold.Copies
	holder *hold.Holder // nil: it is not served
	passes *passCounter // of what goes to clients past the queue; nil: it is the uplink
	// privilege is why the threads that need CAP_NET_ADMIN keep it only with the process; nil: they keep it alone.
	privilege error
	stop      func()         // ends serving
	serving   sync.WaitGroup // goroutines that serve
}

// openHeldUDPs binds the netfilter queues of a listener.
func openHeldUDPs(u access.UDPSettings) (all []*heldUDP, err error) {
	for _, uplink := range []bool{false, true} {
		key, number := "udp.queue", u.Queue
		if uplink {
			key, number = "udp.up_queue", u.UplinkQueue
		}
		if number == 0 {
			continue
		}
		h, err := openHeldUDP(uint16(number))
		if err != nil {
			for _, other := range all {
				other.close()
			}
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		h.uplink = uplink
		all = append(all, h)
	}
	return all, nil
}

// openHeldUDP binds a netfilter queue, and the group of the kernel's log with the same number. It needs CAP_NET_ADMIN
// and CAP_NET_RAW.
func openHeldUDP(number uint16) (*heldUDP, error) {
	queue, err := hold.OpenQueue(number, heldQueuePackets)
	if err != nil {
		return nil, err
	}
	echoes, err := hold.OpenEchoSocket()
	if err != nil {
		queue.Close()
		return nil, err
	}
	copies, err := hold.OpenCopies(number)
	if err != nil {
		queue.Close()
		echoes.Close()
		return nil, err
	}
	return &heldUDP{number: number, queue: queue, echoes: echoes, copies: copies}, nil
}

// serveQueue lets packets go as cfg.Decide and the windows say, until close. counting holds the one counter of the
// process that counts what passes.
func (h *heldUDP) serveQueue(cfg hold.Config, counting *atomic.Pointer[passCounter]) {
	ctx, stop := context.WithCancel(context.Background())
	h.stop, h.holder = stop, hold.New(cfg, h.queue, h.echoes)
	h.startThread(func() {
		if err := h.holder.ServeQueue(ctx, h.queue, h.echoes, h.copies); err != nil {
			cfg.Log.Error("UDP is no longer held: it passes unmanaged from now on", "queue", h.number, "err", err)
		}
		h.queue.Close() // so that the kernel lets packets pass
	})
	if !h.uplink {
		h.passes = &passCounter{flows: cfg.Flows, clock: cfg.Clock, log: cfg.Log, counting: counting}
		h.startThread(func() { h.passes.countUntilDone(ctx) })
	}
}

// startThread runs serve on a thread of its own, which has tried to keep CAP_NET_ADMIN when startThread returns.
func (h *heldUDP) startThread(serve func()) {
	privilege := make(chan error)
	h.serving.Go(func() {
		privilege <- hold.LockPrivilege()
		serve()
	})
	h.privilege = errors.Join(h.privilege, <-privilege)
}

// close lets all packets go that wait, and gives the queue back.
func (h *heldUDP) close() {
	if h.holder == nil {
		h.queue.Close()
	} else {
		h.stop()
		h.serving.Wait()
	}
	h.echoes.Close()
	h.copies.Close()
}

// passedBytes returns HeldInfo.PassedBytes.
func (h *heldUDP) passedBytes() int64 {
	if h.passes == nil {
		return 0
	}
	return h.passes.bytes.Load()
}

// HeldInfo is the state of the UDP that is held for one listener in one direction.
type HeldInfo struct {
	Listener  string
	Direction string // down or up
	// PassedBytes went to clients past the queue and all windows, while clients were sent to. 0 in direction up.
	PassedBytes int64
	hold.Stats
	Clients []hold.ClientState // up to a second old
}

// Times between two looks at what passes: while hosts are sent to, and while none is.
const (
	countBusyEvery = 100 * time.Millisecond
	countIdleEvery = time.Second
)

// passCounter reports to flows how many bytes pass to their hosts under no window.
type passCounter struct {
	flows *flow.Manager
	clock func() cc.Time
	log   *slog.Logger
	bytes atomic.Int64 // that have passed to hosts while they were sent to
	// counting is the one counter of the process that counts, because all listeners share the flows.
	counting *atomic.Pointer[passCounter]
	rules    capture.Passing
}

// countUntilDone reads the kernel's counters until ctx is done, while this is the counter that counts.
func (c *passCounter) countUntilDone(ctx context.Context) {
	failed := false
	last := map[netip.Addr]uint64{}
	timer := time.NewTimer(countBusyEvery)
	defer timer.Stop()
	defer c.counting.CompareAndSwap(c, nil)
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if c.counting.Load() != c && !c.counting.CompareAndSwap(nil, c) {
			timer.Reset(countIdleEvery)
			continue
		}
		hosts := c.flows.BusyHosts()
		if len(hosts) == 0 && len(last) == 0 {
			timer.Reset(countIdleEvery)
			continue
		}
		totals, err := c.rules.Read(time.Duration(c.clock()), hosts)
		if err != nil && !failed {
			c.log.Warn("what passes beside the windows is not counted", "err", err)
		}
		failed = err != nil
		now := c.clock()
		for host, total := range totals {
			c.bytes.Add(int64(total - last[host]))
			c.flows.CountPassing(now, host, cc.Bytes(total))
		}
		last = totals
		timer.Reset(countBusyEvery)
	}
}
