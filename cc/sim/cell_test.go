package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// cellBytes is what a subframe of a cell's default carries.
const cellBytes = defaultBlocks * defaultBits / 8

func TestACellCarriesWhatItsBlocksCan(t *testing.T) {
	c := NewCell(CellConfig{Delay: 10 * ms}, start)
	for range 5 {
		require.Equal(t, DropNone, dropOf(c, start, 0, 2500, NotECT))
	}
	assert.Equal(t, start.Add(ms), c.Next(), "the subframe that has begun is divided")
	assert.Empty(t, c.Advance(start.Add(ms-1)))
	first := Departure{Size: 2500, Verdict: Verdict{Departs: start.Add(2 * ms), Arrives: start.Add(12 * ms)}}
	assert.Equal(t, []Departure{first, first},
		c.Advance(start.Add(ms)), "6250 bytes in a subframe, and half of the third packet")
	left, packets := c.Backlog(start.Add(ms), 0)
	assert.EqualValues(t, 7500, left)
	assert.Equal(t, 3, packets)
	assert.Len(t, c.Advance(start.Add(2*ms)), 3)
	assert.Equal(t, cc.Never, c.Next())
	assert.EqualValues(t, 1000*cellBytes, c.Offered(0, start, start.Add(time.Second+1)))
}

func TestACellsHostsHaveTheirOwnModulationAndDelay(t *testing.T) {
	c := NewCell(CellConfig{Blocks: 10, Delay: ms, Hosts: []CellHost{
		{BitsPerBlock: 800}, {BitsPerBlock: 400, Delay: 5 * ms},
	}}, start)
	for _, host := range []int{0, 1, 2} {
		require.Equal(t, DropNone, dropOf(c, start, host, 1000, NotECT))
	}
	var left []Departure
	for d := ms; len(left) < 3; d += ms {
		require.Less(t, d, time.Second)
		left = append(left, c.Advance(start.Add(d))...)
	}
	// 30, 60 and 60 half-filled blocks are wanted of 10 a subframe.
	assert.Equal(t, 0, left[0].Lane)
	assert.Equal(t, left[0].Departs.Add(ms), left[0].Arrives)
	for _, d := range left[1:] {
		assert.Greater(t, d.Departs, left[0].Departs, "half as many bits in as many blocks")
		assert.Equal(t, d.Departs.Add(6*ms), d.Arrives, "a host beyond the last is as the last")
	}
}

func TestACellDropsByHost(t *testing.T) {
	c := NewCell(CellConfig{Hosts: []CellHost{{QueuePackets: 2}, {QueueBytes: 1500}, {Loss: 0.999}, {}}}, start)
	var drops [4][]Drop
	for host := range drops {
		for range 3 {
			drops[host] = append(drops[host], dropOf(c, start, host, 1000, NotECT))
		}
	}
	assert.Equal(t, []Drop{DropNone, DropNone, DropQueue}, drops[0])
	assert.Equal(t, []Drop{DropNone, DropQueue, DropQueue}, drops[1])
	assert.Equal(t, []Drop{DropLoss, DropLoss, DropLoss}, drops[2])
	assert.Equal(t, []Drop{DropNone, DropNone, DropNone}, drops[3])
	assert.EqualValues(t, 3*(1000-HeaderBytes), c.Hint(start, 2).RadioLost)
	assert.EqualValues(t, 500, c.Hint(start, 1).QueueRoom)
}

