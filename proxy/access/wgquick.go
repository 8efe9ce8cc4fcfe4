package access

import (
	"cmp"
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
	Addresses  []netip.Prefix // our own inside the tunnel, with the tunnel's prefix length
	Peers      []Peer

	spans   []span // of each peer's section
	allowed []int  // line of each peer's AllowedIPs, or of its head without one, from 0
}

// span is a range of lines, from 0; to is not in it.
type span struct{ from, to int }

// maxPeerName bounds names, in bytes, which become those of groups.
const maxPeerName = 64

// ParseQuick reads a QuickFile. It skips keys for wg-quick alone (DNS, PostUp and the like); an unknown key is an
// error.
//
// The format has no names for peers, so comments give them: "# Name = phone" anywhere in the section or right above
// it, or else "# phone" right above or right below its head. Without a comment the name is the beginning of the key.
// The comment "# Exit = true" makes the peer an exit.
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

// quickParser is the state of ParseQuick.
type quickParser struct {
	file    QuickFile
	section string // in lower case; empty: none yet
	peer    *quickPeer

	comments []string // read, and not yet assigned to a section
	above    int      // line of the first of comments
}

// quickPeer is the [Peer] section that is being read.
type quickPeer struct {
	Peer
	line    int  // of its head
	allowed int  // line of AllowedIPs
	from    int  // first line of the section, with the comments right above the head
	keyed   bool // there was a PublicKey
	fresh   bool // no key was read yet
}

// parseLine reads line n. It collects comments until a later line shows to which section they belong.
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
			// The error does not quote the line, which may hold a secret.
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

// beginSection begins a section with its head in line n. Comments right above the head belong to the section.
func (p *quickParser) beginSection(n int, name string) error {
	var next *quickPeer
	first := n
	switch name {
	case "[interface]":
	case "[peer]":
		if len(p.comments) > 0 {
			first = p.above
		}
		next = &quickPeer{line: n, allowed: n, from: first, fresh: true}
		p.placeComments(next)
	default:
		return fmt.Errorf("%s is no section of WireGuard's; there are [Interface] and [Peer]", wordOr(name, "this"))
	}
	p.comments = nil
	if err := p.endSection(first); err != nil {
		return err
	}
	p.section, p.peer = name, next
	return nil
}

// placeComments reads the collected comments as those of next, the section below them; nil: of the section that they
// stand in.
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
			about.Name = cmp.Or(peerName(value), about.Name)
		case given && strings.EqualFold(strings.TrimSpace(key), "exit"):
			about.Exit = strings.EqualFold(strings.TrimSpace(value), "true")
		case given || about.Name != "":
		case next != nil && i == len(p.comments)-1, next == nil && about.fresh:
			about.Name = peerName(c)
		}
	}
	p.comments = nil
}

// peerName returns a comment as a peer's name; empty: it is too long, or not printable.
func peerName(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxPeerName || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return ""
	}
	return s
}

// endSection adds the peer that is being read, if any, to the file. line is the first line of the next section.
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

// setKey sets the value of a key in the current section.
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

// wordOr returns s if it may be shown as a word of the format, else otherwise: s might be a WireGuard key, a secret.
func wordOr(s, otherwise string) string {
	odd := func(r rune) bool { return (r < 'a' || r > 'z') && r != '[' && r != ']' }
	if len(s) > 24 || strings.ContainsFunc(s, odd) {
		return otherwise
	}
	return s
}

// setInterface sets the value of a key of [Interface]. It skips keys for wg-quick alone.
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

// setPeer sets the value of a key of [Peer].
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

// eachPrefix calls add for each item of a list of addresses with or without a prefix length.
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
		if after == "" { // the empty line above the section goes as well
			before = strings.TrimRight(before, "\n")
			if before != "" {
				before += "\n"
			}
		}
		return before + after, true, nil
	}
	return text, false, nil
}

// JoinPrefixes writes prefixes in the form of AllowedIPs.
func JoinPrefixes(list []netip.Prefix) string {
	words := make([]string, len(list))
	for i, p := range list {
		words[i] = p.String()
	}
	return strings.Join(words, ", ")
}
