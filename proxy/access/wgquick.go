package access

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// QuickFile is a file in the format of wg-quick and wg: an [Interface] section,
// [Peer] sections, or both.
type QuickFile struct {
	PrivateKey Key // zero: not in the file
	Port       uint16
	MTU        int            // 0: not in the file
	Addresses  []netip.Prefix // of ours inside the tunnel, with the tunnel's length
	Peers      []Peer

	spans   []span // of each peer's section
	allowed []int  // each peer's line with AllowedIPs, or of its head, from 0
}

// span is lines of the file, from 0; the last is not in it.
type span struct{ from, to int }

// maxPeerName bounds names, which become those of groups.
const maxPeerName = 64

// ParseQuick reads such a file. What only wg-quick acts on (DNS, PostUp and the
// like) is passed over; an unknown key is an error.
//
// WireGuard has no names for peers: a comment gives one, "# Name = phone"
// anywhere in the section or right above it, or else "# phone" right above its
// head or right below. A peer without is called by the beginning of its key. Another comment
// that is read says that the peer is an exit: "# Exit = true".
func ParseQuick(text string) (QuickFile, error) {
	p := quickParser{}
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		if err := p.parseLine(i, strings.TrimSpace(line)); err != nil {
			return QuickFile{}, fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	p.placeComments(nil)
	if err := p.endSection(len(lines)); err != nil {
		return QuickFile{}, err
	}
	return p.file, nil
}

// CheckExits calls CheckExit for each peer. The error has the line of its AllowedIPs.
func (f QuickFile) CheckExits(pool []netip.Prefix) error {
	for i, p := range f.Peers {
		if err := p.CheckExit(pool, `"# Exit = true"`); err != nil {
			return fmt.Errorf("line %d: %w", f.allowed[i]+1, err)
		}
	}
	return nil
}

// quickParser is where the reading has come to.
type quickParser struct {
	file    QuickFile
	section string // in lower case; empty: none yet
	peer    *quickPeer

	comments []string // not yet known which section they are of
	above    int      // line of the first of them
}

// quickPeer is the [Peer] section that is being read.
type quickPeer struct {
	Peer
	line         int  // of its head
	allowed      int  // line of AllowedIPs
	from         int  // of the comment above it, if that is its name
	named, keyed bool // a name was given with Name =; a public key was
	fresh        bool // nothing stands below the head yet
}

// parseLine reads line n. Comments wait until it is known which section they belong to.
func (p *quickParser) parseLine(n int, line string) error {
	if i := strings.IndexByte(line, '#'); i >= 0 {
		comment := strings.TrimSpace(strings.TrimLeft(line[i:], "# \t"))
		if line = strings.TrimSpace(line[:i]); line == "" {
			if len(p.comments) == 0 {
				p.above = n
			}
			p.comments = append(p.comments, comment)
			return nil
		}
	}
	switch {
	case line == "":
		p.placeComments(nil)
	case line[0] == '[':
		return p.beginSection(n, strings.ToLower(line))
	default:
		p.placeComments(nil)
		key, value, ok := strings.Cut(line, "=")
		if !ok {
			// and is not shown: it may hold a secret
			return errors.New("it is neither [Interface], [Peer] nor a key with its value")
		}
		if p.peer != nil {
			p.peer.fresh = false
		}
		key = strings.ToLower(strings.TrimSpace(key))
		if p.peer != nil && key == "allowedips" {
			p.peer.allowed = n
		}
		return p.setKey(key, strings.TrimSpace(value))
	}
	return nil
}

// beginSection begins a section; comments right above it are about it.
func (p *quickParser) beginSection(n int, name string) error {
	var next *quickPeer
	switch name {
	case "[interface]":
	case "[peer]":
		next = &quickPeer{line: n, allowed: n, from: n, fresh: true}
	default:
		return fmt.Errorf("%s is no section of WireGuard's; there are [Interface] and [Peer]", wordOr(name, "this"))
	}
	if next != nil && len(p.comments) > 0 {
		next.from = p.above
		p.placeComments(next)
	}
	p.comments = nil
	if err := p.endSection(next.firstLine(n)); err != nil {
		return err
	}
	p.section, p.peer = name, next
	return nil
}

// firstLine is the section's first line.
func (q *quickPeer) firstLine(n int) int {
	if q == nil {
		return n
	}
	return q.from
}

// placeComments gives waiting comments to the section below them, or to the one they
// stand in where next is nil.
func (p *quickParser) placeComments(next *quickPeer) {
	about := next
	if about == nil {
		about = p.peer
	}
	for i, c := range p.comments {
		if about == nil {
			break
		}
		key, value, given := strings.Cut(c, "=")
		switch {
		case given && strings.EqualFold(strings.TrimSpace(key), "name"):
			if name := peerName(value); name != "" {
				about.Name, about.named = name, true
			}
		case given && strings.EqualFold(strings.TrimSpace(key), "exit"):
			about.Exit = strings.EqualFold(strings.TrimSpace(value), "true")
		case given || about.Name != "":
		case next != nil && i == len(p.comments)-1, next == nil && about.fresh:
			about.Name = peerName(c)
		}
	}
	p.comments = nil
}

// peerName is what can be a name of a comment; empty: nothing can.
func peerName(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxPeerName || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return ""
	}
	return s
}

