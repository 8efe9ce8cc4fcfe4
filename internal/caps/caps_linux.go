// Package caps reads, names and drops the capabilities of this process.
package caps

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

// Set is a set of capabilities: bit n is the capability of number n
// (linux/capability.h).
type Set uint64

// Capabilities that Penstock uses or names, as in capabilities(7).
const (
	DACOverride    Set = 1 << cap.DAC_OVERRIDE
	DACReadSearch  Set = 1 << cap.DAC_READ_SEARCH
	NetAdmin       Set = 1 << cap.NET_ADMIN
	NetRaw         Set = 1 << cap.NET_RAW
	NetBindService Set = 1 << cap.NET_BIND_SERVICE
	BPF            Set = 1 << cap.BPF
	Perfmon        Set = 1 << cap.PERFMON
	SysAdmin       Set = 1 << cap.SYS_ADMIN

	// All has each that this program knows.
	All Set = 1<<cap.NamedCount - 1
)

// Has reports whether all of some are in the set.
func (c Set) Has(some Set) bool { return c&some == some }

// values returns the members, in the order of their numbers.
func (c Set) values() []cap.Value {
	members := make([]cap.Value, 0, bits.OnesCount64(uint64(c)))
	for ; c != 0; c &= c - 1 {
		members = append(members, cap.Value(bits.TrailingZeros64(uint64(c))))
	}
	return members
}

// String names them; empty: none.
func (c Set) String() string {
	var words []string
	for _, v := range c.values() {
		if v < cap.NamedCount {
			words = append(words, strings.ToUpper(v.String()))
		} else { // of a kernel that is younger than the library
			words = append(words, fmt.Sprintf("capability %d", v))
		}
	}
	return strings.Join(words, " ")
}

// Words is String in short: of nearly all, it names those that are absent.
func (c Set) Words() string {
	rest := All &^ c
	switch {
	case rest == 0:
		return "all"
	case bits.OnesCount64(uint64(rest)) < 10:
		return "all but " + rest.String()
	}
	return c.String()
}

// flagged returns the members of one of the kernel's sets.
func flagged(sets *cap.Set, flag cap.Flag) (members Set) {
	for v := range cap.MaxBits() {
		if on, err := sets.GetFlag(flag, v); err == nil && on {
			members |= 1 << v
		}
	}
	return members
}

// readSets returns the sets of the calling thread.
func readSets() (*cap.Set, error) {
	sets, err := cap.GetPID(0)
	if err != nil {
		return nil, fmt.Errorf("capabilities: read capabilities: %w", err)
	}
	return sets, nil
}

// Held returns what the calling thread may use now, and what it could have:
// permitted to it, or handed on to a program that it starts.
func Held() (effective, all Set, err error) {
	sets, err := readSets()
	if err != nil {
		return 0, 0, err
	}
	return flagged(sets, cap.Effective), flagged(sets, cap.Permitted) | flagged(sets, cap.Inheritable), nil
}

// ErrForeignProc is why a program with cgo cannot drop capabilities. libcap finds its threads in /proc then, and waits
// without end for threads of a /proc that belongs to another PID namespace.
var ErrForeignProc = errors.New("/proc is another PID namespace's")

// checkProc returns ErrForeignProc in a program with cgo.
func checkProc() error {
	if self, err := os.Readlink("/proc/self"); usesCgo && (err != nil || self != strconv.Itoa(os.Getpid())) {
		return fmt.Errorf("capabilities: %w", ErrForeignProc)
	}
	return nil
}

// Drop gives up every capability outside keep, in all sets of all threads, and
// the way to get one back by starting a program. It returns what was given up.
func Drop(keep Set) (dropped Set, err error) {
	sets, err := readSets()
	if err != nil {
		return 0, err
	}
	if err := checkProc(); err != nil {
		return 0, err
	}
	all := flagged(sets, cap.Permitted) | flagged(sets, cap.Inheritable)
	if _, err := cap.Prctlw(unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return 0, fmt.Errorf("capabilities: set no_new_privs: %w", err)
	}
	// An empty inheritable set also empties the ambient one (capabilities(7)).
	err = sets.ClearFlag(cap.Inheritable)
	for _, flag := range []cap.Flag{cap.Effective, cap.Permitted} {
		err = errors.Join(err, sets.SetFlag(flag, false, (flagged(sets, flag)&^keep).values()...))
	}
	if err = errors.Join(err, sets.SetProc()); err != nil {
		return 0, fmt.Errorf("capabilities: drop capabilities: %w", err)
	}
	return all &^ keep, nil
}

// ReadOnlyBy returns those of the files that cannot be opened without some. It tries on a thread that ends with the
// trial, so that no other one does without.
func ReadOnlyBy(some Set, files []string) (closed []string, err error) {
	sets, err := readSets()
	if err != nil || flagged(sets, cap.Effective)&some == 0 {
		return nil, err
	}
	trial := cap.FuncLauncher(func(any) error {
		if err := errors.Join(sets.SetFlag(cap.Effective, false, some.values()...), sets.SetProc()); err != nil {
			return fmt.Errorf("capabilities: try without: %w", err)
		}
		for _, name := range files {
			fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err == nil {
				_ = unix.Close(fd)
			} else if errors.Is(err, unix.EACCES) {
				closed = append(closed, name)
			}
		}
		return nil
	})
	_, err = trial.Launch(nil)
	return closed, err
}
