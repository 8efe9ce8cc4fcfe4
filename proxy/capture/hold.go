package capture

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// Defaults of Hold.
const (
	DefaultHoldQueue   = 2510
	DefaultUplinkQueue = 2511
	// CongestionMark is the bit by which the proxy says that a held packet is to leave with ECN-CE.
	CongestionMark = 0x0400_0000
)

// Sets with the protocols that a proxy serves the queues for. Their elements expire, so that packets pass while the
// proxy stands still, too: the kernel's own bypass is for queues that no process has bound.
const (
	servedSet       = "served"
	servedUplinkSet = "served_uplink"
)

// Chains of held packets. They come behind the machine's own filters, so that what these drop is not held.
const (
	holdChain       = "hold"
	uplinkChain     = "uplink"
	congestionChain = "congestion"
	passingChain    = "passing" // comes before the others, and leaves out what they hold

	passingPriority    nftables.ChainPriority = 9
	holdPriority       nftables.ChainPriority = 10
	congestionPriority nftables.ChainPriority = 11
)

// maxCopies is how many packets a second are copied for their server names. It bounds what a flood of them costs.
const maxCopies = 5000

// Hold says which UDP packets wait in a netfilter queue until the proxy lets them go: those that this machine forwards
// towards its clients, and those of its clients. A queue that no program serves lets them pass.
type Hold struct {
	// All holds UDP of all ports, Ports that of these ports of servers. Neither: none is held.
	All   bool
	Ports []PortRange
	// Queue is the number of the queue. 0: DefaultHoldQueue.
	Queue uint16
	// Uplink holds what clients send, too. 0 as UplinkQueue: DefaultUplinkQueue.
	Uplink      bool
	UplinkQueue uint16
}

// isOn reports whether any packets are held.
func (h Hold) isOn() bool { return h.All || len(h.Ports) > 0 }

// withDefaults fills in the numbers of queues, and refuses what cannot be held.
func (h Hold) withDefaults(interfaces []string) (Hold, error) {
	h.Queue, h.UplinkQueue = cmp.Or(h.Queue, DefaultHoldQueue), cmp.Or(h.UplinkQueue, DefaultUplinkQueue)
	switch {
	case !h.Uplink:
	case !h.isOn():
		return h, errors.New("capture: --udp-up needs --udp, whose ports it holds: add --udp all, or --udp 443")
	case h.Queue == h.UplinkQueue:
		return h, fmt.Errorf("capture: --udp-up-queue: %d is the queue of what goes to clients; choose another number",
			h.Queue)
	case slices.Contains(interfaces, AnyInterface):
		return h, errors.New("capture: --udp-up: interface any does not say where clients are; name their interfaces")
	}
	return h, nil
}

// heldSide is one direction of what is held: clients are the sources and servers the targets of packets, or the other
// way round.
type heldSide struct {
	clients, servers func(family, set) clause
	serverPort       func(set) clause
	ends             [][]clause // each ends a rule for what is held
}

// holdDatagrams adds the chains that hold UDP towards the interfaces of r, and that show the proxy how QUIC begins.
//
//	not to Interfaces                        pass
//	not of what is held                      is counted, and passes
//	multicast, DHCP                          pass
//	from a network of this machine           pass      unless Connected captures it
//	to or from what is excluded              pass
//	other protocols, other ports             pass
//	of a protocol that no proxy serves       pass
//	to or from what is included              wait in the queue
//	let go with CongestionMark               leave with ECN-CE
//
// What comes from Interfaces goes through the same rules the other way. Packets that may begin a QUIC connection are
// copied there, to a log group with the number of the queue, and Uplink holds all packets. No packet to or from this
// machine itself is forwarded, so those of its own addresses and WireGuard port are not held.
func (t *ruleset) holdDatagrams(r Rules) {
	served := t.addServedSet(servedSet)
	isAny := slices.Contains(r.Interfaces, AnyInterface)
	var interfaces set
	if !isAny {
		interfaces = t.addSet("hold_interfaces", nftables.TypeIFName, interfaceElements(r.Interfaces))
	}

	t.beginForwardChain(passingChain, passingPriority)
	if !isAny {
		t.addRule(notToInterfaces(interfaces), returnToCaller())
	}
	t.countPassing(r, served)

	t.beginForwardChain(holdChain, holdPriority)
	if !isAny {
		t.addRule(notToInterfaces(interfaces), returnToCaller())
	}
	t.addHeldSide(r, heldSide{targetIn, sourceIn, sourcePortIn, [][]clause{
		{isServed(served), countPackets(), toQueue(r.Hold.Queue, r.holdsByTarget)},
	}})

	t.beginForwardChain(uplinkChain, holdPriority)
	if !isAny {
		t.addRule(notFromInterfaces(interfaces), returnToCaller())
		t.addRule(toInterfaces(interfaces), returnToCaller())
	}
	up := heldSide{sourceIn, targetIn, targetPortIn, [][]clause{copyInitial(served, r.Hold.Queue)}}
	if r.Hold.Uplink {
		served := t.addServedSet(servedUplinkSet)
		up.ends = append(up.ends, copyInitial(served, r.Hold.UplinkQueue),
			[]clause{isServed(served), countPackets(), toQueue(r.Hold.UplinkQueue, r.holdsByTarget)})
	}
	t.addHeldSide(r, up)

	t.beginForwardChain(congestionChain, congestionPriority)
	for _, f := range r.usedFamilies() {
		t.addRule(ofFamily(f), hasMark(CongestionMark), setCongestionExperienced(f), removeMark(CongestionMark))
	}
}

