package page

import (
	"bytes"
	"cmp"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

const (
	defaultRows = 50
	maxRows     = 500
	maxSearch   = 100 // bytes
	maxHost     = 300 // bytes
)

// query is what a request wants to see.
type query struct {
	table      string // a key of columns
	sort       string // a column of it
	descending bool
	search     string // in lower case
	offset     int
	rows       int
	since      float64 // the history begins after it, in Unix seconds
	day        bool    // the history is that of the last day, not of the last hour
	events     uint64  // number of the newest event that the client has
	detail     uint64  // a flow's number; 0: none
	host       string  // rows and history are of this host only; empty: of all
	csv        bool    // the answer is all rows as CSV, and nothing else
}

// readQuery reads the parameters of a request. An error names the parameter and
// what it may be.
func readQuery(v url.Values) (q query, err error) {
	q = query{table: "flows", rows: defaultRows}
	switch text := v.Get("history"); text {
	case "", "hour":
	case "day":
		q.day = true
	default:
		return q, fmt.Errorf("history is %q, but must be hour or day", text)
	}
	switch text := v.Get("format"); text {
	case "", "json":
	case "csv":
		q.csv = true
	default:
		return q, fmt.Errorf("format is %q, but must be json or csv", text)
	}
	if t := v.Get("table"); t != "" {
		q.table = t
	}
	keys, ok := columns[q.table]
	if !ok {
		return q, fmt.Errorf("table is %q, but must be flows, hosts, peers, listeners or events", q.table)
	}
	q.sort = keys[0]
	q.descending = q.table != "peers"
	if s := v.Get("sort"); s != "" {
		q.sort, q.descending = strings.CutPrefix(s, "-")
	}
	if !slices.Contains(keys, q.sort) {
		return q, fmt.Errorf("sort is %q, but must be one of %s, with a - before it for the greatest first",
			v.Get("sort"), strings.Join(keys, ", "))
	}
	if q.search = strings.ToLower(v.Get("q")); len(q.search) > maxSearch {
		return q, fmt.Errorf("q has %d bytes, but may have %d at most", len(q.search), maxSearch)
	}
	if q.host = v.Get("host"); len(q.host) > maxHost {
		return q, fmt.Errorf("host has %d bytes, but may have %d at most", len(q.host), maxHost)
	}
	number := func(name string, most int, to *int) {
		if text := v.Get(name); text != "" && err == nil {
			n, e := strconv.Atoi(text)
			if e != nil || n < 0 || n > most {
				err = fmt.Errorf("%s is %q, but must be a number from 0 to %d", name, text, most)
			}
			*to = n
		}
	}
	number("offset", 1<<30, &q.offset)
	number("rows", maxRows, &q.rows)
	natural := func(name string) (n uint64) {
		if text := v.Get(name); text != "" && err == nil {
			if n, err = strconv.ParseUint(text, 10, 64); err != nil {
				err = fmt.Errorf("%s is %q, but must be a number", name, text)
			}
		}
		return n
	}
	q.events, q.detail = natural("events"), natural("detail")
	if text := v.Get("since"); text != "" && err == nil {
		if q.since, err = strconv.ParseFloat(text, 64); err != nil {
			err = fmt.Errorf("since is %q, but must be a time in Unix seconds", text)
		}
	}
	return q, err
}

// columns has the columns that each table can be sorted by. The first is the default.
var columns = map[string][]string{
	"flows": {
		"rate", "down", "up", "bytes", "queue", "window", "age", "idle", "client", "server", "listener",
		"algorithm", "limited",
	},
	"hosts": {
		"trouble", "rate", "queue", "window", "members", "delivered", "name", "algorithm", "limited", "udp",
	},
	"peers":     {"name", "listener", "handshake", "down", "up", "received", "sent", "endpoint"},
	"listeners": {"name"},
	"events":    {"when"},
}

// The orders by each column. The names are those in columns.
var (
	flowOrder = map[string]func(a, b *row) int{
		"rate":      func(a, b *row) int { return cmp.Compare(a.down.rate+a.up.rate, b.down.rate+b.up.rate) },
		"down":      func(a, b *row) int { return cmp.Compare(a.down.rate, b.down.rate) },
		"up":        func(a, b *row) int { return cmp.Compare(a.up.rate, b.up.rate) },
		"bytes":     func(a, b *row) int { return cmp.Compare(a.down.bytes+a.up.bytes, b.down.bytes+b.up.bytes) },
		"queue":     bySide(func(s *side) time.Duration { return s.queue }),
		"window":    bySide(func(s *side) cc.Bytes { return s.window }),
		"age":       func(a, b *row) int { return cmp.Compare(a.age, b.age) },
		"idle":      func(a, b *row) int { return cmp.Compare(a.idle, b.idle) },
		"client":    func(a, b *row) int { return a.client.Compare(b.client) },
		"server":    func(a, b *row) int { return cmp.Or(cmp.Compare(a.host, b.host), a.target.Compare(b.target)) },
		"listener":  func(a, b *row) int { return cmp.Compare(a.listener, b.listener) },
		"algorithm": bySide(func(s *side) string { return s.algorithm }),
		"limited": bySide(func(s *side) string {
			if !s.managed {
				return ""
			}
			return s.limitedBy.String()
		}),
	}
	hostOrder = map[string]func(a, b *Host) int{
		"trouble": func(a, b *Host) int {
			return cmp.Or(cmp.Compare(a.Severity.rank(), b.Severity.rank()), compareKnown(a.Queue, b.Queue),
				compareKnown(a.Rate, b.Rate))
		},
		"rate":      func(a, b *Host) int { return compareKnown(a.Rate, b.Rate) },
		"queue":     func(a, b *Host) int { return compareKnown(a.Queue, b.Queue) },
		"window":    func(a, b *Host) int { return cmp.Compare(a.Window, b.Window) },
		"members":   func(a, b *Host) int { return cmp.Compare(a.Members, b.Members) },
		"delivered": func(a, b *Host) int { return cmp.Compare(a.Delivered, b.Delivered) },
		"name":      func(a, b *Host) int { return cmp.Or(compareLabels(a, b), cmp.Compare(a.Name, b.Name)) },
		"algorithm": func(a, b *Host) int { return cmp.Compare(a.Algorithm, b.Algorithm) },
		"limited":   func(a, b *Host) int { return cmp.Compare(a.LimitedBy, b.LimitedBy) },
		"udp":       func(a, b *Host) int { return compareKnown(a.udpRate(), b.udpRate()) },
	}
	peerOrder = map[string]func(a, b *Peer) int{
		"name":      func(a, b *Peer) int { return cmp.Compare(a.Name, b.Name) },
		"listener":  func(a, b *Peer) int { return cmp.Compare(a.Listener, b.Listener) },
		"handshake": func(a, b *Peer) int { return compareKnown(a.Handshake, b.Handshake) },
		"down":      func(a, b *Peer) int { return compareKnown(a.Down, b.Down) },
		"up":        func(a, b *Peer) int { return compareKnown(a.Up, b.Up) },
		"received":  func(a, b *Peer) int { return cmp.Compare(a.Received, b.Received) },
		"sent":      func(a, b *Peer) int { return cmp.Compare(a.Sent, b.Sent) },
		"endpoint":  func(a, b *Peer) int { return cmp.Compare(a.Endpoint, b.Endpoint) },
	}
)

// bySide compares two flows by a value of their busier directions.
func bySide[T cmp.Ordered](of func(*side) T) func(a, b *row) int {
	return func(a, b *row) int {
		_, x := a.busierSide()
		_, y := b.busierSide()
		return cmp.Compare(of(x), of(y))
	}
}

// compareLabels orders groups by their labels, and addresses before all other labels.
func compareLabels(a, b *Host) int {
	x, xErr := netip.ParseAddr(a.Label)
	y, yErr := netip.ParseAddr(b.Label)
	switch {
	case xErr == nil && yErr == nil:
		return x.Compare(y)
	case xErr == nil:
		return -1
	case yErr == nil:
		return 1
	}
	return cmp.Compare(a.Label, b.Label)
}

// compareKnown orders values. One that is not known (nil) comes first.
func compareKnown[T cmp.Ordered](a, b *T) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	}
	return cmp.Compare(*a, *b)
}

