package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// startSuccessor starts a process, which starts another one and ends, so that the second is an orphan.
const (
	successorVariable = "PENSTOCK_SUCCESSOR" // in the environment of both
	startedOnce       = "once"               // its value in the first; in the second it is the process id of the first
	reportFD          = 3                    // both write to it for startSuccessor
)

// successorPatience bounds the time from the start of a process to its takeover.
const successorPatience = 2 * time.Minute

// startSuccessor starts this program file with the arguments of a running proxy, to take over from that proxy. It
// returns once the process serves, or the reason why it does not. The process is an orphan by then, because systemd
// awaits the end of a main process only if that is its own child, and kills any other at once.
func startSuccessor(ctx context.Context, args []string) (pid int, err error) {
	read, write, err := os.Pipe()
	if err != nil {
		return 0, fmt.Errorf("start a process that takes over: %w", err)
	}
	defer read.Close()
	if !slices.Contains(args, "--takeover") {
		args = append(slices.Clone(args), "--takeover")
	}
	cmd, err := startAgain(ctx, args, startedOnce, write)
	if err = errors.Join(err, write.Close()); err != nil {
		return 0, fmt.Errorf("start a process that takes over: %w", err)
	}
	_ = read.SetReadDeadline(time.Now().Add(successorPatience)) //nolint:forbidigo // a deadline is a date
	var word string
	_, err = fmt.Fscan(read, &pid)
	if waitErr := cmd.Wait(); err == nil {
		err = waitErr
	}
	if err == nil {
		_, err = fmt.Fscan(read, &word)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // it neither serves nor ends
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err != nil {
		return 0, fmt.Errorf("process %d has not taken over, so the running proxy goes on; what it logged says why (%w)",
			pid, err)
	}
	return pid, nil
}

// startAgain starts this program file with a value of successorVariable.
func startAgain(ctx context.Context, args []string, value string, report *os.File) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), program, args...) //nolint:gosec // this program
	// A reader of the standard output would wait for the end of this process, too.
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	cmd.ExtraFiles = []*os.File{report}
	cmd.Env = append(slices.DeleteFunc(os.Environ(), isForOneProcess), successorVariable+"="+value)
	return cmd, cmd.Start()
}

// isForOneProcess reports whether a variable of the environment is for this process only, and not for its children.
func isForOneProcess(variable string) bool {
	name, _, _ := strings.Cut(variable, "=")
	return name == "WATCHDOG_PID" || name == successorVariable
}

// restartAsOrphan starts this program again and reports true, if this is the first process of startSuccessor. The
// caller then ends, which makes the second an orphan.
func restartAsOrphan() bool {
	if os.Getenv(successorVariable) != startedOnce {
		return false
	}
	report := os.NewFile(reportFD, "report")
	if cmd, err := startAgain(context.Background(), os.Args[1:], strconv.Itoa(os.Getpid()), report); err == nil {
		_, _ = fmt.Fprintln(report, cmd.Process.Pid)
	}
	return true
}

// awaitOrphaned waits until the first process of startSuccessor has ended, if this is the second. It waits for a
// second at most.
func awaitOrphaned() {
	parent, err := strconv.Atoi(os.Getenv(successorVariable))
	for range 1000 {
		if err != nil || os.Getppid() != parent {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// reportServing reports to startSuccessor, if that has started this process, that this one serves.
func reportServing() {
	if os.Getenv(successorVariable) == "" {
		return
	}
	_ = os.Unsetenv(successorVariable)
	report := os.NewFile(reportFD, "report")
	_, _ = fmt.Fprintln(report, "serving")
	_ = report.Close()
}

// argumentsOfOther returns the arguments of a process, if that runs another program file than this one. nil: it runs
// the same file, or nothing is known of it.
func argumentsOfOther(pid int) []string {
	if pid == 0 {
		return nil
	}
	other, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	own, ownErr := os.Stat("/proc/self/exe")
	if err != nil || ownErr != nil || os.SameFile(own, other) {
		return nil
	}
	line, err := readWords(pid, "cmdline")
	if err != nil {
		return nil
	}
	return line[1:]
}

// adoptWatchdog copies the watchdog's time from the environment of the main process, because systemd gives it to no
// other process.
func adoptWatchdog(pid int) {
	variables, err := readWords(pid, "environ")
	for _, v := range variables {
		if usec, ok := strings.CutPrefix(v, "WATCHDOG_USEC="); ok && err == nil {
			_ = os.Setenv("WATCHDOG_USEC", usec)
		}
	}
}

// readWords returns the strings in a file of /proc about a process, which end with 0 bytes.
func readWords(pid int, file string) ([]string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return strings.Split(string(bytes.TrimSuffix(text, []byte{0})), "\x00"), err
}

// startSuccessorOnSignal is startSuccessor for SIGUSR2, with the arguments of this process. It does not wait.
func (h *service) startSuccessorOnSignal() {
	switch {
	case os.Getpid() == 1:
		h.log.Warn("no process is started to take over: this is process 1, and all others of its namespace end with it")
		return
	case h.takeoverPath() == "":
		h.log.Warn("no process is started to take over: without --state-directory there is no socket for it")
		return
	case !h.startingSuccessor.CompareAndSwap(false, true):
		h.log.Warn("a process that is to take over is starting already")
		return
	}
	h.log.Info("starting a process that takes over", "signal", "SIGUSR2")
	go func() {
		defer h.startingSuccessor.Store(false)
		if _, err := startSuccessor(context.Background(), os.Args[1:]); err != nil {
			h.log.Error("no process takes over", "err", err)
		}
	}()
}