// beginForwardChain begins a chain for what this machine forwards.
func (t *ruleset) beginForwardChain(name string, priority nftables.ChainPriority) {
	t.beginChain(name, nftables.ChainTypeFilter, nftables.ChainHookForward, &priority,
		fmt.Sprintf("type filter hook forward priority %d", priority))
}

// addServedSet adds a set of protocols, which KeepServed fills.
func (t *ruleset) addServedSet(name string) set {
	t.addSet(name, nftables.TypeInetProto, nil)
	s := &t.sets[len(t.sets)-1]
	s.interval, s.expires = false, true
	return *s
}

// addHeldSide adds the rules of a direction to the last chain.
func (t *ruleset) addHeldSide(r Rules, s heldSide) {
	// Clients and servers of DHCP have these ports both (RFC 2131 §4.1, RFC 8415 §7.2).
	dhcp := t.addSet("hold_dhcp", nftables.TypeInetService, portElements([]PortRange{{67, 68}, {546, 547}}))
	t.addRule(isUDP(), targetPortIn(dhcp), returnToCaller())
	for _, f := range r.usedFamilies() {
		t.addRule(toMulticast(f), returnToCaller())
		rule, some := t.selectAddresses(r, f, "hold_",
			matchedSide{"clients", s.clients, r.Sources}, matchedSide{"servers", s.servers, r.Destinations}, isUDP())
		if !some {
			continue
		}
		if !r.Hold.All {
			rule = append(rule, s.serverPort(t.addSet("hold_ports", nftables.TypeInetService, portElements(r.Hold.Ports))))
		}
		for _, end := range s.ends {
			t.addRule(slices.Concat(rule, end)...)
		}
	}
}

// countPassing adds the rules that count what goes to hosts in the sets of Passing and does not wait in the queue. UDP
// of the ports that are held is not counted, even if another rule lets it pass the queue.
func (t *ruleset) countPassing(r Rules, served set) {
	held := []clause{isUDP(), isServed(served)}
	if !r.Hold.All {
		held = append(held, sourcePortIn(t.addSet("hold_ports", nftables.TypeInetService, portElements(r.Hold.Ports))))
	}
	t.addRule(append(held, returnToCaller())...)
	for _, f := range r.usedFamilies() {
		t.addSet(passingSet+f.version, f.addresses, nil)
		s := &t.sets[len(t.sets)-1]
		s.interval, s.expires, s.counts = false, true, true
		t.addRule(ofFamily(f), targetIn(f, *s), returnToCaller())
	}
}

// copyInitial copies packets that may begin a QUIC connection to a log group. A proxy has to serve the queue.
func copyInitial(served set, group uint16) []clause {
	const groupKey, thresholdKey = 1 << unix.NFTA_LOG_GROUP, 1 << unix.NFTA_LOG_QTHRESHOLD
	return []clause{
		isInitial(), isServed(served),
		{fmt.Sprintf("limit rate %d/second burst %[1]d packets", maxCopies), []expr.Any{
			&expr.Limit{Type: expr.LimitTypePkts, Rate: maxCopies, Unit: expr.LimitTimeSecond, Burst: maxCopies},
		}},
		{fmt.Sprintf("log group %d queue-threshold 1", group), []expr.Any{
			&expr.Log{Key: groupKey | thresholdKey, Group: group, QThreshold: 1},
		}},
	}
}

// isInitial matches Initial packets of QUIC, and a few others, by the first five bytes behind the header of UDP. It
// compares three bits of the first byte: the long header's, the fixed one, and one that is 0 in an Initial's type in
// versions 1 and 2 (RFC 9000 §17.2, RFC 9369 §3.2). Then it compares the bits that 0x00000001 and 0x6b3343cf, the
// numbers of these versions, have in common.
func isInitial() clause {
	return clause{"@th,64,40 & 0xe094ccbc31 == 0xc000000001", []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 8, Len: 5},
		&expr.Bitwise{
			SourceRegister: reg, DestRegister: reg, Len: 5,
			Mask: []byte{0xe0, 0x94, 0xcc, 0xbc, 0x31}, Xor: make([]byte, 5),
		},
		equalTo(0xc0, 0, 0, 0, 1),
	}}
}

