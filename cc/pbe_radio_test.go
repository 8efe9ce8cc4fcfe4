package cc

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

func TestRadioReportsAsHints(t *testing.T) {
	one := RadioCell{Blocks: 100, Mine: 20, Idle: 30, Users: 3, BitsPerBlock: 500}
	two := RadioCell{Blocks: 50, Idle: 50, Users: 1, BitsPerBlock: 400}
	for _, tt := range []struct {
		name                 string
		cells                []RadioCell
		capacity, fair, link float64 // Mbit/s
	}{
		{
			"worked number: 20 blocks and a third of 30, 500 bits each: 15 Mbit/s less overhead",
			[]RadioCell{one},
			13.98, 0.932 * 50. / 3, 50,
		},
		{
			"worked number: a second carrier, idle, adds 20 Mbit/s",
			[]RadioCell{one, two},
			13.98 + 0.932*20,
			0.932 * (50./3 + 20), 70,
		},
		{"all is others'", []RadioCell{{Blocks: 100, Users: 2, BitsPerBlock: 500}}, 1e-6, 0.932 * 25, 50},
		{"no user is counted", []RadioCell{{Blocks: 100, Idle: 100, BitsPerBlock: 500}}, 0.932 * 50, 0.932 * 50, 50},
		{"nothing is known", nil, 0, 0, 0},
		{"what cannot be", []RadioCell{{
			Blocks: 100, Mine: 200, Idle: 300, Users: -1, BitsPerBlock: 500,
			BitErrors: math.NaN(),
		}}, 0.932 * 50, 0.932 * 50, 50},
	} {
		h := RadioReport{At: 7, Cells: tt.cells}.Hint()
		assert.InDelta(t, tt.capacity, h.Capacity.Mbps(), 0.001, tt.name)
		assert.InDelta(t, tt.fair, h.FairShare.Mbps(), 0.001, tt.name)
		assert.InDelta(t, tt.link, h.LinkRate.Mbps(), 0.001, tt.name)
		assert.EqualValues(t, 7, h.At, tt.name)
	}
	assert.Equal(t, 3, RadioReport{Cells: []RadioCell{one, two}}.Hint().Flows)
}

func TestRadioGoodputOfAPhysicalRate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		errors float64
		passes int
		want   float64
	}{
		{"no errors", 0, radioPasses, 13980},
		{"worked number: 1e-6, first pass", 1e-6, 1, 13775},
		{"worked number: second pass", 1e-6, 2, 13791},
		{"and it has settled", 1e-6, radioPasses, 13791},
		{"every block is sent twice", 1, radioPasses, 6990},
	} {
		assert.InDelta(t, tt.want, radioGoodput(15000, tt.errors, tt.passes), 1, tt.name)
	}
}

func TestRadioGoodputSolvesItsEquation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		physical := rapid.Float64Range(0, 1e6).Draw(t, "physical")
		errors := rapid.Float64Range(0, 1e-5).Draw(t, "errors")
		got := radioGoodput(physical, errors, 200)
		again := got * (1 - math.Pow(1-errors, got))
		assert.InDelta(t, physical, got+again+radioOverhead*physical, 1+physical/1e4)
		assert.LessOrEqual(t, got, physical)
	})
}
