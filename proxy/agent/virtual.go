package agent

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// Virtual is an agent that decides in virtual time. Time stands still while the agent works: a
// flow that reports continues once the agent has read the report and sent its decisions. So each
// run is the same, if the agent depends on its reports alone. Virtual cannot wait for an agent
// that answers on another thread than it reads on.
type Virtual struct {
	cfg   Config
	agent *ccp.Agent
	fd    int
	fence []byte
	buf   []byte
	sent  int             // messages
	flows map[uint32]bool // announced to the agent and not closed
	err   error
}

const (
	answerLimit = 10 * time.Second // how long an agent may think about one message, by the real clock
	startLimit  = 5 * time.Second  // how long one may still be starting: an interpreter on a busy machine
)

// fenceFields is the number of fields of the fence. It makes a message so large that a socket with
// the smallest send buffer is not writable until the agent has read it.
const fenceFields = 123

// replyCount numbers the reply sockets of this process.
var replyCount atomic.Int64

// Reach connects to an agent, which may just be starting, and has it install its programs. Where
// cfg.Reply is not set it is a path of its own beside the agent's. End it with Close.
func Reach(cfg Config) (*Virtual, error) {
	cfg.Socket = cmp.Or(cfg.Socket, ccp.DefaultSocket)
	if cfg.Reply == "" {
		cfg.Reply = fmt.Sprintf("%s.penstock-%d-%d", cfg.Socket, os.Getpid(), replyCount.Add(1))
	}
	cfg.Limit = cmp.Or(cfg.Limit, answerLimit)
	v := &Virtual{
		cfg: cfg, buf: make([]byte, ccp.MaxFromAgent+1), flows: map[uint32]bool{},
		// A report of a flow that does not exist, which agents ignore.
		fence: ccp.Measure{
			Flow: math.MaxUint32, Program: math.MaxUint32,
			Fields: make([]uint64, fenceFields),
		}.Append(nil),
	}
	var err error
	if v.agent, err = ccp.NewAgent(cfg.Name, cfg.Algorithm, v.transmitMessage); err != nil {
		return nil, err
	}
	v.agent.Inline = true
	starting := time.NewTimer(startLimit)
	defer starting.Stop()
	var own socket
	var early [][]byte
	for {
		if v.fd, early, err = cfg.dialSocket(&own); err == nil {
			break
		}
		again := time.NewTimer(redialDelay)
		select {
		case <-again.C:
		case <-starting.C:
			own.closeUnused(cfg.Reply)
			return nil, fmt.Errorf("%w, for %v; start the agent first", err, startLimit)
		}
	}
	if err = unix.SetsockoptInt(v.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1); err == nil { // the least there is
		err = v.agent.Connect(0, uint32(os.Getpid()))
	}
	for i := 0; err == nil && i < len(early); i++ {
		err = v.agent.Receive(0, early[i])
	}
	if err != nil {
		return nil, errors.Join(v.wrapError(err), v.Close())
	}
	return v, nil
}

// Spec returns the algorithm with which flows follow the agent.
func (v *Virtual) Spec() cc.Spec { return v.agent.Spec() }

// Err returns, after a run, why its result does not show the agent's decisions; nil: it does.
func (v *Virtual) Err() error {
	if v.err != nil {
		return v.wrapError(v.err)
	}
	c := v.agent.Counters()
	if v.sent > 1 && c.Decisions == 0 { // the first is a Ready
		return v.wrapError(errors.New("it has set no program for any flow; has it an algorithm of the name that is " +
			"asked for?"))
	}
	for why, n := range c.Fallbacks {
		if n > 0 {
			return v.wrapError(fmt.Errorf("the fallback took over %d times (%s)", n, why))
		}
	}
	return nil
}

// Close closes the agent's flows and ends the connection.
func (v *Virtual) Close() error {
	for _, flow := range slices.Sorted(maps.Keys(v.flows)) {
		_ = v.transmitMessage(ccp.Measure{Flow: flow}.Append(nil)) // lost, it costs the agent some memory
	}
	_ = os.Remove(v.cfg.Reply)
	return unix.Close(v.fd)
}

// wrapError names the agent in an error.
func (v *Virtual) wrapError(err error) error {
	return fmt.Errorf("agent %q at %s: %w", v.cfg.Name, v.cfg.Socket, err)
}

// transmitMessage is the agent's ccp.Transmit. The agent's answers are in force when it returns.
func (v *Virtual) transmitMessage(b []byte) error {
	if v.err == nil {
		v.sent++
		if what := aboutOf(b); what.kind == ccp.KindCreate {
			v.flows[what.flow] = true
		} else if closesFlow(b) {
			delete(v.flows, what.flow)
		}
		v.err = v.runAgentTurn(b)
	}
	return v.err
}

// runAgentTurn sends b and then the fence, and waits until the agent has read both. An agent that has read the fence
// has sent all its answers to b.
func (v *Virtual) runAgentTurn(b []byte) error {
	limit := time.NewTimer(v.cfg.Limit)
	defer limit.Stop()
	for _, m := range [...][]byte{b, v.fence} {
		for {
			err := unix.Sendto(v.fd, m, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
				return fmt.Errorf("nobody reads what is sent: %w", err)
			}
			if err := v.waitForAgent(limit.C); err != nil {
				return err
			}
		}
	}
	for unreadMemory(v.fd) > 0 {
		if err := v.waitForAgent(limit.C); err != nil {
			return err
		}
	}
	return v.receiveAll()
}

// waitForAgent waits until the agent has read or sent something, and receives what it has sent.
func (v *Virtual) waitForAgent(limit <-chan time.Time) error {
	select {
	case <-limit:
		return fmt.Errorf("it has not taken a message within %v; is it stopped, or in an endless loop?", v.cfg.Limit)
	default:
	}
	const most = 100 * time.Millisecond
	fds := []unix.PollFd{{Fd: int32(v.fd), Events: unix.POLLIN | unix.POLLOUT}}
	if _, err := unix.Poll(fds, int(most.Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("waiting for it: %w", err)
	}
	return v.receiveAll()
}

// receiveAll handles all datagrams that have come.
func (v *Virtual) receiveAll() error {
	for {
		n, _, err := unix.Recvfrom(v.fd, v.buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("hearing it: %w", err)
		case n > ccp.MaxFromAgent:
			return fmt.Errorf("%w: more than %d bytes", ccp.ErrMalformed, ccp.MaxFromAgent)
		}
		if err := v.agent.Receive(0, v.buf[:n]); err != nil {
			return err
		}
	}
}
