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

func (l *ledger) chunkAt(i int) *chunk { return &l.ring[(l.head+i)%len(l.ring)] }

// endOffset is the stream offset of everything taken so far.
func (l *ledger) endOffset() cc.Bytes {
	if l.n == 0 {
		return l.start
	}
	return l.chunkAt(l.n - 1).end
}

// chunkStart is the stream offset at which chunk i begins.
func (l *ledger) chunkStart(i int) cc.Bytes {
	if i == 0 {
		return l.start
	}
	return l.chunkAt(i - 1).end
}

// addChunk records n bytes in chunks of about granule. Bytes that come little by
// little join the last chunk while chunks as small could not hold all that is in
// flight. To merge only once the ledger is full would not do for them: the oldest
// chunk would grow faster than its bytes arrive.
func (l *ledger) addChunk(n, granule cc.Bytes, c chunk) {
	if l.ring == nil {
		l.ring = make([]chunk, 32)
	}
	if least := (l.endOffset() + n - l.start) / ledgerChunks; l.n > 0 {
		if size := l.endOffset() - l.chunkStart(l.n-1); size < least && size+n <= 2*least {
			c.end, c.resent = l.endOffset()+n, c.resent || l.chunkAt(l.n-1).resent
			*l.chunkAt(l.n - 1) = c
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
		c.end = l.endOffset() + size
		l.n++
		*l.chunkAt(l.n - 1) = c
		n -= size
	}
}

// releaseRing gives back the ring of a ledger with nothing in it.
func (l *ledger) releaseRing() {
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
			ring[i] = *l.chunkAt(i)
		}
		l.ring, l.head = ring, 0
		return
	}
	for i := range l.n / 2 {
		first, second := l.chunkAt(2*i), *l.chunkAt(2*i + 1)
		second.resent = second.resent || first.resent
		*l.chunkAt(i) = second
	}
	l.n /= 2
}

// noteUnsent notes that the bytes from stream offset sent on had still not left
// at now, however long ago the transport took them.
func (l *ledger) noteUnsent(sent cc.Bytes, now cc.Time) {
	for i := l.n - 1; i >= 0; i-- {
		if l.chunkAt(i).end <= sent {
			return
		}
		l.chunkAt(i).sent.At = now
	}
}

// markResent notes that anything in flight may have been sent twice. After a timeout
// nothing is known of when it left: the transport sends all of it again.
func (l *ledger) markResent(timeout bool) {
	for i := range l.n {
		c := l.chunkAt(i)
		c.resent = true
		if timeout {
			c.sent.At = 0
		}
	}
}

// rebaseRates has what is in flight be as though it had left a group that had
// delivered so much by now: rates are measured from here, round trips as before.
func (l *ledger) rebaseRates(now cc.Time, delivered cc.Bytes) {
	for i := range l.n {
		c := l.chunkAt(i)
		c.sent.Delivered, c.sent.DeliveredAt, c.first = delivered, now, c.sent.At
	}
}

// dropArrived forgets the chunks that have arrived up to stream offset newest and
// returns the last of them. It counts as resent when any of them may have been:
// a hole that was filled holds back the news of all that lay behind it.
func (l *ledger) dropArrived(newest cc.Bytes) (c chunk, ok bool) {
	for l.n > 0 && l.chunkAt(0).end <= newest {
		resent := c.resent
		c, ok = *l.chunkAt(0), true
		c.resent = c.resent || resent
		l.start = c.end
		l.head = (l.head + 1) % len(l.ring)
		l.n--
	}
	return c, ok
}