// KeepServed makes the installed rules send UDP into its queue for that time from now; 0: no longer. uplink selects
// what clients send instead of what goes to them. Without rules that hold UDP it does nothing, and reports false. It
// needs CAP_NET_ADMIN.
func KeepServed(uplink bool, lasts time.Duration) (isInstalled bool, err error) {
	name := servedSet
	if uplink {
		name = servedUplinkSet
	}
	c, err := nftables.New()
	if err != nil {
		return false, explainError("open nftables", err)
	}
	s := &nftables.Set{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}, Name: name,
		KeyType: nftables.TypeInetProto, HasTimeout: true,
	}
	// Adding an element that is there does not renew its timeout, so it is deleted first. It can only be deleted if it is
	// there, so it is added before that.
	udp := []byte{unix.IPPROTO_UDP}
	err = c.SetAddElements(s, []nftables.SetElement{{Key: udp, Timeout: time.Hour}})
	err = errors.Join(err, c.SetDeleteElements(s, []nftables.SetElement{{Key: udp}}))
	if lasts > 0 {
		err = errors.Join(err, c.SetAddElements(s, []nftables.SetElement{{Key: udp, Timeout: lasts}}))
	}
	if err != nil {
		return false, fmt.Errorf("capture: set %s: %w", name, err)
	}
	if err = c.Flush(); errors.Is(err, unix.ENOENT) {
		return false, nil
	} else if err != nil {
		return false, explainError("say that UDP is served", err)
	}
	return true, nil
}

// toMulticast matches packets to a group of hosts.
func toMulticast(f family) clause {
	if f.isIPv4() {
		return clause{"ip daddr 224.0.0.0/4", []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equalTo(f.proto),
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: f.target, Len: 1},
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{0xf0}, Xor: []byte{0}},
			equalTo(0xe0),
		}}
	}
	return clause{"ip6 daddr ff00::/8", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equalTo(f.proto),
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: f.target, Len: 1},
		equalTo(0xff),
	}}
}

// targetPortIn matches packets to a UDP port in the set.
func targetPortIn(s set) clause {
	return clause{"udp dport @" + s.name, inSet(expr.PayloadBaseTransportHeader, 2, 2, s)}
}

// sourcePortIn matches packets from a UDP port in the set.
func sourcePortIn(s set) clause {
	return clause{"udp sport @" + s.name, inSet(expr.PayloadBaseTransportHeader, 0, 2, s)}
}

// toQueue sends packets into a netfilter queue, unless no program serves it. Kernels without nft_queue have the same
// as a target of iptables.
func toQueue(number uint16, byTarget bool) clause {
	text := fmt.Sprintf("queue flags bypass to %d", number)
	if !byTarget {
		return clause{text, []expr.Any{&expr.Queue{Num: number, Total: 1, Flag: expr.QueueFlagBypass}}}
	}
	const bypass = 1
	info := binary.NativeEndian.AppendUint16(nil, number)   // linux/netfilter/xt_NFQUEUE.h, xt_NFQ_info_v3
	info = binary.NativeEndian.AppendUint16(info, 1)        // queues
	info = binary.NativeEndian.AppendUint16(info, bypass)   // flags
	unknown := xt.Unknown(append(info, make([]byte, 2)...)) // alignment
	return clause{text, []expr.Any{&expr.Target{Name: "NFQUEUE", Rev: 3, Info: &unknown}}}
}

// setCongestionExperienced sets the ECN field to CE (RFC 3168 §5), in the first two bytes of the header.
func setCongestionExperienced(f family) clause {
	load := &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 2}
	store := &expr.Payload{
		OperationType: expr.PayloadWrite, SourceRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 2,
	}
	mask, bits := []byte{0xff, 0xcf}, []byte{0, 0x30}
	if f.isIPv4() {
		mask, bits = []byte{0xff, 0xfc}, []byte{0, 0x03}
		store.CsumType, store.CsumOffset = expr.CsumTypeInet, 10
	}
	return clause{f.name + " ecn set ce", []expr.Any{
		load, &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 2, Mask: mask, Xor: bits}, store,
	}}
}

// installTable installs the table of the rules. Where the kernel has no nft_queue it uses the target of iptables.
func (r Rules) installTable() error {
	err := replaceTable(r.buildRuleset())
	if r.Hold.isOn() && errors.Is(err, unix.ENOENT) {
		r.holdsByTarget = true
		if err = replaceTable(r.buildRuleset()); errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("capture: --udp: the kernel lacks nft_queue and xt_NFQUEUE, or nft_log and "+
				"nfnetlink_log; load them with: modprobe -a nft_queue nft_log nfnetlink_log: %w", err)
		}
	}
	return err
}
