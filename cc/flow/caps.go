package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// caps are what keeps a group's limits below what its algorithm asks for: a maximum
// rate that all members have, and their part of the capacity that a fresh hint tells.
type caps struct {
	hint   cc.Hint // the network's newest word about the hosts
	hinted bool    // there has been one
	check  hintCheck
	sound  cc.Hint // hint as far as it is believed
	within bool    // that is what keeps the window below what the algorithm asks for

	hintCaps map[float64]int // how many members have which Terms.HintCap
	hintCap  float64         // the least of them; 0: none has one
	maxRates map[*rateLimit]int

	bind      bool          // the limits are below what the algorithm asks for
	rateBound bool          // the maximum rate is why: parts of the window are parts of that rate
	burst     time.Duration // sending time that pacers may accumulate; 0: the usual
}

// addMember counts m's caps.
func (c *caps) addMember(m *member) {
	if m.terms.HintCap > 0 {
		if c.hintCaps == nil {
			c.hintCaps = map[float64]int{}
		}
		c.hintCaps[m.terms.HintCap]++
	}
	if m.maxRate != nil {
		if c.maxRates == nil {
			c.maxRates = map[*rateLimit]int{}
		}
		c.maxRates[m.maxRate]++
	}
	c.updateLeastHintCap()
}

// removeMember undoes add. Call it before the terms of m change.
func (c *caps) removeMember(m *member) {
	decrementCount(c.hintCaps, m.terms.HintCap)
	decrementCount(c.maxRates, m.maxRate)
	c.updateLeastHintCap()
}

// decrementCount takes one off the count of key, if there is one.
func decrementCount[K comparable](counts map[K]int, key K) {
	if n := counts[key]; n > 1 {
		counts[key] = n - 1
	} else if n == 1 {
		delete(counts, key)
	}
}

// updateLeastHintCap finds the least HintCap.
func (c *caps) updateLeastHintCap() {
	c.hintCap = 0
	for each := range c.hintCaps {
		if c.hintCap == 0 || each < c.hintCap {
			c.hintCap = each
		}
	}
}