// A cell against what its words promise, subframe by subframe: nothing is lost or
// made up, blocks are equal parts, none too many, and none is idle for whom it
// could serve. Asking it late, or seldom, changes nothing.
func TestACellKeepsItsPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := CellConfig{
			Blocks: rapid.IntRange(1, 120).Draw(t, "blocks"),
			Delay:  time.Duration(rapid.IntRange(0, 3).Draw(t, "delay")) * ms,
			Seed:   rapid.Uint64().Draw(t, "seed"),
		}
		hosts := rapid.IntRange(1, 4).Draw(t, "hosts")
		for range hosts {
			cfg.Hosts = append(cfg.Hosts, CellHost{
				BitsPerBlock: rapid.IntRange(8, 900).Draw(t, "bits"),
				QueuePackets: rapid.IntRange(0, 30).Draw(t, "queue"),
				Loss:         rapid.SampledFrom([]float64{0, 0.2}).Draw(t, "loss"),
			})
		}
		prompt, lazy := NewCell(cfg, start), NewCell(cfg, start)
		var accepted, gone [4][]cc.Bytes
		var lastGone cc.Time
		leave := func(all []Departure) {
			for _, d := range all {
				if d.Departs < lastGone || d.Arrives != d.Departs.Add(cfg.Delay) {
					t.Fatalf("%+v after one at %d", d, lastGone)
				}
				lastGone = d.Departs
				gone[d.Lane] = append(gone[d.Lane], d.Size)
			}
		}
		now := start
		var late []Departure
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 2500).Draw(t, "wait")) * time.Microsecond)
			host := rapid.IntRange(0, hosts-1).Draw(t, "host")
			size := cc.Bytes(rapid.IntRange(40, 1500).Draw(t, "size"))
			for prompt.Next() <= now {
				at := prompt.Next()
				waiting := make([]int, hosts)
				for i := range waiting {
					waiting[i] = prompt.host(i).wants()
				}
				leave(prompt.Advance(at))
				checkDivision(t, prompt, waiting)
			}
			drop := dropOf(prompt, now, host, size, NotECT)
			if lazily := dropOf(lazy, now, host, size, NotECT); lazily != drop {
				t.Fatalf("late, a packet's fate is %d and not %d", lazily, drop)
			}
			if drop == DropNone {
				accepted[host] = append(accepted[host], size)
			}
			if rapid.Bool().Draw(t, "ask") {
				late = append(late, lazy.Advance(now)...)
			}
		}
		end := now.Add(time.Minute)
		for prompt.Next() < end {
			leave(prompt.Advance(prompt.Next()))
		}
		late = append(late, lazy.Advance(end)...)
		if !assert.ObjectsAreEqual(accepted, gone) {
			t.Fatalf("%v came and %v left", accepted, gone)
		}
		var lateGone [4][]cc.Bytes
		for _, d := range late {
			lateGone[d.Lane] = append(lateGone[d.Lane], d.Size)
		}
		if !assert.ObjectsAreEqual(gone, lateGone) || len(late) > 0 && late[len(late)-1].Departs != lastGone {
			t.Fatalf("asked late, it served otherwise")
		}
	})
}

// checkDivision looks at the division just made, by what each host could have used.
func checkDivision(t *rapid.T, c *Cell, wanted []int) {
	sum, most, short := 0, 0, false
	for i, h := range c.hosts {
		if h.given > wanted[i] {
			t.Fatalf("host %d was given %d blocks for %d", i, h.given, wanted[i])
		}
		sum += h.given
		most = max(most, h.given)
		short = short || h.given < wanted[i]
	}
	if sum > c.cfg.Blocks || short && sum < c.cfg.Blocks {
		t.Fatalf("%d of %d blocks were given", sum, c.cfg.Blocks)
	}
	for i, h := range c.hosts {
		if h.given < wanted[i] && h.given < most-1 {
			t.Fatalf("host %d has %d blocks of %d, another %d", i, h.given, wanted[i], most)
		}
	}
}

func TestWhatDoesNotDivideGoesRound(t *testing.T) {
	c := NewCell(CellConfig{Blocks: 10}, start)
	for range 100 {
		for host := range 4 {
			dropOf(c, start, host, 1500, NotECT)
		}
	}
	var given [4]int
	for k := range 20 {
		c.Advance(start.Add(time.Duration(k+1) * ms))
		for i, h := range c.hosts {
			given[i] += h.given
		}
	}
	assert.Equal(t, [4]int{50, 50, 50, 50}, given)
}

// The spec of PBE-CC has a user count who was served in more than one subframe,
// with more than four blocks each.
func TestACellsReport(t *testing.T) {
	c := NewCell(CellConfig{Hosts: []CellHost{{BitsPerBlock: 400}, {}}}, start)
	report := func(now cc.Time, host int) cc.RadioCell {
		r := c.Report(now, host)
		require.Len(t, r.Cells, 1)
		assert.Equal(t, now, r.At)
		return r.Cells[0]
	}
	assert.Equal(t, cc.RadioCell{Blocks: 100, Idle: 100, Users: 1, BitsPerBlock: 400}, report(start, 0))
	now := start
	for range 80 {
		dropOf(c, now, 0, 1000, NotECT) // 20 blocks
		dropOf(c, now, 1, 2500, NotECT) // 40
		dropOf(c, now, 2, 100, NotECT)  // 2: signalling
		now = now.Add(ms)
		c.Advance(now)
	}
	assert.Equal(t, cc.RadioCell{Blocks: 100, Mine: 20, Idle: 38, Users: 2, BitsPerBlock: 400}, report(now, 0))
	assert.Equal(t, cc.RadioCell{Blocks: 100, Mine: 2, Idle: 38, Users: 3, BitsPerBlock: 500}, report(now, 2))
	assert.InEpsilon(t, 8e6, float64(c.Hint(now, 0).ArrivalRate), 0.03)
	now = now.Add(20 * ms)
	half := report(now, 0)
	assert.InDelta(t, 10, half.Mine, 0.51, "half of the window is silence")
	now = now.Add(time.Second)
	assert.Equal(t, cc.RadioCell{Blocks: 100, Idle: 100, Users: 1, BitsPerBlock: 400}, report(now, 0))
}
