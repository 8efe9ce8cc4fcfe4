package need

import (
	"fmt"
	"os"
)

// Host is a loopback address of this process's own. A port of it below 32768 stays
// free while this process does not use it: the system gives other programs ports from 32768 on, and
// tests that run elsewhere at the same time have another host.
func Host() string {
	id := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64|id>>16&63, id>>8&255, id&255)
}
