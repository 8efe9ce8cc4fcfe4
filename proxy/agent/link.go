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
	redialDelay  = 100 * time.Millisecond // between two attempts to reach an agent
	firstBackoff = time.Second            // the same after malformed datagrams, and over TLS; doubles each time
	maxBackoff   = 30 * time.Second
	unreadPeriod = 5 * time.Millisecond // between checks of what the agent has not read
	probePeriod  = time.Second          // between checks of whether a silent agent is still there
	maxMalformed = 8                    // malformed datagrams in a row that end a connection
	maxReads     = 4                    // system calls for several datagrams each, in one turn
	maxEarly     = 1024                 // datagrams accepted from before the connection
)

// Config describes one agent.
type Config struct {
	Name      string
	Address   string         // HOST:PORT of an agent on another machine; Socket and Reply then have no meaning
	TLS       *tls.Config    // for Address
	Socket    string         // path where the agent listens; empty: ccp.DefaultSocket
	Reply     string         // path of our own socket, which the agent can reach; empty: beside the agent's
	Algorithm string         // that flows ask the agent for; empty: the agent's default
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
//	own, agentFile                 connectLoop, and watchAgent while connectLoop waits for it
//	in.batch, in.bad               in.mu, held over reading datagrams and passing them to flows
//	open, failed, fd, events,      mu, held over sending; flows send with their group's lock held,
//	waiting, out, sent, watching,    so that a message can wait for room and never for the agent
//	checkedAt
//	tls                            atomic: a reload sets it, the next connection over TLS loads it
//	heard                          atomic: the reader over TLS sets it, connectLoop clears it
//	warned                         atomic: one warning for a connection
//	held                           atomic: above 0 while a tick of the datapath collects messages
//	wakeWatch, wakeSender          channels of one place, for watchAgent and sendRemote
type Link struct {
	cfg        Config
	log        *slog.Logger
	agent      *ccp.Agent
	wakeWatch  chan struct{} // a message was added while watchAgent was idle, or the connection has failed
	wakeSender chan struct{} // a message waits for an agent on another machine
	cancel     context.CancelFunc
	done       sync.WaitGroup
	own        socket                     // our end
	agentFile  os.FileInfo                // of the agent's path before it was dialled; nil: there was no such file
	tls        atomic.Pointer[tls.Config] // of the next connection to an agent on another machine
	heard      atomic.Bool                // a message has come over that connection

	warned atomic.Bool // a message of the current connection was refused, and logged as a warning

	connects, malformed atomic.Uint64

	in        inbox
	held      atomic.Int32 // Holds without their Release
	mu        sync.Mutex   // locked after all others
	open      bool         // there is a connection
	failed    error        // what has ended it
	fd        int          // -1: none, or the agent is on another machine
	events    *events      // of fd
	waiting   backlog
	out       datagrams
	sent      ledger
	watching  bool    // watchAgent's timer is set for a check of unread messages
	checkedAt cc.Time // when checkUnread was called last

	openReports *openReports
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

// Start begins to connect to an agent. End it with Close.
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
		cfg: cfg, log: cfg.Log, wakeWatch: make(chan struct{}, 1), wakeSender: make(chan struct{}, 1), fd: -1,
		openReports: newOpenReports(),
	}
	if l.log == nil {
		l.log = slog.New(slog.DiscardHandler)
	}
	l.log = l.log.With("agent", cfg.Name)
	l.SetTLS(cfg.TLS)
	l.agent, err = ccp.NewAgent(cfg.Name, cfg.Algorithm, l.transmitMessage)
	return l, err
}

// Spec returns the algorithm with which flows follow the agent.
func (l *Link) Spec() cc.Spec { return l.agent.Spec() }

// SetTLS sets the TLS configuration of the next connection to an agent on another machine.
func (l *Link) SetTLS(cfg *tls.Config) { l.tls.Store(cfg) }

// Close ends the connection to the agent. Its flows continue under their fallback.
func (l *Link) Close() error {
	l.cancel()
	l.done.Wait()
	return nil
}

// Info returns the state of the agent.
func (l *Link) Info() Info {
	return Info{
		Name: l.cfg.Name, Socket: cmp.Or(l.cfg.Address, l.cfg.Socket), Up: l.agent.IsConnected(),
		Connects: l.connects.Load(), Malformed: l.malformed.Load(), Took: l.openReports.took.Snapshot(),
		Counters: l.agent.Counters(),
	}
}

