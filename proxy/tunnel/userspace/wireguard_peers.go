package userspace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// leavingTime is how long a peer that has been removed is still sent the resets of its connections.
const leavingPeriod = 500 * time.Millisecond

// leaving is what the device still has of peers and addresses that have been removed.
type leaving struct {
	addresses *tunnel.Owners
	remaining map[access.Key]*access.Peer // what is left of each peer; nil: nothing
	timer     *time.Timer
}

// SetPeers replaces the peers. Those that stay as they are keep their sessions. Those that go, and addresses
// that peers lose, are let in no further; their keys go once the resets of their connections have left.
func (w *WireGuard) SetPeers(peers []access.Peer) error {
	if err := access.CheckPeers(peers); err != nil {
		return err
	}
	next, taken := make(map[access.Key]access.Peer, len(peers)), map[netip.Prefix]bool{}
	for _, p := range peers {
		next[p.PublicKey] = p
		for _, a := range p.AllowedIPs {
			taken[a.Masked()] = true
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.leaving.Load()
	if before == nil {
		before = &leaving{}
	}
	after := &leaving{remaining: map[access.Key]*access.Peer{}}
	var change strings.Builder
	var gone []access.Peer
	for key := range before.remaining { // they have had their time
		if _, back := next[key]; !back {
			fmt.Fprintf(&change, "public_key=%s\nremove=true\n", key.Hex())
		}
	}
	for key, old := range w.peers {
		p, stays := next[key]
		if !stays {
			after.remaining[key] = nil
			gone = append(gone, old)
			continue
		}
		if lost := without(old.AllowedIPs, taken); len(lost) > 0 {
			after.remaining[key] = &p
			gone = append(gone, access.Peer{Name: old.Name, AllowedIPs: lost})
		}
	}
	for key, p := range next {
		old, known := w.peers[key]
		if _, changed := before.remaining[key]; known && !changed && old.Equal(p) {
			continue
		}
		if _, loses := after.remaining[key]; loses {
			p.AllowedIPs = slices.Concat(p.AllowedIPs, without(old.AllowedIPs, taken))
		}
		writePeer(&change, p)
	}
	if err := w.device.IpcSet(change.String()); err != nil {
		return fmt.Errorf("set peers: %w", err)
	}
	if before.timer != nil {
		before.timer.Stop()
	}
	w.peers = next
	w.owners.Store(tunnel.OwnersOf(peers))
	if len(gone) == 0 {
		w.leaving.Store(nil)
		return nil
	}
	after.addresses = tunnel.OwnersOf(gone)
	after.timer = time.AfterFunc(leavingPeriod, func() { w.removeLeaving(after) })
	w.leaving.Store(after)
	return nil
}

func without(prefixes []netip.Prefix, taken map[netip.Prefix]bool) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(prefixes), func(a netip.Prefix) bool { return taken[a.Masked()] })
}

// removeLeaving removes what is leaving from the device, unless that has been done.
func (w *WireGuard) removeLeaving(l *leaving) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leaving.Load() != l {
		return
	}
	var change strings.Builder
	for key, rest := range l.remaining {
		if rest == nil {
			fmt.Fprintf(&change, "public_key=%s\nremove=true\n", key.Hex())
		} else {
			writePeer(&change, *rest)
		}
	}
	if err := w.device.IpcSet(change.String()); err != nil {
		w.log.Error("tunnel: peers that have been removed are still let in", "err", err)
		return
	}
	w.leaving.Store(nil)
}

// mayEnter implements peerGate. Peers that are leaving may answer resets.
func (w *WireGuard) mayEnter(p []byte) bool {
	l := w.leaving.Load()
	if l == nil {
		return true
	}
	from, _, ok := endsOf(p)
	return !ok || w.Peer(from) != "" || l.addresses.Peer(from) == "" || isTCP(p) && !isSYN(p)
}

// writePeer adds the peer in WireGuard's configuration protocol (UAPI).
func writePeer(b *strings.Builder, p access.Peer) {
	fmt.Fprintf(b, "public_key=%s\nreplace_allowed_ips=true\n", p.PublicKey.Hex())
	fmt.Fprintf(b, "preshared_key=%s\npersistent_keepalive_interval=%d\n", p.Preshared.Hex(),
		int(p.Keepalive.Seconds()))
	for _, a := range p.AllowedIPs {
		fmt.Fprintf(b, "allowed_ip=%v\n", a)
	}
}
