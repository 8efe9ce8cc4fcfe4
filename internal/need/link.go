package need

import "testing"

// OverLink says that a test runs over an emulated link in real time, so that it may be run again where it fails:
// a machine that stands still changes what the link does. No other test may (test/reruns).
func OverLink(tb testing.TB) {
	tb.Helper()
	tb.Log("runs over an emulated link")
}
