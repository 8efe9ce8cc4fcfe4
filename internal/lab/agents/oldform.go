package agents

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// An agent on portus 0.5 reads from one path and answers to another, which must be there as it starts: it sends its
// programs then, once, and knows flows by their numbers alone. oldForm stands between such an agent and datapaths,
// for which it is an agent of today's form: it keeps the programs, and gives the flows of each datapath other numbers.
type oldForm struct {
	place  string // where datapaths reach it
	input  string // where the agent reads
	answer int    // socket to which the agent answers
	agent  int    // connected to input; -1: not yet
	listen int    // at place; -1: not yet

	programs [][]byte           // messages that install them, in order
	paths    map[string]bool    // of datapaths
	flows    map[uint32]ownFlow // by the number that the agent knows
	numbers  map[ownFlow]uint32 // the other way
	last     uint32             // number given
	buf      [2 * ccp.MaxFromAgent]byte

	ending chan struct{}
	ended  sync.WaitGroup
}

// ownFlow is a flow as a datapath knows it.
type ownFlow struct {
	path string
	flow uint32
}

// What the agent has to read, and the room for what it says, are looked for as often as that.
const (
	agentLook = 20 * time.Microsecond
	idleLook  = 100 * time.Millisecond
	roomLimit = 100 * time.Millisecond
)

// newOldForm binds the path to which an agent answers.
func newOldForm(place, input, output string) (o *oldForm, err error) {
	o = &oldForm{
		place: place, input: input, agent: -1, listen: -1, paths: map[string]bool{}, flows: map[uint32]ownFlow{},
		numbers: map[ownFlow]uint32{}, ending: make(chan struct{}),
	}
	if err := os.MkdirAll(filepath.Dir(output), 0o755); err != nil { //nolint:gosec // others have to reach it
		return nil, fmt.Errorf("make a place for its answers: %w", err)
	}
	o.answer, err = bindDatagrams(output)
	return o, err
}

// bindDatagrams binds a socket to a path. One that an earlier process has left there gives way.
func bindDatagrams(path string) (fd int, err error) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(path)
	}
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		_ = unix.Close(fd)
		return -1, &os.PathError{Op: "bind", Path: path, Err: err}
	}
	return fd, nil
}

// connect reaches the agent, if it is there, and begins to serve datapaths.
func (o *oldForm) connect() (there bool, err error) {
	agent, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false, os.NewSyscallError("socket", err)
	}
	if there = unix.Connect(agent, &unix.SockaddrUnix{Name: o.input}) == nil; !there { // it is yet to come
		_ = unix.Close(agent)
		return false, nil
	}
	o.agent = agent
	if o.listen, err = bindDatagrams(o.place); err != nil {
		return false, err
	}
	o.ended.Go(o.run)
	return true, nil
}

