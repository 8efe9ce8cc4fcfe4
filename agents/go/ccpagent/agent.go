// Package ccpagent makes congestion control agents: processes that decide windows and rates
// for connections of a datapath, by the messages of the congestion control plane (Narayan,
// "The Design and Implementation of a Congestion Control Plane", MIT 2019).
package ccpagent

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc/ccp"
)

// Controller decides for one flow. Calls of all controllers of an agent come one after the other.
type Controller interface {
	// Report tells what the flow's program has folded.
	Report(Report)
}

// Closer is a Controller that hears of its flow's end: the datapath closes the flow, announces it anew, or has gone.
type Closer interface {
	Controller
	Close()
}

// Agent is what decides. Set both fields before the first Serve.
type Agent struct {
	// Programs are the texts of the programs that datapaths are to run, by name.
	Programs map[string]string
	// New makes the controller of a new flow, and has the flow Run a program; nil: the
	// flow is left to the datapath.
	New func(*Flow) Controller

	mu       sync.Mutex // taken for each message
	programs map[string]*program
	err      error // of a controller: the first
}

// program is one with its number.
type program struct {
	*ccp.Code
	name    string
	number  uint32
	install []byte
}

// mostPrograms is how many a datapath takes.
const mostPrograms = 256

// roomWithin is how long a message waits for room in the socket of a datapath, which may be stopped. Then the
// message is lost. Other datapaths wait until then.
const roomWithin = 100 * time.Millisecond

// DefaultSocket is where datapaths expect the agents of the control plane's authors.
const DefaultSocket = ccp.DefaultSocket

