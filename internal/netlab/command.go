//go:build linux

package netlab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Cmd is an exec.Cmd that starts inside a node. Only Start, Run, Output and
// CombinedOutput differ; the rest is exec.Cmd's.
type Cmd struct {
	*exec.Cmd
	node    *Node
	release func() // lets go of the contexts
}

// Command prepares a child process inside the node. It is killed when ctx or the
// lab ends, or this process dies.
func (n *Node) Command(ctx context.Context, name string, args ...string) *Cmd {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(n.ctx, cancel)
	c := &Cmd{Cmd: exec.CommandContext(ctx, name, args...), node: n, release: func() { stop(); cancel() }}
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}

// Start starts the command inside the node.
func (c *Cmd) Start() error {
	s, err := c.node.spawn()
	if err == nil {
		err = s.do(c.Cmd.Start)
	}
	if err != nil {
		c.release()
	}
	return err
}

// Wait waits for the command to end.
func (c *Cmd) Wait() error {
	defer c.release()
	return c.Cmd.Wait()
}

// Run starts the command inside the node and waits for it.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Output runs the command inside the node and returns what it printed.
func (c *Cmd) Output() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout = &out
	err := c.Run()
	return out.Bytes(), err
}

// CombinedOutput runs the command inside the node and returns both of its outputs.
func (c *Cmd) CombinedOutput() ([]byte, error) {
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	err := c.Run()
	return out.Bytes(), err
}

// spawner is the thread that a node's commands are started from. The kernel's
// parent-death signal follows the parent's thread, so that thread must live as
// long as the node and no longer.
type spawner struct {
	calls chan func()
	quit  chan struct{}
	done  chan struct{}

	covers bool // the thread has mounts of its own; of the thread
}

// spawn returns the node's spawner, starting it at the first call.
func (n *Node) spawn() (*spawner, error) {
	n.mu.Lock()
	s := n.spawner
	if n.closed || s != nil {
		n.mu.Unlock()
		if s == nil {
			return nil, errClosed
		}
		return s, nil
	}
	s = &spawner{calls: make(chan func()), quit: make(chan struct{}), done: make(chan struct{})}
	n.spawner = s
	n.mu.Unlock()

	entered := make(chan error)
	go offMainThread(func() {
		defer close(s.done)
		err := n.enter()
		entered <- err
		for err == nil {
			select {
			case f := <-s.calls:
				f()
			case <-s.quit:
				return
			}
		}
	})
	return s, <-entered
}

func (s *spawner) do(fn func() error) error {
	errc := make(chan error, 1)
	select {
	case s.calls <- func() { errc <- fn() }:
		return <-errc
	case <-s.done:
		return errClosed
	}
}

// Cover has the node's later commands find the text in place of a file that is there. Other processes do not.
func (n *Node) Cover(file, text string) error {
	cover, err := os.CreateTemp("", "penstock-cover-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(cover.Name()) }() // what is mounted stays
	_, err = cover.WriteString(text)
	if err := errors.Join(err, cover.Chmod(0o644), cover.Close()); err != nil {
		return err
	}
	s, err := n.spawn()
	if err != nil {
		return err
	}
	err = s.do(func() error {
		if !s.covers {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			s.covers = true
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
		}
		return unix.Mount(cover.Name(), file, "", unix.MS_BIND, "")
	})
	if err != nil {
		return fmt.Errorf("netlab: cover %s for commands in %s: %w", file, n.name, err)
	}
	return nil
}

// stop ends the thread, and with it every command that still runs.
func (s *spawner) stop() {
	close(s.quit)
	<-s.done
}

// offMainThread runs fn on a locked thread that ends with it. The process's first
// thread never ends, so a goroutine that finds itself there passes fn on.
func offMainThread(fn func()) {
	runtime.LockOSThread()
	if syscall.Gettid() != syscall.Getpid() {
		fn()
		return
	}
	passed := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(passed)
		fn()
	}()
	<-passed
	runtime.UnlockOSThread()
}
