package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// passingLasts is how old a count of bytes beside the group may be: an older one may be of a flow that has ended.
const passingLasts = time.Second

// passing is the rate of what goes to a group's host beside the group, from counts of its bytes.
type passing struct {
	at    cc.Time // of the newest count; 0: there is none
	total cc.Bytes
	rate  cc.Rate // the mean of the newest two rates
}

// addCount takes in the bytes that have passed by now. A lower count than the last one begins anew.
func (p *passing) addCount(now cc.Time, total cc.Bytes) {
	since, bytes := now.Sub(p.at), total-p.total
	isFresh := p.at != 0 && since <= passingLasts
	if isFresh && since <= 0 {
		return
	}
	p.at, p.total = now, total
	if !isFresh || bytes < 0 {
		p.rate = 0
		return
	}
	p.rate = (p.rate + cc.RateOf(bytes, since)) / 2
}

// rateAt returns the rate at now. 0: nothing passes, or nothing counts.
func (p *passing) rateAt(now cc.Time) cc.Rate {
	if p.at == 0 || now.Sub(p.at) > passingLasts {
		return 0
	}
	return p.rate
}
