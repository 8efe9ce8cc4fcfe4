package bench

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func FuzzParseSender(f *testing.F) {
	for _, s := range []string{
		"cubic", "copa", "copa@bbr", "copa@sim", "none@sim", "copa:delta=0.1,mode=auto@cubic",
		"cubic@", "@", "static:cwnd_packets=22", "copa:alcc", "cubic,bbr", "none@none",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		senders, err := ParseSenders([]string{spec}, []string{"bbr", "reno"})
		if err != nil {
			assert.ErrorContains(t, err, "--sender")
			return
		}
		for _, s := range senders {
			assert.NotEqual(t, s.Kernel == "", s.Algorithm == "", "either the kernel or Penstock")
			again, err := ParseSenders([]string{s.Name}, nil)
			require.NoError(t, err)
			assert.Equal(t, []Sender{s}, again, "a table's name can be typed in again")
		}
	})
}
