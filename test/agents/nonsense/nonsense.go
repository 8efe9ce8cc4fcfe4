// Package nonsense is what goes wrong with the messages of an agent: tests play it in
// virtual time and over real sockets.
package nonsense

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"

	"github.com/penstock-net/penstock/cc/ccp"
)

// Kind is one way in which messages are wrong.
type Kind struct {
	Name string
	// Make returns what turns one message into the datagrams that arrive in its place. The
	// message itself, or every second one, is the last of them: an agent that talks like
	// this still decides.
	Make func() func(message []byte) (datagrams [][]byte)
}

// Kinds are all of them.
func Kinds() []Kind {
	draw := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // repeats
	beside := func(wrong func(message []byte) []byte) func() func([]byte) [][]byte {
		return func() func([]byte) [][]byte {
			return func(m []byte) [][]byte { return [][]byte{wrong(slices.Clone(m)), m} }
		}
	}
	return []Kind{
		{"every second one is about a program that there is none of", func() func([]byte) [][]byte {
			odd := false
			return func(m []byte) [][]byte {
				if ccp.Kind(binary.LittleEndian.Uint16(m)) == ccp.KindChange {
					if odd = !odd; odd {
						m = slices.Clone(m)
						m[8] = 99
					}
				}
				return [][]byte{m}
			}
		}},
		{"each comes for a flow that there is none of as well", beside(func(m []byte) []byte {
			binary.LittleEndian.PutUint32(m[4:], 1<<31)
			return m
		})},
		{"each comes cut short as well", beside(func(m []byte) []byte { return m[:draw.IntN(len(m)-1)+1] })},
		{
			"each comes again with bytes behind it that are none of it",
			beside(func(m []byte) []byte { return append(m, 1, 2, 3) }),
		},
		{"each says that it is longer as well", beside(func(m []byte) []byte {
			m[2], m[3] = 0xff, 0xff
			return m
		})},
		{"each comes with more bytes than a message may have as well", beside(func(m []byte) []byte {
			return append(m, make([]byte, 4*ccp.MaxFromAgent)...)
		})},
		{"each comes three times, and again after the next", func() func([]byte) [][]byte {
			var earlier []byte
			return func(m []byte) [][]byte {
				out := [][]byte{m, m, m}
				if earlier != nil {
					out = append(out, earlier, m)
				}
				earlier = slices.Clone(m)
				return out
			}
		}},
		{"bytes at random come between them", func() func([]byte) [][]byte {
			return func(m []byte) [][]byte {
				junk := make([]byte, 1+draw.IntN(64))
				for i := range junk {
					junk[i] = byte(draw.Uint32())
				}
				return [][]byte{junk, m}
			}
		}},
		{"messages of the other direction come between them", func() func([]byte) [][]byte {
			return func(m []byte) [][]byte {
				return [][]byte{ccp.Ready{Datapath: 1}.Append(nil), ccp.Create{Flow: 1}.Append(nil), m}
			}
		}},
	}
}

// Limits are windows, in bytes, and rates, in bytes/s, that no path has.
var Limits = map[string][][2]uint64{
	"beyond every limit":       {{1 << 63, 1 << 63}},
	"all ones":                 {{1<<64 - 1, 1<<64 - 1}},
	"nothing, and all at once": {{0, 0}, {1 << 40, 1 << 40}},
	"one byte, and the most":   {{1, 0}, {1 << 30, 1 << 62}, {1 << 30, 1 << 62}},
}
