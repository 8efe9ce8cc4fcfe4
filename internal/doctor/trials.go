package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
)

// tunDevice is the file that makes TUN devices.
const tunDevice = "/dev/net/tun"

// trialsPatience bounds the time of the child process, which usually takes a hundredth of it.
const trialsPatience = 20 * time.Second

// attempt is the result of a trial.
type attempt struct {
	// Failed is the error's text; empty: it worked.
	Failed string `json:"failed"`
	// Errno is the system's error; 0: none.
	Errno syscall.Errno `json:"errno"`
}

// outcome is the output of the child.
type outcome struct {
	// Namespace is the result of making one. Without it there are no trials.
	Namespace attempt `json:"namespace"`
	// Trials are by the name of their check.
	Trials map[string]attempt `json:"trials"`
}

// attemptOf returns the attempt that ended with err.
func attemptOf(err error) attempt {
	if err == nil {
		return attempt{}
	}
	return attempt{Failed: err.Error(), Errno: errnoOf(err)}
}

// asError returns the failure as an error, which errors.Is compares as the original.
func (t attempt) asError() error {
	if t.Failed == "" {
		return nil
	}
	return failure(t)
}

// failure is the error of an attempt, which may come from another process.
type failure attempt

// Error implements error.
func (f failure) Error() string { return f.Failed }

// Unwrap returns the error's number, for errors.Is.
func (f failure) Unwrap() error { return f.Errno }

// tryInNamespace applies capture rules and makes devices in a new network namespace, with the
// rights of this process.
func tryInNamespace(ctx context.Context) (trials map[string]attempt, err error) {
	over := make(chan struct{})
	go func() {
		defer close(over)
		runtime.LockOSThread() // for good: the thread and its namespace end with the goroutine
		if err = os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)); err == nil {
			trials, err = makeTrials(ctx)
		}
	}()
	<-over
	return trials, err
}

// makeTrials makes all trials in the network namespace of the calling thread.
func makeTrials(ctx context.Context) (map[string]attempt, error) {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return nil, fmt.Errorf("bring up loopback in a network namespace: %w", err)
	}
	trials := map[string]attempt{}
	for _, mode := range []capture.Mode{capture.TPROXY, capture.Redirect} {
		for _, v6 := range []bool{false, true} {
			rules := capture.Rules{Mode: mode, Port: 1, IPv4: !v6, IPv6: v6, Interfaces: []string{capture.AnyInterface}}
			err := rules.Apply(ctx)
			if left := capture.Remove(ctx); err == nil {
				err = left
			}
			trials[rulesCheck(mode, v6)] = attemptOf(err)
		}
	}
	trials[queueTrial] = attemptOf(tryQueue(ctx))
	trials["tun"] = attemptOf(tryTUN())
	trials[wireGuardTrial] = attemptOf(tryDevice("wireguard"))
	return trials, nil
}

// tryQueue applies rules that hold UDP in the network namespace of the calling thread, binds their queue and log
// group, and removes all. Each needs modules of its own: the rules nft_queue or xt_NFQUEUE and nft_log, the queue
// nfnetlink_queue, the group nfnetlink_log. Queues and groups belong to a namespace, so that a running proxy does not
// have them.
func tryQueue(ctx context.Context) error {
	rules := capture.Rules{
		Mode: capture.TPROXY, Port: 1, IPv4: true, Interfaces: []string{capture.AnyInterface},
		Hold: capture.Hold{All: true, Queue: capture.DefaultHoldQueue},
	}
	err := rules.Apply(ctx)
	if err == nil {
		var queue *hold.Queue
		if queue, err = hold.OpenQueue(capture.DefaultHoldQueue, 1); err == nil {
			queue.Close()
		}
	}
	if err == nil {
		// The proxy reads the server names of QUIC from copies of what clients send. It does not start without them,
		// because rules by name would not match.
		var copies *hold.Copies
		if copies, err = hold.OpenCopies(capture.DefaultHoldQueue); err == nil {
			copies.Close()
		}
	}
	if left := capture.Remove(ctx); err == nil {
		err = left
	}
	return err
}

// tryDevice makes a network device in the network namespace of the calling thread, and removes it.
func tryDevice(kind string) error {
	const name = "trial0"
	if err := capture.MakeInterface(name, kind); err != nil {
		return fmt.Errorf("make a %s device: %w", kind, err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find the %s device: %w", kind, err)
	}
	return netlink.LinkDel(link)
}

// rulesCheck names the check of a kind of capture rules.
func rulesCheck(mode capture.Mode, v6 bool) string {
	if v6 {
		return string(mode) + "_rules_ipv6"
	}
	return string(mode) + "_rules_ipv4"
}

// tryTUN makes a TUN device in the network namespace of the calling thread. It ends with its descriptor.
func tryTUN() error {
	fd, err := unix.Open(tunDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", tunDevice, err)
	}
	req, err := unix.NewIfreq("doctor0")
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = os.NewSyscallError("TUNSETIFF", unix.IoctlIfreq(fd, unix.TUNSETIFF, req))
	}
	return errors.Join(err, unix.Close(fd))
}

// tryInUserNamespace makes the trials as root of a new user namespace. It starts a child process, because a process
// with several threads cannot enter a user namespace.
func tryInUserNamespace(ctx context.Context, args []string) (map[string]attempt, error) {
	runtime.LockOSThread() // the child dies with the thread that starts it
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeout(ctx, trialsPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0]
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var o outcome
	if err := json.Unmarshal(out, &o); err != nil {
		return nil, fmt.Errorf("what the trials printed: %w", err)
	}
	return o.Trials, o.Namespace.asError()
}

// PrintTrials makes the trials in the child process that Diagnose starts in a user namespace.
func PrintTrials(ctx context.Context, w io.Writer) error {
	trials, err := tryInNamespace(ctx)
	return json.NewEncoder(w).Encode(outcome{Namespace: attemptOf(err), Trials: trials})
}
