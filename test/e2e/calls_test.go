//go:build linux

package e2e

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// A connection with one exchange takes a bounded number of system calls on every way in, and asks the kernel for no
// route and no file. Calls that wait are not counted, since their number depends on the machine's load.
func TestAConnectionTakesFewSystemCalls(t *testing.T) {
	need.Programs(t, "strace")
	const connections = 50
	for _, w := range ways {
		if w.tunnel != nil {
			continue // its packets are calls, and come as they do
		}
		most := 30 // 22 by forward, 28 with the client's address
		if w.dial != nil && w.name != "forward" {
			most = 45 // goroutines that read the greeting are woken, and wake the loop
		}
		t.Run(w.name, func(t *testing.T) {
			if w.privileged() {
				needsPrivilege(t)
			}
			s := newScene(t)
			yaml := w.yaml("defaults: {algorithm: none}\n")
			s.start(strings.Replace(yaml, "level: debug", "level: info, flows: false", 1)) // lines are calls, too
			s.capture(w)
			need.Serve(t, s.listen(w.target(s, servicePort)), func(c net.Conn) { _, _ = io.Copy(c, c) })
			connectOnce := func() {
				c, err := w.connect(s, w.target(s, servicePort))
				require.NoError(t, err)
				_, err = c.Write([]byte("hello"))
				require.NoError(t, err)
				require.NoError(t, c.CloseWrite())
				said, err := io.ReadAll(c)
				require.NoError(t, err)
				assert.Equal(t, "hello", string(said))
				require.NoError(t, c.Close())
			}
			for range 5 { // what is asked or opened once
				connectOnce()
			}
			calls := s.proxy.countCalls(func() {
				for range connections {
					connectOnce()
				}
			})
			sum := 0
			for name, n := range calls {
				if !slices.Contains(waits, name) {
					sum += n
				}
			}
			t.Log(float64(sum)/connections, calls)
			assert.LessOrEqual(t, sum, most*connections)
			sends := 2 // of bytes; each question to netlink is one more
			if w.dial != nil && w.name != "forward" {
				sends = 5 // answers to the greeting
			}
			assert.Less(t, calls["sendto"], sends*connections+connections/2)
			assert.Less(t, calls["sendmsg"]+calls["openat"], connections/2)
		})
	}
}

// waits are the calls of a program that waits, and of Go's scheduler.
var waits = []string{
	"epoll_pwait", "futex", "nanosleep", "tgkill", "getpid", "rt_sigreturn", "sched_yield", "restart_syscall",
}

// countCalls counts the program's system calls during f, by name.
func (p *program) countCalls(f func()) map[string]int {
	table := filepath.Join(p.t.TempDir(), "calls")
	cmd := exec.Command("strace", "-f", "-c", "-o", table, "-p", strconv.Itoa(p.cmd.Process.Pid))
	said, err := cmd.StderrPipe()
	require.NoError(p.t, err)
	require.NoError(p.t, cmd.Start())
	_, err = said.Read(make([]byte, 1)) // "Process … attached"
	require.NoError(p.t, err)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		_, _ = io.Copy(io.Discard, said)
	}()
	f()
	require.NoError(p.t, cmd.Process.Signal(syscall.SIGINT))
	<-drained
	_ = cmd.Wait() // it ends by the signal
	text, err := os.ReadFile(table)
	require.NoError(p.t, err)
	calls := map[string]int{}
	for line := range bytes.Lines(text) { // % time, seconds, usecs/call, calls, errors or nothing, name
		if fields := strings.Fields(string(line)); len(fields) > 4 {
			if n, err := strconv.Atoi(fields[3]); err == nil && fields[len(fields)-1] != "total" {
				calls[fields[len(fields)-1]] = n
			}
		}
	}
	require.NotEmpty(p.t, calls, "strace counted nothing")
	return calls
}
