//go:build linux

package kernel

import (
	"io"
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/internal/logqueue"
)

func TestATickDoesNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nobody, end := io.Pipe()
		queue := &logqueue.Writer{To: end}
		queue.Detach(func(int) {})
		s := &shard{dp: &Datapath{log: slog.New(slog.NewTextHandler(queue, nil))}}
		s.logOverload()
		assert.True(t, s.warned)
		assert.NoError(t, nobody.Close())
	})
}
