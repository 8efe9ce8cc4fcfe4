package flow

import "github.com/penstock-net/penstock/cc"

// ledgerChunks bounds the memory of one flow's send ledger.
const ledgerChunks = 512

// ledger remembers when which bytes of the stream left. A transport that
// acknowledges a byte stream shows no packets, so chunks of at least a segment
// stand in for them, larger ones where more is in flight than there are chunks
// for: it forgets detail, never bytes.
type ledger struct {
	ring  []chunk
	head  int // index of the oldest
	n     int
	start cc.Bytes // stream offset at which the oldest chunk begins
}

type chunk struct {
	end    cc.Bytes // stream offset just past the chunk
	sent   cc.Sent
	first  cc.Time // when the newest byte delivered at sent.At had itself left
	resent bool    // maybe retransmitted: no round-trip sample (Karn)
}

func (l *ledger) at(i int) *chunk { return &l.ring[(l.head+i)%len(l.ring)] }

// end is the stream offset of everything taken so far.
func (l *ledger) end() cc.Bytes {
	if l.n == 0 {
		return l.start
	}
	return l.at(l.n - 1).end
}

// begin is the stream offset at which chunk i begins.
func (l *ledger) begin(i int) cc.Bytes {
	if i == 0 {
		return l.start
	}
	return l.at(i - 1).end
}

// push records n bytes in chunks of about granule. Bytes that come little by
// little join the last chunk while chunks as small could not hold all that is in
// flight. To merge only once the ledger is full would not do for them: the oldest
// chunk would grow faster than its bytes arrive.
func (l *ledger) push(n, granule cc.Bytes, c chunk) {
	if l.ring == nil {
		l.ring = make([]chunk, 32)
	}
	if least := (l.end() + n - l.start) / ledgerChunks; l.n > 0 {
		if size := l.end() - l.begin(l.n-1); size < least && size+n <= 2*least {
			c.end, c.resent = l.end()+n, c.resent || l.at(l.n-1).resent
			*l.at(l.n - 1) = c
			return
		}
	}
	for n > 0 {
		size := n
		if n >= 2*granule {
			size = granule
		}
		if l.n == len(l.ring) {
			l.makeRoom()
		}
		c.end = l.end() + size
		l.n++
		*l.at(l.n - 1) = c
		n -= size
	}
}

// release gives back the ring of a ledger with nothing in it.
func (l *ledger) release() {
	if l.n == 0 {
		l.ring, l.head = nil, 0
	}
}

// makeRoom grows the ring up to its bound, then halves its resolution. A merged
// pair keeps the later chunk's record, which is exact for its newest byte.
func (l *ledger) makeRoom() {
	if len(l.ring) < ledgerChunks {
		ring := make([]chunk, 2*len(l.ring))
		for i := range l.n {
			ring[i] = *l.at(i)
		}
		l.ring, l.head = ring, 0
		return
	}
	for i := range l.n / 2 {
		first, second := l.at(2*i), *l.at(2*i + 1)
		second.resent = second.resent || first.resent
		*l.at(i) = second
	}
	l.n /= 2
}

// waiting notes that the bytes from stream offset sent on had still not left
// at now, however long ago the transport took them.
func (l *ledger) waiting(sent cc.Bytes, now cc.Time) {
	for i := l.n - 1; i >= 0; i-- {
		if l.at(i).end <= sent {
			return
		}
		l.at(i).sent.At = now
	}
}

// taint notes that anything in flight may have been sent twice. After a timeout
// nothing is known of when it left: the transport sends all of it again.
func (l *ledger) taint(timeout bool) {
	for i := range l.n {
		c := l.at(i)
		c.resent = true
		if timeout {
			c.sent.At = 0
		}
	}
}

// rebase has what is in flight be as though it had left a group that had
// delivered so much by now: rates are measured from here, round trips as before.
func (l *ledger) rebase(now cc.Time, delivered cc.Bytes) {
	for i := range l.n {
		c := l.at(i)
		c.sent.Delivered, c.sent.DeliveredAt, c.first = delivered, now, c.sent.At
	}
}

// advance forgets the chunks that have arrived up to stream offset newest and
// returns the last of them. It counts as resent when any of them may have been:
// a hole that was filled holds back the news of all that lay behind it.
func (l *ledger) advance(newest cc.Bytes) (c chunk, ok bool) {
	for l.n > 0 && l.at(0).end <= newest {
		resent := c.resent
		c, ok = *l.at(0), true
		c.resent = c.resent || resent
		l.start = c.end
		l.head = (l.head + 1) % len(l.ring)
		l.n--
	}
	return c, ok
}