// close ends it, and is called once.
func (o *oldForm) close() {
	close(o.ending)
	o.ended.Wait()
	for _, fd := range []int{o.answer, o.agent, o.listen} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

func (o *oldForm) isEnding() bool {
	select {
	case <-o.ending:
		return true
	default:
		return false
	}
}

// run carries messages both ways. A message stays in the queue of our socket until the agent has read it, so that a
// datapath sees whether the agent does.
func (o *oldForm) run() {
	for !o.isEnding() {
		fds := []unix.PollFd{{Fd: int32(o.answer), Events: unix.POLLIN}, {Fd: int32(o.listen), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, int(idleLook.Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		o.takeAnswers()
		n, from, err := unix.Recvfrom(o.listen, o.buf[:], unix.MSG_PEEK)
		if err != nil {
			continue
		}
		if at, ok := from.(*unix.SockaddrUnix); ok && at.Name != "" {
			if gone := o.takeRequest(at.Name, o.buf[:n]); gone {
				return
			}
		}
		_, _, _ = unix.Recvfrom(o.listen, o.buf[:], 0)
	}
}

// takeRequest hands a datapath's messages to the agent, and returns once that has read them.
func (o *oldForm) takeRequest(path string, datagram []byte) (gone bool) {
	for m, message := range messagesOf(datagram) {
		switch m.Kind {
		case ccp.KindReady:
			o.forgetFlows(path)
			o.welcome(path)
			continue
		case ccp.KindCreate:
			o.welcome(path)
		default:
		}
		f := ownFlow{path, m.Flow}
		setFlow(message, o.number(f, m.Kind == ccp.KindCreate))
		if gone := o.tellAgent(message); gone {
			return true
		}
		if r, err := m.Measure(); err == nil && r.Program == 0 && len(r.Fields) == 0 {
			o.forgetFlow(f)
		}
	}
	return false
}

// messagesOf reads the messages of a datagram up to one that is broken, and copies each.
func messagesOf(datagram []byte) iter.Seq2[ccp.Message, []byte] {
	return func(yield func(ccp.Message, []byte) bool) {
		for len(datagram) > 0 {
			m, rest, err := ccp.Next(datagram)
			if err != nil || !yield(m, bytes.Clone(datagram[:len(datagram)-len(rest)])) {
				return
			}
			datagram = rest
		}
	}
}

// welcome has a datapath that was not heard of before know the programs.
func (o *oldForm) welcome(path string) {
	if o.paths[path] {
		return
	}
	o.paths[path] = true
	for _, p := range o.programs {
		o.say(path, p)
	}
}

// number is what the agent calls a flow; the highest, which there is none of, where it was not announced.
func (o *oldForm) number(f ownFlow, announced bool) uint32 {
	n, known := o.numbers[f]
	switch {
	case known:
		return n
	case !announced:
		return ^uint32(0)
	}
	o.last++
	o.numbers[f], o.flows[o.last] = o.last, f
	return o.last
}

// forgetFlows closes the flows of a datapath at the agent, so that it may come again as a new one.
func (o *oldForm) forgetFlows(path string) {
	delete(o.paths, path)
	for f, n := range o.numbers {
		if f.path == path {
			_ = o.tellAgent(ccp.Measure{Flow: n}.Append(nil))
			o.forgetFlow(f)
		}
	}
}

func (o *oldForm) forgetFlow(f ownFlow) {
	delete(o.flows, o.numbers[f])
	delete(o.numbers, f)
}

func setFlow(message []byte, flow uint32) { binary.LittleEndian.PutUint32(message[4:], flow) }

// tellAgent sends the agent a message and waits until it has read that, while it hands on what the agent says.
func (o *oldForm) tellAgent(message []byte) (gone bool) {
	for !o.isEnding() {
		err := unix.Sendto(o.agent, message, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ENOBUFS) {
			_ = unix.Close(o.listen) // so that datapaths see that the agent has gone
			o.listen = -1
			return true
		}
		o.awaitAnswers()
	}
	for !o.isEnding() {
		unread, err := unix.IoctlGetInt(o.agent, unix.SIOCOUTQ)
		if err != nil || unread == 0 {
			break
		}
		o.awaitAnswers()
	}
	o.takeAnswers()
	return false
}

// awaitAnswers waits for a moment, or until the agent says something.
func (o *oldForm) awaitAnswers() {
	wait := unix.NsecToTimespec(agentLook.Nanoseconds())
	_, _ = unix.Ppoll([]unix.PollFd{{Fd: int32(o.answer), Events: unix.POLLIN}}, &wait, nil)
	o.takeAnswers()
}

// takeAnswers hands on what the agent has said.
func (o *oldForm) takeAnswers() {
	var buf [ccp.MaxFromAgent + 1]byte
	for {
		n, _, err := unix.Recvfrom(o.answer, buf[:], unix.MSG_DONTWAIT)
		if err != nil {
			return
		}
		for m, message := range messagesOf(buf[:n]) {
			o.handOn(m, message)
		}
	}
}

// handOn has the datapath hear a message that it is for; a program is for all.
func (o *oldForm) handOn(m ccp.Message, message []byte) {
	if m.Kind == ccp.KindInstall {
		o.programs = append(o.programs, message)
		for path := range o.paths {
			o.say(path, message)
		}
		return
	}
	if f, known := o.flows[m.Flow]; known {
		setFlow(message, f.flow)
		o.say(f.path, message)
	}
}

// say sends a datapath a message. One that has gone is forgotten; to one that reads nothing it is lost.
func (o *oldForm) say(path string, message []byte) {
	for late := time.Now().Add(roomLimit); ; {
		err := unix.Sendto(o.listen, message, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, &unix.SockaddrUnix{Name: path})
		switch {
		case err == nil:
			return
		case !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR):
			delete(o.paths, path)
			return
		case time.Now().After(late):
			return
		}
		room := []unix.PollFd{{Fd: int32(o.listen), Events: unix.POLLOUT}}
		_, _ = unix.Poll(room, 1)
	}
}
