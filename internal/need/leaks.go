package need

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// leaveWithin is for how long goroutines that have been told to end may take to, on a
// machine with other work. Only those that stay forever take it.
const leaveWithin = time.Minute

// Leaks names the goroutines that stay when a test is over; nil: none does.
func Leaks() error {
	began := time.Now()
	for {
		err := goleak.Find() // waits for half a second
		if err == nil || time.Since(began) > leaveWithin {
			return err
		}
	}
}

// Run runs the tests of a package, and fails where goroutines stay afterwards. It
// returns the exit code.
func Run(m *testing.M) (code int) {
	if code = m.Run(); code != 0 {
		return code
	}
	if err := Leaks(); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL: the tests have left goroutines behind:", err)
		return 1
	}
	return 0
}
