package proxy

import (
	"context"
	"fmt"

	"github.com/penstock-net/penstock/proxy/access"
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
	// privilege is why the thread that gives verdicts keeps CAP_NET_ADMIN only with the process; nil: it keeps it alone.
	privilege error
	stop      func()        // ends serving
	done      chan struct{} // closed once serving has ended
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

// serve lets packets go as decide and the windows say, until close.
func (h *heldUDP) serve(cfg hold.Config) {
	ctx, stop := context.WithCancel(context.Background())
	h.stop, h.done = stop, make(chan struct{})
	h.holder = hold.New(cfg, h.queue, h.echoes)
	privilege := make(chan error)
	go func() {
		defer close(h.done)
		privilege <- hold.LockPrivilege()
		if err := h.holder.ServeQueue(ctx, h.queue, h.echoes, h.copies); err != nil {
			cfg.Log.Error("UDP is no longer held: it passes unmanaged from now on", "queue", h.number, "err", err)
		}
		h.queue.Close() // so that the kernel lets packets pass
	}()
	h.privilege = <-privilege
}

// close lets all packets go that wait, and gives the queue back.
func (h *heldUDP) close() {
	if h.holder == nil {
		h.queue.Close()
	} else {
		h.stop()
		<-h.done
	}
	h.echoes.Close()
	h.copies.Close()
}

// direction names the direction as telemetry does.
func (h *heldUDP) direction() string {
	if h.uplink {
		return "up"
	}
	return "down"
}

// HeldInfo is the state of the UDP that is held for one listener in one direction.
type HeldInfo struct {
	Listener  string
	Direction string // down or up
	hold.Stats
	Clients []hold.ClientState // up to a second old
}
