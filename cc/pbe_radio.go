package cc

import "math"

// What a monitor of the radio decodes of a cellular link's control channel, and
// the hint that follows from it (PBE-CC, SIGCOMM 2020 §4).

// RadioCell is one carrier of the link as one host sees it, in resource blocks
// per subframe of 1 ms: averages over the newest subframes, about as many as the
// path's round trip has milliseconds. Users who had a few blocks in one subframe
// only, for signalling, do not count as active.
type RadioCell struct {
	Blocks       float64 // that the carrier has
	Mine         float64 // given to this host
	Idle         float64 // given to no host
	Users        int     // active, this host among them; 0 counts as 1
	BitsPerBlock float64 // that this host's modulation carries
	BitErrors    float64 // probability that a bit arrives wrong
}

// RadioReport is all carriers that serve a host.
type RadioReport struct {
	At    Time // of the newest subframe, by the sender's clock
	Cells []RadioCell
}

const (
	radioOverhead = 0.068 // of what the radio carries is its protocols' own; SIGCOMM 2020 §4.2.2
	radioPasses   = 5     // of the fixed point below, which then moves by less than a bit
	subframeRate  = 1000  // a bit per subframe, in bits per second
)

// Hint is what the report means for a sender. A link that has nothing for the
// host offers 1 bit/s, since 0 stands for not knowing.
func (r RadioReport) Hint() Hint {
	h := Hint{At: r.At}
	if len(r.Cells) == 0 {
		return h
	}
	var capacity, fair, link float64
	for _, c := range r.Cells {
		c = c.clampValues()
		users := float64(c.Users)
		capacity += radioGoodput(c.BitsPerBlock*(c.Mine+c.Idle/users), c.BitErrors, radioPasses)
		fair += radioGoodput(c.BitsPerBlock*c.Blocks/users, c.BitErrors, radioPasses)
		link += c.BitsPerBlock * c.Blocks
		h.Flows = max(h.Flows, c.Users)
	}
	h.Capacity, h.FairShare, h.LinkRate = rateOfSubframe(capacity), rateOfSubframe(fair), rateOfSubframe(link)
	return h
}

// clampValues bounds what a monitor may have got wrong.
func (c RadioCell) clampValues() RadioCell {
	c.Blocks = clampFinite(c.Blocks, 1e6)
	c.Mine = clampFinite(c.Mine, c.Blocks)
	c.Idle = clampFinite(c.Idle, c.Blocks-c.Mine)
	c.BitsPerBlock = clampFinite(c.BitsPerBlock, 1e6)
	c.BitErrors = clampFinite(c.BitErrors, 1)
	c.Users = max(c.Users, 1)
	return c
}

// clampFinite is v within 0 and most; 0 for what is no number.
func clampFinite(v, most float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return min(max(v, 0), most)
}

// rateOfSubframe turns bits per subframe into a rate.
func rateOfSubframe(bits float64) Rate { return max(Rate(math.Round(bits*subframeRate)), 1) }

// radioGoodput is what a transport gets, C_t, of what the radio carries, C_p,
// both in bits per subframe: overhead γ is taken off, and a block of L bits is
// sent again when any of them is wrong, which they are with probability p each:
//
//	C_p = C_t + C_t·(1 − (1−p)^L) + γ·C_p,  L ≈ C_t
//
// It is solved by iteration from L = C_p.
func radioGoodput(physical, bitErrors float64, passes int) float64 {
	goodput := physical
	for range passes {
		intact := math.Exp(goodput * math.Log1p(-bitErrors)) // (1−p)^L
		if goodput <= 0 {
			return 0
		}
		goodput = (1 - radioOverhead) * physical / (2 - intact)
	}
	return goodput
}
