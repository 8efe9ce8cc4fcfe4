package capture

import (
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
	DefaultHoldQueue = 2510
	// CongestionMark is the bit by which the proxy says that a held packet is to leave with ECN-CE.
	CongestionMark = 0x0400_0000
)

// servedSet holds the protocols that a proxy serves the queue for. Its elements expire, so that packets pass while the
// proxy stands still, too: the kernel's own bypass is for queues that no process has bound.
const servedSet = "served"

// Chains of held packets. They come behind the machine's own filters, so that what these drop is not held.
const (
	holdChain       = "hold"
	congestionChain = "congestion"

	holdPriority       nftables.ChainPriority = 10
	congestionPriority nftables.ChainPriority = 11
)

// Hold says which UDP packets wait in a netfilter queue until the proxy lets them go: those that this machine forwards
// towards its clients. A queue that no program serves lets them pass.
type Hold struct {
	// All holds UDP of all ports, Ports that of these ports of servers. Neither: none is held.
	All   bool
	Ports []PortRange
	// Queue is the number of the queue. 0: DefaultHoldQueue.
	Queue uint16
}

// isOn reports whether any packets are held.
func (h Hold) isOn() bool { return h.All || len(h.Ports) > 0 }

// holdDatagrams adds the chains that hold UDP towards the interfaces of r.
//
//	not to Interfaces                        pass
//	of a protocol that no proxy serves       pass
//	other protocols, other ports             pass
//	multicast                                pass
//	from a network of this machine           pass      unless Connected captures it
//	to or from what is excluded              pass
//	to or from what is included              wait in the queue
//	let go with CongestionMark               leave with ECN-CE
func (t *ruleset) holdDatagrams(r Rules) {
	t.beginForwardChain(holdChain, holdPriority)
	if !slices.Contains(r.Interfaces, AnyInterface) {
		interfaces := t.addSet("hold_interfaces", nftables.TypeIFName, interfaceElements(r.Interfaces))
		t.addRule(notToInterfaces(interfaces), returnToCaller())
	}
	var ports []clause
	if !r.Hold.All {
		ports = append(ports, sourcePortIn(t.addSet("hold_ports", nftables.TypeInetService, portElements(r.Hold.Ports))))
	}
	served := t.addSet(servedSet, nftables.TypeInetProto, nil)
	t.sets[len(t.sets)-1].interval, t.sets[len(t.sets)-1].expires = false, true
	t.addRule(notServed(served), returnToCaller())
	for _, f := range r.usedFamilies() {
		t.holdFamily(r, f, ports)
	}
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

// holdFamily adds what is excluded and what is held of one family. Clients are targets here, and servers sources.
func (t *ruleset) holdFamily(r Rules, f family, ports []clause) {
	suffix, kind := f.setSuffix(), f.addressType()
	t.addRule(toMulticast(f), returnToCaller())
	if r.Connected == ConnectedLeave {
		own := t.addSet("hold_"+connectedSet+suffix, kind, addressElements(r.machineNetworks, f.isIPv4()))
		t.addRule(ofFamily(f), sourceIn(f, own), returnToCaller())
	}
	rule := []clause{ofFamily(f), isUDP()}
	for _, part := range []struct {
		name  string
		in    func(family, set) clause
		match Match
	}{
		{"clients", targetIn, r.Sources},
		{"servers", sourceIn, r.Destinations},
	} {
		if excluded := addressElements(part.match.Exclude, f.isIPv4()); len(excluded) > 0 {
			t.addRule(ofFamily(f), part.in(f, t.addSet("hold_not_"+part.name+suffix, kind, excluded)), returnToCaller())
		}
		if len(part.match.Include) == 0 {
			continue
		}
		included := addressElements(part.match.Include, f.isIPv4())
		if len(included) == 0 {
			return // what is wanted is all of the other family
		}
		rule = append(rule, part.in(f, t.addSet("hold_"+part.name+suffix, kind, included)))
	}
	rule = append(append(rule, ports...), countPackets())
	t.addRule(append(rule, toQueue(r.Hold.Queue, r.holdsByTarget))...)
}

// notServed matches packets of a protocol that is not in the set.
func notServed(s set) clause {
	return clause{"meta l4proto != @" + s.name, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: s.name, Invert: true},
	}}
}

// KeepServed has the installed rules send UDP into the queue for that time from now; 0: no longer. Without rules that
// hold UDP it does nothing. It needs CAP_NET_ADMIN.
func KeepServed(lasts time.Duration) error {
	c, err := nftables.New()
	if err != nil {
		return explainError("open nftables", err)
	}
	s := &nftables.Set{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}, Name: servedSet,
		KeyType: nftables.TypeInetProto, HasTimeout: true,
	}
	// An element that is there keeps its timeout: it is made anew. Deleting needs it to be there.
	udp := []byte{unix.IPPROTO_UDP}
	err = c.SetAddElements(s, []nftables.SetElement{{Key: udp, Timeout: time.Hour}})
	err = errors.Join(err, c.SetDeleteElements(s, []nftables.SetElement{{Key: udp}}))
	if lasts > 0 {
		err = errors.Join(err, c.SetAddElements(s, []nftables.SetElement{{Key: udp, Timeout: lasts}}))
	}
	if err != nil {
		return fmt.Errorf("capture: set %s: %w", servedSet, err)
	}
	if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return explainError("say that UDP is served", err)
	}
	return nil
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

// notToInterfaces matches packets that leave by other interfaces than the set's.
func notToInterfaces(s set) clause {
	return clause{"oifname != @" + s.name, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: s.name, Invert: true},
	}}
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

// removeMark clears the bits of mark, and keeps the other bits.
func removeMark(mark uint32) clause {
	return clause{fmt.Sprintf("meta mark set meta mark & 0x%08x", ^mark), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(^mark), Xor: nativeBytes(0)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg},
	}}
}

// install installs the table of the rules. Where the kernel has no nft_queue it uses the target of iptables.
func (r Rules) install() error {
	err := replaceTable(r.buildRuleset())
	if r.Hold.isOn() && errors.Is(err, unix.ENOENT) {
		r.holdsByTarget = true
		if err = replaceTable(r.buildRuleset()); errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("capture: --udp: the kernel has neither nft_queue nor xt_NFQUEUE; load one with: "+
				"modprobe nft_queue: %w", err)
		}
	}
	return err
}
