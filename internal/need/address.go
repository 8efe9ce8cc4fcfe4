package need

import (
	"fmt"
	"os"
)

// Host is a loopback address of this process's own. A port of it below 32768 stays
// free while nobody listens there: the system gives other programs none of those, and
// tests that run elsewhere at the same time have another host.
func Host() string {
	id := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64|id>>16&63, id>>8&255, id&255)
}