// selectRows returns the rows that q asks for, and how many its search finds. words appends the text of a row that is
// searched. Rows that compare equal stay in the order of all.
func selectRows[T any](
	all []T, q query, order func(a, b *T) int, words func(*T, []byte) []byte,
) (rows []*T, matches int) {
	found := make([]*T, 0, len(all))
	var text []byte
	for i := range all {
		if q.search != "" {
			if text = words(&all[i], text[:0]); !bytes.Contains(bytes.ToLower(text), []byte(q.search)) {
				continue
			}
		}
		found = append(found, &all[i])
	}
	slices.SortStableFunc(found, func(a, b *T) int {
		if q.descending {
			return order(b, a)
		}
		return order(a, b)
	})
	matches = len(found)
	found = found[min(q.offset, matches):]
	return found[:min(q.rows, len(found))], matches
}

// appendWords appends words with spaces between them.
func appendWords(to []byte, words ...string) []byte {
	for _, w := range words {
		to = append(append(to, ' '), w...)
	}
	return to
}

// valuesOf copies what the pointers lead to.
func valuesOf[T any](rows []*T) []T {
	out := make([]T, len(rows))
	for i, r := range rows {
		out[i] = *r
	}
	return out
}

// findFlow searches rows, which are in the order of flow numbers.
func findFlow(rows []row, id uint64) (int, bool) {
	return slices.BinarySearchFunc(rows, id, func(r row, id uint64) int { return cmp.Compare(r.id, id) })
}