// Main is a program's whole main: it serves at the socket that the only argument names, or
// at DefaultSocket, until an interrupt. An error ends the program with status 1, and arguments that are wrong
// with status 2.
func (a *Agent) Main() {
	socket, err := parseArguments(filepath.Base(os.Args[0]), os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err = a.Serve(ctx, socket)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// parseArguments returns the socket that a command line names. It writes help where that is asked for, and then
// returns flag.ErrHelp.
func parseArguments(program string, args []string, out io.Writer) (socket string, err error) {
	use := "usage: " + program + " [SOCKET]"
	flags := flag.NewFlagSet(program, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		_, err := fmt.Fprintf(out, `%s

A congestion control agent: it decides windows and rates for connections of datapaths that reach
it at SOCKET, the path of a Unix datagram socket that it makes (default %s).
Penstock is told of it by
    agents: [{name: mine, socket: SOCKET}]
    defaults: {algorithm: "ccp:mine"}
and penstock-lab by --agent mine=SOCKET. An interrupt ends it.
`, use, DefaultSocket)
		return "", errors.Join(err, flag.ErrHelp)
	case err != nil:
		return "", fmt.Errorf("%w; %s (a path that begins with a dash: ./-x)", err, use)
	case flags.NArg() > 1:
		return "", fmt.Errorf("there is one argument, the path of the socket, and not %d; %s", flags.NArg(), use)
	case flags.NArg() == 1 && flags.Arg(0) == "":
		return "", fmt.Errorf("the path of the socket is empty; %s", use)
	case flags.NArg() == 1:
		return flags.Arg(0), nil
	}
	return DefaultSocket, nil
}

// Serve listens at a Unix datagram socket, which is made in its directory, and serves
// datapaths until ctx ends; that is no error. A controller that names a program, register
// or field that there is none of ends it with an error, as does a program that is not correct.
func (a *Agent) Serve(ctx context.Context, socket string) error {
	if err := a.compilePrograms(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil { //nolint:gosec // others have to reach it
		return fmt.Errorf("ccpagent: make a place for the socket: %w", err)
	}
	if info, err := os.Lstat(socket); err == nil && info.Mode().Type() == os.ModeSocket {
		_ = os.Remove(socket) // an earlier process left it
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("ccpagent: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer func() {
		if stop() {
			_ = conn.Close()
		}
	}()
	peers := map[string]*peer{}
	buf := make([]byte, 2*ccp.MaxToAgent)
	for {
		n, from, err := conn.ReadFromUnix(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("ccpagent: hear datapaths: %w", err)
		}
		if from == nil || from.Name == "" {
			continue // there is no way to answer
		}
		p := peers[from.Name]
		if p == nil {
			p = a.newPeer(func(b []byte) error {
				_ = conn.SetWriteDeadline(time.Now().Add(roomWithin))
				_, err := conn.WriteToUnix(b, from)
				return err
			})
			peers[from.Name] = p
		}
		if gone := p.takeDatagram(buf[:n]); gone != nil { // when it is back it is a new one
			delete(peers, from.Name)
			p.closeFlows()
		}
		if err := a.firstFault(); err != nil {
			return err
		}
	}
}

// compilePrograms compiles the programs, and numbers them by their names' order.
func (a *Agent) compilePrograms() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.New == nil || len(a.Programs) == 0 {
		return errors.New("ccpagent: an agent needs a program, and New")
	}
	if n := len(a.Programs); n > mostPrograms {
		return fmt.Errorf("ccpagent: a datapath takes %d programs; these are %d", mostPrograms, n)
	}
	a.programs = map[string]*program{}
	for i, name := range slices.Sorted(maps.Keys(a.Programs)) {
		code, err := ccp.Compile(a.Programs[name])
		if err != nil {
			return fmt.Errorf("ccpagent: program %q: %w", name, err)
		}
		number := uint32(i + 1)
		install := code.Install(number)
		runs, err := install.Verify()
		if err != nil {
			return fmt.Errorf("ccpagent: program %q: %w", name, err)
		}
		if runs.Fields() < len(code.Fields) { // a datapath would report fewer than a controller may ask for
			return fmt.Errorf("ccpagent: program %q: each field of its Report needs a number as its first value", name)
		}
		a.programs[name] = &program{code, name, number, install.Append(nil)}
	}
	return nil
}

func (a *Agent) firstFault() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// failf keeps a controller's first mistake.
func (a *Agent) failf(format string, args ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("ccpagent: "+format, args...)
	}
}

// peer is a datapath.
type peer struct {
	agent *Agent
	send  func([]byte) error
	known bool // it has the programs
	flows map[uint32]*Flow
	gone  error // of the last send
}

func (a *Agent) newPeer(send func([]byte) error) *peer {
	return &peer{agent: a, send: send, flows: map[uint32]*Flow{}}
}

// takeDatagram takes the messages of one; malformed ones are left alone. An error says that
// the datapath does not hear us.
func (p *peer) takeDatagram(b []byte) error {
	p.agent.mu.Lock()
	defer p.agent.mu.Unlock()
	for len(b) > 0 && p.gone == nil {
		m, rest, err := ccp.Next(b)
		if err != nil {
			break
		}
		p.takeMessage(m)
		b = rest
	}
	return p.gone
}

func (p *peer) takeMessage(m ccp.Message) {
	switch m.Kind {
	case ccp.KindReady:
		p.forgetAll()
		p.installPrograms()
	case ccp.KindCreate:
		c, err := m.Create()
		if err != nil {
			return
		}
		if !p.known {
			p.installPrograms()
		}
		p.forgetFlow(c.Flow)
		f := &Flow{
			InitialCwnd: c.InitialCwnd, MSS: c.MSS, Algorithm: c.Algorithm, Remote: c.Remote,
			peer: p, id: c.Flow,
		}
		if f.controller = p.agent.New(f); f.controller != nil {
			p.flows[c.Flow] = f
		}
	case ccp.KindMeasure:
		r, err := m.Measure()
		f := p.flows[m.Flow]
		switch {
		case err != nil || f == nil:
		case r.Program == 0 && len(r.Fields) == 0:
			p.forgetFlow(m.Flow)
		case f.program != nil && r.Program == f.program.number && len(r.Fields) == len(f.program.Fields):
			f.controller.Report(Report{f, f.program, r.Fields})
		}
	default: // of the other direction, or of a version to come
	}
}

// forgetFlow ends a flow, if there is one of that number.
func (p *peer) forgetFlow(flow uint32) {
	f := p.flows[flow]
	delete(p.flows, flow)
	if f == nil {
		return
	}
	if c, ok := f.controller.(Closer); ok {
		c.Close()
	}
}

func (p *peer) forgetAll() {
	for _, flow := range slices.Sorted(maps.Keys(p.flows)) {
		p.forgetFlow(flow)
	}
}

// closeFlows ends the flows of a datapath that has gone.
func (p *peer) closeFlows() {
	p.agent.mu.Lock()
	defer p.agent.mu.Unlock()
	p.forgetAll()
}

func (p *peer) installPrograms() {
	p.known = true
	for _, name := range slices.Sorted(maps.Keys(p.agent.programs)) {
		p.sendMessage(p.agent.programs[name].install)
	}
}

func (p *peer) sendMessage(b []byte) {
	if p.gone != nil {
		return
	}
	p.gone = p.send(b)
	if errors.Is(p.gone, os.ErrDeadlineExceeded) { // it may be back; what was lost may have been a program
		p.gone, p.known = nil, false
	}
}
