// Package agent carries the messages between congestion control agents and the flows
// that they decide for: over Unix datagram sockets as portus opens them, and over TLS.
package agent

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/datapath"
)

const (
	redial      = 100 * time.Millisecond // between two attempts to reach an agent
	redialAfter = time.Second            // the same after malformed datagrams, and over TLS; doubles each time
	redialMost  = 30 * time.Second
	looks       = 5 * time.Millisecond // between looks at what the agent has not read
	probes      = time.Second          // between checks of whether an agent that nothing is sent to is still there
	nonsense    = 8                    // malformed datagrams in a row that end a connection
	mostReads   = 4                    // of several datagrams each, in one turn
	mostEarly   = 1024                 // datagrams taken that came before the connection
)

// Config describes one agent.
type Config struct {
	Name      string
	Address   string         // HOST:PORT of one on another machine, in place of Socket and Reply
	TLS       *tls.Config    // for Address: who we are, and whom we trust
	Socket    string         // path where it listens; empty: ccp.DefaultSocket
	Reply     string         // path of our own socket, which the agent can reach; empty: beside the agent's
	Algorithm string         // which its flows ask for; empty: the agent's default
	Clock     func() cc.Time // the flows'; a Virtual needs none
	Log       *slog.Logger   // nil: silent
	Limit     time.Duration  // of a Virtual: how long it may think about a message, by the real clock; 0: 10 s
}

// Link is the connection to an agent. The agent is dialled until it is reached, and again
// once it is gone.
//
// Who touches what, and under which lock. Locks are taken in this order: in.mu, a group's, mu.
//
//	cfg, log, agent, asked         anyone: set before Start returns, safe by themselves
//	own, there                     connectLoop, and watch while connectLoop waits for it
//	in.batch, in.bad               in.mu, held over reading datagrams and handing them to flows
//	open, failed, fd, events,      mu, held over sending; flows send with their group's lock held,
//	waiting, out, sent, looking,     so that a message can wait for room and never for the agent
//	looked
//	secure                         atomic: a reload sets it, the next connection over TLS loads it
//	heard                          atomic: the reader over TLS sets it, connectLoop clears it
//	refused                        atomic: one warning for a connection
//	held                           atomic: above 0 while a tick of the datapath collects messages
//	kick, room                     channels of one place: they wake the goroutines that send
type Link struct {
	cfg    Config
	log    *slog.Logger
	agent  *ccp.Agent
	kick   chan struct{} // something was sent
	room   chan struct{} // something waits for an agent on another machine
	cancel context.CancelFunc
	done   sync.WaitGroup
	own    socket                     // our end; only run uses it, and watch while run waits for it
	there  os.FileInfo                // the agent's path before it was dialled; nil: none by then
	secure atomic.Pointer[tls.Config] // of the next connection to an agent on another machine
	heard  atomic.Bool                // a message has come over that connection

	refused atomic.Bool // a message that came over the present connection was

	connects, malformed atomic.Uint64

	in      inbox
	held    atomic.Int32 // Holds without their Release
	mu      sync.Mutex   // locked after all others
	open    bool         // there is a connection
	failed  error        // what has ended it
	fd      int          // -1: none, or to an agent on another machine
	events  *events      // of fd
	waiting backlog
	out     datagrams
	sent    ledger
	looking bool    // watch has its timer set to call look
	looked  cc.Time // when look was called last

	asked *asked
}

// Info is the state of an agent.
type Info struct {
	Name, Socket string
	Up           bool
	Connects     uint64 // times it was reached
	Malformed    uint64 // datagrams
	// Took is the time from a report until the next decision was in force, in seconds.
	Took datapath.Histogram
	ccp.Counters
}

