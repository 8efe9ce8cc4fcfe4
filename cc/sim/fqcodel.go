package sim

import "github.com/penstock-net/penstock/cc"

// fqQuantum is how many bytes a flow sends before it is another's turn (RFC 8290 §5.2.3).
const fqQuantum cc.Bytes = 1514

// fqCoDel is FQ-CoDel (RFC 8290): each flow has a lane under CoDel, lanes take turns by
// deficit, and a flow that was silent goes first.
type fqCoDel struct {
	passive
	flows      []fqFlow
	fresh, old Ring[int] // lanes in turn: of flows that were silent, and of all others
}

type fqFlow struct {
	codel   codel
	deficit cc.Bytes
	listed  bool
}

func newFQCoDel() *fqCoDel {
	f := &fqCoDel{flows: make([]fqFlow, MaxLanes)}
	for i := range f.flows {
		f.flows[i].codel = *newCoDel()
	}
	return f
}

// lane spreads neighbouring numbers of flows (Knuth's multiplicative hash).
func (f *fqCoDel) lane(flow uint32, _ Codepoint) int {
	return int(flow*2654435761>>16) % MaxLanes
}

func (f *fqCoDel) admit(_ cc.Time, lane int, _ waitingPacket, _ *lanes) judgement {
	if q := &f.flows[lane]; !q.listed {
		q.listed, q.deficit = true, fqQuantum
		f.fresh.Push(lane)
	}
	return passes
}

// pick is RFC 8290 §4.2.
func (f *fqCoDel) pick(_ cc.Time, lanes *lanes) int {
	for {
		list, isFresh := &f.fresh, true
		if list.Len() == 0 {
			list, isFresh = &f.old, false
		}
		lane := *list.At(0)
		q := &f.flows[lane]
		switch {
		case q.deficit <= 0:
			q.deficit += fqQuantum
			f.old.Push(list.Pop())
		case lanes.each[lane].Len() > 0:
			return lane
		case isFresh: // once round the others, so that no flow is always new
			f.old.Push(list.Pop())
		default:
			q.listed = false
			list.Pop()
		}
	}
}

func (f *fqCoDel) judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement {
	q := &f.flows[lane]
	judged := q.codel.judge(now, lane, p, lanes)
	if judged == passes || p.ecn != NotECT { // it is sent
		q.deficit -= p.size
	}
	return judged
}
