package agents

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/internal/lab/edge"
)

// Prefix is what the names of agents' programs begin with.
const Prefix = "penstock-agent-"

const (
	startLimit = 30 * time.Second // for an agent's socket to be there
	startLook  = 5 * time.Millisecond
)

// Start starts the programs of those that are not there, which stand beside this program or
// in $PATH, each at a socket of its own. stop ends them.
func (a Agents) Start() (there Agents, stop func(), err error) {
	there = slices.Clone(a)
	var ends []func()
	stop = func() {
		for _, end := range ends {
			end()
		}
	}
	for i := range there {
		if there[i].Socket != "" {
			continue
		}
		end, err := there[i].start()
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("agent %s: %w; or start one yourself and name it by --%s %s=SOCKET", there[i].Name, err,
				Flag, there[i].Name)
		}
		ends = append(ends, end)
	}
	return there, stop, nil
}

// start starts the agent's program.
func (a *Agent) start() (end func(), err error) {
	program, err := edge.Beside(Prefix + cmp.Or(a.Program, a.Name))
	if err != nil {
		return nil, fmt.Errorf("%w; build it by make build", err)
	}
	dir, err := os.MkdirTemp("", Prefix)
	if err != nil {
		return nil, fmt.Errorf("make a place for its socket: %w", err)
	}
	var said bytes.Buffer
	socket := filepath.Join(dir, "socket")
	cmd := exec.Command(program, socket)
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the terminal's Ctrl-C is for us, who end it in its turn
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	over := make(chan struct{})
	go func() {
		_ = cmd.Wait() // it is killed
		close(over)
	}()
	end = func() {
		_ = cmd.Process.Kill() // it may have ended just now
		<-over
		_ = os.RemoveAll(dir) // what is left there harms nobody
	}
	late := time.NewTimer(startLimit)
	defer late.Stop()
	look := time.NewTicker(startLook)
	defer look.Stop()
	for {
		if _, err := os.Stat(socket); err == nil {
			a.Socket, a.pid = socket, cmd.Process.Pid
			return end, nil
		}
		select {
		case <-over:
			end()
			return nil, fmt.Errorf("%s ended: %s", program, bytes.TrimSpace(said.Bytes()))
		case <-late.C:
			end()
			return nil, fmt.Errorf("%s makes no socket within %s", program, startLimit)
		case <-look.C:
		}
	}
}

// CPUTime is what those have used so far that Start has started.
func (a Agents) CPUTime() (sum time.Duration, err error) {
	for _, one := range a {
		if one.pid == 0 {
			continue
		}
		used, err := edge.CPUTime(one.pid)
		if err != nil {
			return 0, fmt.Errorf("agent %s: %w", one.Name, err)
		}
		sum += used
	}
	return sum, nil
}