// Start begins to look for an agent. End it with Close.
func Start(cfg Config) (*Link, error) {
	l, err := newLink(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.done.Go(func() { l.connectLoop(ctx) })
	return l, nil
}

// newLink returns a link that does not connect yet, with the paths that cfg leaves out.
func newLink(cfg Config) (l *Link, err error) {
	cfg.Socket = cmp.Or(cfg.Socket, ccp.DefaultSocket)
	cfg.Reply = cmp.Or(cfg.Reply, cfg.Socket+".penstock-"+cfg.Name)
	l = &Link{
		cfg: cfg, log: cfg.Log, kick: make(chan struct{}, 1), room: make(chan struct{}, 1), fd: -1, asked: newAsked(),
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	l.log = l.log.With("agent", cfg.Name)
	l.Secure(cfg.TLS)
	l.agent, err = ccp.NewAgent(cfg.Name, cfg.Algorithm, l.transmitMessage)
	return l, err
}

// Spec is the algorithm that the agent decides.
func (l *Link) Spec() cc.Spec { return l.agent.Spec() }

// Secure sets the TLS configuration of the next connection to an agent on another machine.
func (l *Link) Secure(by *tls.Config) { l.secure.Store(by) }

// Close ends the connection to the agent; its flows go on under their fallback.
func (l *Link) Close() error {
	l.cancel()
	l.done.Wait()
	return nil
}

// Info returns the state of the agent.
func (l *Link) Info() Info {
	return Info{
		Name: l.cfg.Name, Socket: cmp.Or(l.cfg.Address, l.cfg.Socket), Up: l.agent.Connected(),
		Connects: l.connects.Load(), Malformed: l.malformed.Load(), Took: l.asked.took.Snapshot(),
		Counters: l.agent.Counters(),
	}
}

// connectLoop connects to the agent, and again after each failure, until ctx is done.
func (l *Link) connectLoop(ctx context.Context) {
	defer func() { l.own.closeUnused(l.cfg.Reply) }()
	after, said := redialAfter, ""
	for {
		began := l.cfg.Clock()
		session, err := l.dialAgent(ctx)
		reached := err == nil
		if reached {
			err = session(ctx)
			reached = l.cfg.Address == "" || l.heard.Swap(false)
		}
		if ctx.Err() != nil {
			return
		}
		if reached {
			said = ""
			l.log.Warn("agent lost: its flows go on under their fallback", "err", err)
		} else if why := disconnectReason(err); why != said { // once for each
			said = why
			l.log.Info("agent not reached; its flows go on under their fallback", "err", err)
		}
		wait := redial
		if l.cfg.Address != "" || reached && errors.Is(err, ccp.ErrMalformed) {
			if l.cfg.Clock().Sub(began) > redialMost {
				after = redialAfter
			}
			wait, after = after, min(2*after, redialMost)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// dialAgent connects to the agent. session serves the connection until it is over.
func (l *Link) dialAgent(ctx context.Context) (session func(context.Context) error, err error) {
	if l.cfg.Address != "" {
		conn, err := l.dialRemote(ctx)
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return l.serveRemote(ctx, conn) }, nil
	}
	l.there, _ = os.Stat(l.cfg.Socket)
	fd, early, err := l.cfg.dialSocket(&l.own)
	if err != nil {
		return nil, err
	}
	e, err := newEvents(fd)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("agent %q: %w", l.cfg.Name, err)
	}
	return func(ctx context.Context) error {
		defer func() { _ = unix.Close(fd) }() // once its last user is done
		end := func() {
			e.closeFile()
			l.own.removePath(l.cfg.Reply)
		}
		return l.serveUntilEnd(ctx, l.cfg.Socket, connection{fd, e, early}, end, l.watchAgent,
			func(context.Context) error { return l.serveEvents(e) })
	}, nil
}

// socket is one that is bound to Config.Reply.
type socket struct {
	fd   int         // where it waits
	at   os.FileInfo // the path as it was bound; nil: it never was
	open bool        // it waits for an agent
}

// closeUnused closes a socket that was not taken over.
func (s *socket) closeUnused(path string) {
	if s.open {
		_ = unix.Close(s.fd)
		s.removePath(path)
	}
	*s = socket{}
}

// isBound reports whether the path still leads to the socket.
func (s *socket) isBound(path string) bool {
	at, err := os.Lstat(path)
	return err == nil && isSameFile(at, s.at)
}

// removePath removes the path, unless it is another process's by now.
func (s *socket) removePath(path string) {
	if s.isBound(path) {
		_ = os.Remove(path)
	}
}

// isSameFile reports whether two looks at a path saw the same file. An inode's number may be used again at once.
func isSameFile(a, b os.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }

// dialSocket binds a socket to the path where the agent answers, and connects it to the agent's,
// so that no other process can send to it. While no agent listens it waits, bound, in own: agents
// of portus 0.5 send their programs as they start, and exit if no socket receives them. early is
// what the agent has sent by then.
func (c Config) dialSocket(own *socket) (fd int, early [][]byte, err error) {
	fail := func(what, path string, err error) (int, [][]byte, error) {
		return -1, nil, fmt.Errorf("agent %q: %s %s: %w", c.Name, what, path, err)
	}
	if own.open && !own.isBound(c.Reply) {
		own.closeUnused(c.Reply)
	}
	if !own.open {
		if own.fd, err = c.bindReply(); err != nil {
			return fail("binding", c.Reply, err)
		}
		own.open = true
		if own.at, err = os.Lstat(c.Reply); err != nil {
			own.closeUnused(c.Reply)
			return fail("binding", c.Reply, err)
		}
	}
	if err := unix.Connect(own.fd, &unix.SockaddrUnix{Name: c.Socket}); err != nil {
		return fail("connecting to", c.Socket, err)
	}
	own.open = false
	return own.fd, c.readEarly(own.fd), nil
}

// bindReply makes a socket at the path where the agent answers.
func (c Config) bindReply() (fd int, err error) {
	if err := c.removeStale(); err != nil {
		return -1, err
	}
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrUnix{Name: ccp.Upward + c.Reply})
	}
	if err == nil {
		err = c.admitSenders()
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// admitSenders lets everybody send to the reply's socket: only the agent's is listened to. It follows no link
// that another process has put in the socket's place.
func (c Config) admitSenders() error {
	fd, err := unix.Open(c.Reply, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // it was not written to
	var is unix.Stat_t
	if err := unix.Fstat(fd, &is); err != nil {
		return err
	}
	if is.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return errors.New("another file has taken the socket's place")
	}
	return os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o666)
}

// removeStale removes a socket that an earlier process has left where ours is to be.
func (c Config) removeStale() error {
	const cure = "; remove it, or give this agent another reply"
	info, err := os.Lstat(c.Reply)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return errors.New("a file is there that is no socket" + cure)
	}
	switch err := unixConnect(c.Reply); {
	case errors.Is(err, unix.EACCES):
		return errors.New("another user has a socket there" + cure)
	case !errors.Is(err, unix.ECONNREFUSED):
		return errors.New("another process answers there; give this one another reply")
	}
	if err := os.Remove(c.Reply); err != nil {
		return fmt.Errorf("an earlier process left a socket there: %w%s", err, cure)
	}
	return nil
}

// readEarly reads what anybody sent before the socket was connected, and returns what came from
// the user who owns the agent's socket.
func (c Config) readEarly(fd int) (early [][]byte) {
	var agent unix.Stat_t
	if unix.Stat(c.Socket, &agent) != nil {
		return nil
	}
	buf, oob := make([]byte, ccp.MaxFromAgent+1), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for len(early) < mostEarly {
		n, nc, _, _, err := unix.Recvmsg(fd, buf, oob, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return early
		}
		controls, err := unix.ParseSocketControlMessage(oob[:nc])
		if err != nil || len(controls) != 1 {
			continue
		}
		if by, err := unix.ParseUnixCredentials(&controls[0]); err == nil && by.Uid == agent.Uid {
			early = append(early, slices.Clone(buf[:n]))
		}
	}
	return early
}

// connection is one to an agent on this machine.
type connection struct {
	fd     int // -1: it is on another machine
	events *events
	early  [][]byte // what the agent has sent before
}

// serveUntilEnd runs tasks, which pass messages on, until one of them returns, as the agent is gone or
// sends what is malformed, or ctx is done. end closes the connection.
func (l *Link) serveUntilEnd(
	ctx context.Context, at string, c connection, end func(), tasks ...func(context.Context) error,
) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var running sync.WaitGroup
	if err := l.beginConnection(c); err != nil {
		cancel(err)
	} else {
		if l.cfg.Address == "" {
			l.noteReached(at)
		}
		for _, task := range tasks {
			running.Go(func() { cancel(task(ctx)) })
		}
	}
	<-ctx.Done()
	l.in.mu.Lock() // no tick takes anything in any more
	l.mu.Lock()
	l.open, l.fd, l.events, l.waiting = false, -1, nil, backlog{}
	l.mu.Unlock()
	l.in.mu.Unlock()
	l.asked.forgetAll()
	l.agent.Lost(l.cfg.Clock())
	l.agent.Unread(0)
	end()
	running.Wait()
	return context.Cause(ctx)
}

// beginConnection lets flows use a connection, and takes in what came early before anything else.
func (l *Link) beginConnection(c connection) error {
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	l.in.bad = 0
	l.refused.Store(false)
	l.mu.Lock()
	l.open, l.failed, l.fd, l.events = true, nil, c.fd, c.events
	l.sent, l.looking = ledger{sizes: l.sent.sizes}, false
	if c.fd < 0 {
		l.waiting.noteScarce() // what leaves waits for a goroutine anyway
	}
	l.mu.Unlock()
	if err := l.agent.Connect(l.cfg.Clock(), uint32(os.Getpid())); err != nil {
		return err
	}
	for _, b := range c.early {
		if err := l.handleDatagram(b); err != nil {
			l.noteRefused(err)
		}
	}
	return nil
}

// noteReached notes that an agent is there.
func (l *Link) noteReached(at string) {
	l.connects.Add(1)
	l.log.Info("agent reached", "socket", at)
}
