//go:build linux

package kernel

import (
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
)

// stuck is the log of a process whose standard error nobody reads.
type stuck struct{ until chan struct{} }

func (s stuck) Write(b []byte) (int, error) {
	<-s.until
	return len(b), nil
}

func TestATickDoesNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reading := make(chan struct{})
		s := &shard{dp: &Datapath{log: slog.New(slog.NewTextHandler(stuck{reading}, nil))}}
		s.overload()
		assert.True(t, s.warned)
		close(reading)
	})
}
