package userspace

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// association is an exchange that a peer has begun with another, who may answer. It needs no socket.
type association struct {
	sender string // the peer
	from   origin
	to     netip.AddrPort // of an echo request without a port
}

// forwardAcross forwards a datagram from one peer to another, and keeps its source address.
func (d *Datagrams) forwardAcross(from origin, to netip.AddrPort, payload []byte) {
	if err := d.mayCross(from, to); err != nil {
		d.refuseDatagram(from, to, payload, err)
		return
	}
	target := origin{AddrPort: to, echo: from.echo}
	if from.echo {
		target.AddrPort = netip.AddrPortFrom(to.Addr(), from.Port()) // the identifier stays
	}
	d.deliverToPeer(from.AddrPort, target, payload)
}

// deliverToPeer sends a packet to the peer that has the target. If that peer has sessions, the
// packet waits for room in the peer's share of a window.
func (d *Datagrams) deliverToPeer(source netip.AddrPort, target origin, payload []byte) {
	name := d.inside.Peer(target.Addr())
	d.counts.sentPackets.Add(1)
	d.counts.sentBytes.Add(uint64(len(payload)))
	d.mu.Lock()
	p := d.peers[name]
	d.mu.Unlock()
	if p == nil {
		p = &peer{shaper: shaper{d: d}, name: name}
	}
	p.sendOrQueue(d.with.Clock(), packet{fiveTuple: fiveTuple{source, target}, payload: payload})
}

// mayCross tells why a peer must not send to another; nil: it answers the other, or policy
// permits it.
func (d *Datagrams) mayCross(from origin, to netip.AddrPort) error {
	sender, receiver := d.inside.Peer(from.Addr()), d.inside.Peer(to.Addr())
	if sender == "" {
		return errors.New("its source is no peer's")
	}
	begun := association{sender, from, to}
	answered := association{receiver, origin{AddrPort: to}, from.AddrPort}
	if d.refreshAssociation(begun) || !from.echo && d.refreshAssociation(answered) {
		return nil
	}
	if _, _, err := d.with.Verdict(tunnel.Sent{Peer: sender, Source: from.AddrPort, Target: to}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, exists := d.associations[begun]; exists {
		return nil
	}
	if d.associationsByPeer[sender] >= d.cfg.Load().Sessions {
		return errCrowded
	}
	d.associations[begun] = d.with.Clock()
	d.associationsByPeer[sender]++
	return nil
}

// refreshAssociation tells whether there is such an association, and notes that it is used now.
func (d *Datagrams) refreshAssociation(a association) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, exists := d.associations[a]; !exists {
		return false
	}
	d.associations[a] = d.with.Clock()
	return true
}

// forgetAssociations forgets the associations that are over. The caller holds d.mu.
func (d *Datagrams) forgetAssociations(over func(a association, used cc.Time) bool) {
	for a, used := range d.associations {
		if !over(a, used) {
			continue
		}
		delete(d.associations, a)
		if d.associationsByPeer[a.sender]--; d.associationsByPeer[a.sender] == 0 {
			delete(d.associationsByPeer, a.sender)
		}
	}
}

// EchoReply implements netstack.Datagrams.
func (d *Datagrams) EchoReply(source, target netip.Addr, message []byte) {
	asked := origin{AddrPort: netip.AddrPortFrom(target, binary.BigEndian.Uint16(message[4:])), echo: true}
	if !d.refreshAssociation(association{d.inside.Peer(target), asked, netip.AddrPortFrom(source, 0)}) {
		d.counts.unsolicited.Add(1)
		return
	}
	d.deliverToPeer(netip.AddrPortFrom(source, 0), asked, message)
}

// answerEcho answers an echo request for the gateway's own address inside.
func (d *Datagrams) answerEcho(from origin, gateway netip.Addr, message []byte) {
	message[0] = echoReply4
	if gateway.Is6() {
		message[0] = echoReply6
	}
	if err := d.stack.SendICMP(gateway, from.Addr(), message); err != nil {
		d.counts.failed.Add(1)
	}
}