// endSection closes the section that is open; the line is the next one's first.
func (p *quickParser) endSection(line int) error {
	q := p.peer
	if q == nil {
		return nil
	}
	if !q.keyed {
		return fmt.Errorf("line %d: this peer has no PublicKey", q.line+1)
	}
	if q.Name == "" {
		q.Name = q.PublicKey.Short()
	}
	p.file.Peers = append(p.file.Peers, q.Peer)
	p.file.spans = append(p.file.spans, span{q.from, line})
	p.file.allowed = append(p.file.allowed, q.allowed)
	return nil
}

// setKey takes over a key of the present section.
func (p *quickParser) setKey(key, value string) (err error) {
	switch p.section {
	case "[interface]":
		err = p.setInterface(key, value)
	case "[peer]":
		err = p.setPeer(key, value)
	default:
		return fmt.Errorf("%s stands in no section; begin with [Peer]", wordOr(key, "it"))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", wordOr(key, "what stands before ="), err)
	}
	return nil
}

// wordOr is s if it could be a word of the format; a key of WireGuard's could not.
func wordOr(s, otherwise string) string {
	odd := func(r rune) bool { return (r < 'a' || r > 'z') && r != '[' && r != ']' }
	if len(s) > 24 || strings.ContainsFunc(s, odd) {
		return otherwise
	}
	return s
}

// setInterface takes over a key of [Interface], and passes over those that only wg-quick acts on.
func (p *quickParser) setInterface(key, value string) (err error) {
	switch key {
	case "privatekey":
		p.file.PrivateKey, err = ParseKey(value)
	case "listenport":
		var n uint64
		if n, err = strconv.ParseUint(value, 10, 16); err != nil {
			err = fmt.Errorf("%q is no port", value)
		}
		p.file.Port = uint16(n)
	case "mtu":
		if p.file.MTU, err = strconv.Atoi(value); err != nil {
			err = fmt.Errorf("%q is no number of bytes", value)
		}
	case "address":
		return eachPrefix(value, func(a netip.Prefix) { p.file.Addresses = append(p.file.Addresses, a) })
	case "dns", "table", "preup", "postup", "predown", "postdown", "saveconfig", "fwmark":
	default:
		return fmt.Errorf("no such key in [Interface]")
	}
	return err
}

// setPeer takes over a key of [Peer].
func (p *quickParser) setPeer(key, value string) (err error) {
	q := p.peer
	switch key {
	case "publickey":
		q.PublicKey, err = ParseKey(value)
		q.keyed = true
	case "presharedkey":
		q.Preshared, err = ParseKey(value)
	case "allowedips":
		return eachPrefix(value, func(a netip.Prefix) { q.AllowedIPs = append(q.AllowedIPs, a.Masked()) })
	case "persistentkeepalive":
		var seconds uint64
		if !strings.EqualFold(value, "off") {
			if seconds, err = strconv.ParseUint(value, 10, 16); err != nil {
				err = fmt.Errorf("%q is neither off nor a number of seconds up to 65535", value)
			}
		}
		q.Keepalive = time.Duration(seconds) * time.Second
	case "endpoint": // peers come to us
	default:
		return fmt.Errorf("no such key in [Peer]")
	}
	return err
}

// eachPrefix reads a list of addresses, each with or without a length.
func eachPrefix(list string, add func(netip.Prefix)) error {
	if list == "" {
		return nil
	}
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		a, err := netip.ParsePrefix(item)
		if addr, single := netip.ParseAddr(item); single == nil && addr.Zone() == "" {
			a, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if err != nil || a.Addr().Is4In6() {
			return fmt.Errorf("%q is neither an address nor a prefix such as 10.9.0.2/32", item)
		}
		add(a)
	}
	return nil
}

// AddSection returns a file's text with the peer's section at its end.
func AddSection(text string, p Peer) string {
	var b strings.Builder
	b.WriteString(text)
	if text != "" {
		if !strings.HasSuffix(text, "\n") {
			b.WriteByte('\n')
		}
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "[Peer]\n# Name = %s\n", p.Name)
	if p.Exit {
		b.WriteString("# Exit = true\n")
	}
	fmt.Fprintf(&b, "PublicKey = %v\n", p.PublicKey)
	if p.Preshared != (Key{}) {
		fmt.Fprintf(&b, "PresharedKey = %v\n", p.Preshared)
	}
	fmt.Fprintf(&b, "AllowedIPs = %s\n", JoinPrefixes(p.AllowedIPs))
	if s := int(p.Keepalive.Seconds()); s > 0 {
		fmt.Fprintf(&b, "PersistentKeepalive = %d\n", s)
	}
	return b.String()
}

// RemoveSection returns a file's text without the section of the peer of that
// name, everything else as it was; found reports whether there was one.
func RemoveSection(text, name string) (rest string, found bool, err error) {
	f, err := ParseQuick(text)
	if err != nil {
		return "", false, err
	}
	lines := strings.SplitAfter(text, "\n")
	for i, p := range f.Peers {
		if p.Name != name {
			continue
		}
		at := f.spans[i]
		before, after := strings.Join(lines[:at.from], ""), strings.Join(lines[at.to:], "")
		if after == "" { // and so the empty line that set it off
			before = strings.TrimRight(before, "\n")
			if before != "" {
				before += "\n"
			}
		}
		return before + after, true, nil
	}
	return text, false, nil
}

// JoinPrefixes writes prefixes as AllowedIPs has them.
func JoinPrefixes(list []netip.Prefix) string {
	words := make([]string, len(list))
	for i, p := range list {
		words[i] = p.String()
	}
	return strings.Join(words, ", ")
}
