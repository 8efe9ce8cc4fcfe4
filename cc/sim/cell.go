package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// CellConfig describes one direction of a radio cell: a queue for each host, and
// a scheduler that divides the resource blocks of each subframe of a millisecond
// among those for which something waits, in turn (round robin).
type CellConfig struct {
	Blocks int           // resource blocks in a subframe; 0: 100, a carrier of 20 MHz
	Hosts  []CellHost    // in the order of their numbers; a host beyond them is as the last
	Delay  time.Duration // propagation, after the queue
	Seed   uint64
}

// CellHost is a host as its cell serves it.
type CellHost struct {
	BitsPerBlock int           // what a resource block carries, by its modulation and coding; 0: 500
	Delay        time.Duration // propagation added to the cell's
	QueueBytes   cc.Bytes      // drop-tail limit; 0: none
	QueuePackets int           // likewise, in packets; 0: none
	Loss         float64       // probability that a packet is lost by the radio, before the queue
}
