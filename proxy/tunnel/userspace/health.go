package userspace

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

// flushWithin is for how long what is sent at the very end may take to leave. Neither
// WireGuard nor QUIC tells when it has.
const flushWithin = 100 * time.Millisecond

// health is whether packets get through to the peers, as far as it is ours.
type health struct {
	failure atomic.Pointer[error]
}

// Health implements Outside.
func (h *health) Health() error {
	if err := h.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// reopen tries to open what has failed, until it succeeds or ctx is done.
func (h *health) reopen(ctx context.Context, log *slog.Logger, failure error, open func() error) bool {
	h.failure.Store(&failure)
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
			h.failure.Store(nil)
			log.Info("tunnel: open again")
			return true
		}
		still := fmt.Errorf("%w; open it again: %w", failure, err)
		h.failure.Store(&still)
		wait = min(2*wait, reopenLast)
		timer.Reset(wait)
	}
}

// linger waits for what has just been sent to leave.
func linger() {
	timer := time.NewTimer(flushWithin)
	defer timer.Stop()
	<-timer.C
}
