package need

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// CPU is the processor time that this process has used so far.
func CPU(tb testing.TB) time.Duration {
	tb.Helper()
	var used unix.Rusage
	require.NoError(tb, unix.Getrusage(unix.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
