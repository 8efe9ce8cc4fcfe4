package stage

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/policy"
)

// What carries the data of native senders.
const (
	OverUDP     = "udp"      // the algorithm's own packets and acknowledgements (package native)
	OverTCP     = "tcp"      // package alcc over the kernel's signals
	OverOwnAcks = "own-acks" // package alcc at both ends
)

// Overs are all that Stage.Over may be.
var Overs = []string{OverUDP, OverTCP, OverOwnAcks}

const (
	nativePort = 20_000 // the first receiver's
	// receiverSteps is how often a receiver says what has come, well below Step.
	receiverSteps = 10 * time.Millisecond
)

// NativeLine is what both ends of a native transfer print from time to time: all bytes so far, and how many of them
// were sent once more.
const NativeLine = "%d bytes, %d again\n"

// nativeEnd is one end of a native transfer: a process in a namespace of the lab.
type nativeEnd struct {
	cmd          *netlab.Cmd
	complaint    edge.Tail
	bytes, again atomic.Int64  // what the process has said last
	used         atomic.Int64  // processor time in nanoseconds, once it is stopped; 0: it runs
	began, ended chan struct{} // closed with the first line, and with the last
}

// nativeBulk sends by the algorithm that the stage's edge names, and by no edge.
func (a *actor) nativeBulk(ctx context.Context) error {
	terms, err := a.run.stage.terms(a.number)
	if err != nil {
		return err
	}
	if terms.Algorithm == policy.Unmanaged {
		return fmt.Errorf("native: %q has no algorithm", a.Name)
	}
	spec, err := cc.Lookup(terms.Algorithm)
	if err != nil {
		return err
	}
	return a.sendNative(ctx, spec.Format(terms.Params), a.run.stage.Over)
}

// sendNative makes the server, or the host of an upload, send by an algorithm until the actor stops, and counts what
// comes to the other.
func (a *actor) sendNative(ctx context.Context, algorithm, over string) (err error) {
	source, sink, at := a.run.lab.Server, a.run.lab.Client, a.host
	if a.Kind == Upload {
		source, sink, at = sink, source, a.server.Addr()
	}
	to := netip.AddrPortFrom(at, uint16(nativePort+a.number))
	over = cmp.Or(over, OverUDP)
	read := cc.Bytes(0)
	take := func(all cc.Bytes) {
		a.read(int(all - read))
		read = all
	}
	receiver, err := a.run.startNative(sink, take,
		"receive", "--listen", to.String(), "--over", over, "--every", receiverSteps.String())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, receiver.stop()) }()
	select {
	case <-receiver.began: // it listens
	case <-receiver.ended:
		return receiver.explain("receiver")
	case <-ctx.Done():
		return ctx.Err()
	}
	sender, err := a.run.startNative(source, func(cc.Bytes) {},
		"send", to.String(), "--over", over, "--algorithm", algorithm, "--every", Step.String())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sender.stop()) }()
	if a.sender.Store(sender); over != OverUDP && a.Kind != Upload {
		a.at.Store(&to) // the kernel counts what its socket sends
	}
	select {
	case <-sender.ended:
		return sender.explain("sender")
	case <-receiver.ended:
		return receiver.explain("receiver")
	case <-ctx.Done():
		return nil
	}
}

// startNative starts an end of a native transfer, and calls take with each count of bytes that it prints.
func (r *run) startNative(node *netlab.Node, take func(cc.Bytes), args ...string) (*nativeEnd, error) {
	program := r.env.Laboratory
	if program == "" {
		var err error
		if program, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("find this program: %w", err)
		}
	}
	e := &nativeEnd{began: make(chan struct{}), ended: make(chan struct{}), complaint: edge.Tail{Most: lastComplaint}}
	// The models come first: the algorithm may name one.
	args = slices.Concat(r.env.Args, []string{"native"}, args)
	e.cmd = node.Command(context.Background(), program, args...) // stop ends it
	e.cmd.SysProcAttr.Setpgid = true                             // the terminal's Ctrl-C is for us
	e.cmd.Stderr = &e.complaint
	out, err := e.cmd.StdoutPipe()
	if err == nil {
		err = e.cmd.Start()
	}
	if err != nil {
		return nil, fmt.Errorf("start a native %s: %w", args[0], err)
	}
	go e.follow(out, take)
	return e, nil
}

// lastComplaint is how many bytes of an end's last words are kept.
const lastComplaint = 1 << 10

// follow reads what the process prints until its end.
func (e *nativeEnd) follow(out io.Reader, take func(cc.Bytes)) {
	defer close(e.ended)
	lines := bufio.NewScanner(out)
	if lines.Scan() {
		close(e.began)
	}
	for lines.Scan() {
		var all, again cc.Bytes
		if _, err := fmt.Sscanf(lines.Text()+"\n", NativeLine, &all, &again); err == nil {
			e.bytes.Store(int64(all))
			e.again.Store(int64(again))
			take(all)
		}
	}
}

// cpu returns the processor time that the process has used.
func (e *nativeEnd) cpu() (time.Duration, error) {
	if used := e.used.Load(); used > 0 {
		return time.Duration(used), nil
	}
	return edge.CPUTime(e.cmd.Process.Pid)
}

// stop ends the process.
func (e *nativeEnd) stop() error {
	used, err := e.cpu()
	e.used.Store(int64(used))
	_ = e.cmd.Process.Kill() // it may have ended
	<-e.ended
	_ = e.cmd.Wait() // it was killed
	return err
}

// explain returns why the process has ended by itself.
func (e *nativeEnd) explain(what string) error {
	return fmt.Errorf("the native %s ended: %s", what, &e.complaint)
}

// usedTime returns the processor time that the proxy, or a native stage's senders, have used so far; 0 without both.
func (r *run) usedTime() (sum time.Duration, err error) {
	if r.proxy != nil {
		return r.proxy.CPUTime()
	}
	for _, a := range r.actors {
		if s := a.sender.Load(); s != nil && r.stage.Native {
			used, err := s.cpu()
			if err != nil {
				return 0, err
			}
			sum += used
		}
	}
	return sum, nil
}
