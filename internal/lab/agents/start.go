package agents

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/lab/edge"
)

// Prefix is what the names of agents' programs begin with.
const Prefix = "penstock-agent-"

const (
	startLimit = 30 * time.Second // for an agent's socket to be there
	startLook  = 5 * time.Millisecond
)

// Start starts those that are not there, by their commands or by their programs, which stand beside
// this program or in $PATH, each at a socket of its own. stop ends them.
func (a Agents) Start() (there Agents, stop func(), err error) {
	there = slices.Clone(a)
	var ends []func()
	later := func(end func()) { ends = append(ends, end) }
	stop = func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
	for i := range there {
		one := &there[i]
		if one.Socket != "" {
			continue
		}
		dir, err := os.MkdirTemp("", Prefix)
		if err != nil {
			err = fmt.Errorf("make a place for its socket: %w", err)
		} else {
			later(func() { _ = os.RemoveAll(dir) }) // what is left there does no harm
			start := one.start
			if one.In != "" {
				start = one.awaitOldForm
			}
			err = start(dir, later)
		}
		if err != nil {
			stop()
			return nil, nil, one.failed(err)
		}
	}
	return there, stop, nil
}

// Startable tells which of them Start cannot start, since its program is missing.
func (a Agents) Startable() error {
	for _, one := range a {
		if one.Socket != "" || one.Command != "" || one.In != "" {
			continue
		}
		if _, err := one.program(); err != nil {
			return one.failed(err)
		}
	}
	return nil
}

// failed names the agent that could not be started, and what to do instead.
func (a *Agent) failed(err error) error {
	return fmt.Errorf("agent %s: %w; or start one yourself and name it by --%s %s=SOCKET", a.Name, err, Flag, a.Name)
}

// program is the path of the agent's program.
func (a *Agent) program() (string, error) {
	path, err := edge.Beside(Prefix + cmp.Or(a.Program, a.Name))
	if err != nil {
		return "", fmt.Errorf("%w; build it by make build", err)
	}
	return path, nil
}

// its is the script that runs an agent's command: with a /tmp/ccp of its own, where agents on portus
// always listen, so that several run side by side. The command's last process is the agent's own.
const its = `mkdir -p "$1" && mount --make-rprivate "$(stat -c %m "$1")" && mount --bind "$0" "$1" &&
	SOCKET="$1/$2" exec sh -c "exec $3"`

// command is what starts the agent, which makes its socket in dir.
func (a *Agent) command(dir string) (cmd *exec.Cmd, socket string, err error) {
	if a.Command == "" {
		program, err := a.program()
		if err != nil {
			return nil, "", err
		}
		socket = filepath.Join(dir, "socket")
		cmd = exec.Command(program, socket)
		cmd.SysProcAttr = &syscall.SysProcAttr{}
		return cmd, socket, nil
	}
	place, name := filepath.Split(ccp.DefaultSocket)
	cmd = exec.Command("sh", "-c", its, dir, filepath.Clean(place), name, a.Command)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS} // Unshareflags want / to be a mount point
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{HostID: uid, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{HostID: gid, Size: 1}},
		}
	}
	return cmd, filepath.Join(dir, name), nil
}

// lastWords is how many bytes of what an agent has said are kept, which may be much: some write a line for each
// report.
const lastWords = 2 << 10

// explain adds to an error what agents that have been ended said last.
func (a Agents) explain(err error) error {
	for _, one := range a {
		if one.said != nil && one.said.String() != "" {
			err = fmt.Errorf("%w; agent %s said: %v", err, one.Name, one.said)
		}
	}
	return err
}

// start starts the agent, which makes its socket in dir. It passes functions that end the agent to later, even if
// it fails.
func (a *Agent) start(dir string, later func(end func())) error {
	cmd, socket, err := a.command(dir)
	if err != nil {
		return err
	}
	old, err := newOldForm(socket, filepath.Join(dir, oldPlace, "in"), filepath.Join(dir, oldPlace, "out"))
	if err != nil {
		return err
	}
	later(old.close)
	said := &edge.Tail{Most: lastWords}
	cmd.Stdout, cmd.Stderr = said, said
	cmd.SysProcAttr.Setpgid = true              // the terminal's Ctrl-C is for us, who end it in its turn
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL // where we are killed ourselves
	started, over := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // it dies with the thread that starts it
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it is killed
		}
		close(over)
	}()
	if err := <-started; err != nil {
		return err
	}
	later(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // it may have ended just now
		<-over
	})
	what := cmp.Or(a.Command, cmd.Path)
	err = old.await(over, fmt.Errorf("%s makes no socket within %s", what, startLimit))
	if errors.Is(err, errEnded) {
		err = fmt.Errorf("%s ended: %v", what, said)
	}
	a.Socket, a.pid, a.said = socket, cmd.Process.Pid, said
	return err
}

var errEnded = errors.New("it ended")

// await waits until an agent listens at the place for datapaths, or is one on portus 0.5 that is served there. The
// error is errEnded once ended is closed, and late after startLimit.
func (o *oldForm) await(ended <-chan struct{}, late error) error {
	limit, look := time.After(startLimit), time.Tick(startLook)
	for {
		if there, err := o.connect(); there || err != nil {
			return err
		}
		if _, err := os.Stat(o.place); err == nil {
			return nil
		}
		select {
		case <-ended:
			return errEnded
		case <-limit:
			return late
		case <-look:
		}
	}
}

// oldPlace is where agents on portus 0.5 have their sockets, below the directory of today's.
const oldPlace = "0"

// awaitOldForm makes the path to which an agent on portus 0.5 answers, and waits until that is started. Datapaths
// reach it in dir.
func (a *Agent) awaitOldForm(dir string, later func(end func())) error {
	old, err := newOldForm(filepath.Join(dir, "socket"), a.In, a.Out)
	if err != nil {
		return err
	}
	later(func() {
		old.close()
		_ = os.Remove(a.Out)
	})
	a.Socket = old.place
	return old.await(nil, fmt.Errorf("nobody listens at %s within %s; one on portus 0.5 is started after this program, "+
		"which takes its answers at %s", a.In, startLimit, a.Out))
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
