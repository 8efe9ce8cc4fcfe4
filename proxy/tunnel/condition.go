package tunnel

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// Waits before what has failed is opened again: doubling from the first to the last.
const (
	reopenFirst = time.Second
	reopenLast  = 30 * time.Second
)

// Condition records whether packets get through to the peers, as far as this machine can know. The
// zero value is healthy. It is safe for concurrent use.
type Condition struct {
	failure atomic.Pointer[error]
}

// Health returns why nothing gets through at present; nil: packets do.
func (c *Condition) Health() error {
	if err := c.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// Reopen calls open until it succeeds or ctx is done, with growing waits. It reports whether it has
// succeeded.
func (c *Condition) Reopen(ctx context.Context, log *slog.Logger, failure error, open func() error) bool {
	c.failure.Store(&failure)
	log.Error("tunnel: nothing gets through; trying to open it again", "err", failure)
	wait := reopenFirst
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
		}
		err := open()
		if err == nil {
			c.failure.Store(nil)
			log.Info("tunnel: open again")
			return true
		}
		still := fmt.Errorf("%w; open it again: %w", failure, err)
		c.failure.Store(&still)
		wait = min(2*wait, reopenLast)
		timer.Reset(wait)
	}
}