// connectLoop connects to the agent, and again after each failure, until ctx is done.
func (l *Link) connectLoop(ctx context.Context) {
	defer func() { l.own.closeUnused(l.cfg.Reply) }()
	backoff, logged := firstBackoff, "" // logged: the last reason that was logged
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
			logged = ""
			l.log.Warn("agent lost: its flows go on under their fallback", "err", err)
		} else if why := disconnectReason(err); why != logged {
			logged = why
			l.log.Info("agent not reached; its flows go on under their fallback", "err", err)
		}
		wait := redialDelay
		if l.cfg.Address != "" || reached && errors.Is(err, ccp.ErrMalformed) {
			if l.cfg.Clock().Sub(began) > maxBackoff {
				backoff = firstBackoff
			}
			wait, backoff = backoff, min(2*backoff, maxBackoff)
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
	l.agentFile, _ = os.Stat(l.cfg.Socket)
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

// socket is our own one, bound to Config.Reply.
type socket struct {
	fd   int
	file os.FileInfo // of the path when it was bound; nil: it was not bound yet
	open bool        // fd is bound and not connected to an agent yet
}

// closeUnused closes a socket that was not connected to an agent.
func (s *socket) closeUnused(path string) {
	if s.open {
		_ = unix.Close(s.fd)
		s.removePath(path)
	}
	*s = socket{}
}

// isBound reports whether the path still leads to the socket.
func (s *socket) isBound(path string) bool {
	file, err := os.Lstat(path)
	return err == nil && isSameFile(file, s.file)
}

// removePath removes the path, unless another process has replaced the socket there.
func (s *socket) removePath(path string) {
	if s.isBound(path) {
		_ = os.Remove(path)
	}
}

// isSameFile reports whether a and b are of the same file. It compares the times too, because the file system may use
// an inode's number again at once.
func isSameFile(a, b os.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }

// dialSocket binds a socket to the path where the agent answers, and connects it to the agent's,
// so that no other process can send to it. While no agent listens, the bound socket stays in own,
// because agents of portus 0.5 send their programs as they start, and exit if no socket receives
// them. early are the datagrams that the agent has sent before the connection.
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
		if own.file, err = os.Lstat(c.Reply); err != nil {
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

// admitSenders lets every user send to the socket at Reply, because the agent may run as any. Of the others' datagrams
// none is handled: readEarly drops them, and the connected socket refuses them. admitSenders follows no link that
// another process has put in the socket's place.
func (c Config) admitSenders() error {
	fd, err := unix.Open(c.Reply, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // it was not written to
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return errors.New("another file has taken the socket's place")
	}
	return os.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o666)
}

// removeStale removes a socket that an earlier process has left at Reply.
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

// readEarly reads the datagrams that came before the socket was connected, and returns those from
// the user who owns the agent's socket.
func (c Config) readEarly(fd int) (early [][]byte) {
	var agent unix.Stat_t
	if unix.Stat(c.Socket, &agent) != nil {
		return nil
	}
	buf, oob := make([]byte, ccp.MaxFromAgent+1), make([]byte, unix.CmsgSpace(unix.SizeofUcred))
	for len(early) < maxEarly {
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

// connection is a connection to an agent.
type connection struct {
	fd     int // -1: the agent is on another machine
	events *events
	early  [][]byte // datagrams that the agent sent before the connection
}

// serveUntilEnd runs tasks until one of them returns or ctx is done. Tasks pass messages on, and return once the agent
// is gone or has sent too many malformed messages. end closes the connection.
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
	l.in.mu.Lock() // no tick reads datagrams while the connection ends
	l.mu.Lock()
	l.open, l.fd, l.events, l.waiting = false, -1, nil, backlog{}
	l.mu.Unlock()
	l.in.mu.Unlock()
	l.openReports.forgetAll()
	l.agent.Disconnect(l.cfg.Clock())
	l.agent.SetUnread(0)
	end()
	running.Wait()
	return context.Cause(ctx)
}

// beginConnection lets flows use a connection. It handles the early datagrams before any others.
func (l *Link) beginConnection(c connection) error {
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	l.in.bad = 0
	l.warned.Store(false)
	l.mu.Lock()
	l.open, l.failed, l.fd, l.events = true, nil, c.fd, c.events
	l.sent, l.watching = ledger{sizes: l.sent.sizes}, false
	if c.fd < 0 {
		l.waiting.noteFull() // messages always wait for sendRemote
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

// noteReached counts and logs a connection to the agent.
func (l *Link) noteReached(at string) {
	l.connects.Add(1)
	l.log.Info("agent reached", "socket", at)
}
