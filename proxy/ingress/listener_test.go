package ingress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

func TestConfigurationErrorsNameTheKey(t *testing.T) {
	for _, row := range []struct {
		cfg  Config
		want string
	}{
		{Config{Mode: "sock5"}, `mode "sock5" is none of a listener for TCP`},
		{Config{Mode: access.TPROXY, Auth: []User{{"a", "b"}}}, "auth: mode tproxy cannot ask"},
		{Config{Mode: access.SOCKS5, Auth: []User{{"a", ""}}}, "auth[0]"},
		{Config{Mode: access.SOCKS5, Auth: []User{{"a", "b"}, {strings.Repeat("a", 256), "b"}}}, "auth[1]"},
		{Config{Mode: access.Forward}, "target: mode forward needs"},
		{Config{Mode: access.Forward, Target: "nowhere"}, `target "nowhere"`},
		{Config{Mode: access.Connect, Target: "a:1"}, "target: only mode forward"},
		{Config{Mode: access.Connect, HandshakeTimeout: -1}, "handshake_timeout"},
		{Config{Mode: access.Connect, TrustedProxies: make([]netip.Prefix, 1)}, "trusted_proxies[0]"},
		{Config{Mode: access.Connect, Addr: "nonsense"}, "missing port"},
	} {
		row.cfg.Name = "lan"
		if row.cfg.Addr == "" {
			row.cfg.Addr = "127.0.0.1:0"
		}
		_, err := Listen(t.Context(), row.cfg, sockets(t))
		assert.ErrorContains(t, err, `listener "lan": `)
		assert.ErrorContains(t, err, row.want)
	}
}

func TestAMissingCapabilityIsNamedWithItsRemedy(t *testing.T) {
	err := explainError(access.TPROXY, os.NewSyscallError("setsockopt", syscall.EPERM))
	assert.ErrorContains(t, err, "TPROXY needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep")
	err = explainError(access.SOCKS5, os.NewSyscallError("bind", syscall.EACCES))
	assert.ErrorContains(t, err, "needs CAP_NET_BIND_SERVICE")
	assert.ErrorIs(t, err, syscall.EACCES)
	assert.Equal(t, syscall.EADDRINUSE, explainError(access.TPROXY, syscall.EADDRINUSE))
}

func TestTPROXYListenWithoutTheCapability(t *testing.T) {
	err := need.Unprivileged(func() error {
		_, err := Listen(t.Context(), Config{Name: "lan", Mode: access.TPROXY, Addr: ":0"}, never)
		return err
	})
	assert.ErrorIs(t, err, syscall.EPERM)
	assert.ErrorContains(t, err, "TPROXY needs CAP_NET_ADMIN: run as root")
}

func TestASocketThatCannotBeTakenIsClosed(t *testing.T) {
	var plain, multipath net.ListenConfig
	plain.SetMultipathTCP(false)
	multipath.SetMultipathTCP(true)
	for name, tt := range map[string]struct {
		with net.ListenConfig
		mode access.Mode
		want string
	}{
		"not configured as it must be": {plain, access.Forward, "target"},
		"not of plain TCP":             {multipath, access.SOCKS5, ""}, // plain on a kernel without MPTCP
		"not served":                   {plain, access.SOCKS5, "not to be opened"},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := tt.with.Listen(t.Context(), "tcp", "127.0.0.1:0")
			require.NoError(t, err)
			_, err = Listen(t.Context(), Config{
				Name: "lan", Mode: tt.mode, Addr: ln.Addr().String(), Socket: ln.(*net.TCPListener),
			}, never)
			require.ErrorContains(t, err, tt.want)
			assert.ErrorIs(t, ln.Close(), net.ErrClosed, "it is closed already")
		})
	}
}

// never opens nothing: Listen fails before.
func never(*net.TCPListener) (Acceptor, error) { return nil, errors.New("not to be opened") }

// accepting serves a listener until the test ends; next returns what it takes.
func accepting(tb testing.TB, l *Socket) (next func() (datapath.Conn, error)) {
	tb.Helper()
	conns, stop, ended := make(chan datapath.Conn), make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- l.Serve(func(c datapath.Conn) {
			select {
			case conns <- c:
			case <-stop:
			}
		})
	}()
	tb.Cleanup(func() {
		close(stop)
		_ = l.Close()
	})
	return func() (datapath.Conn, error) {
		select {
		case c := <-conns:
			return c, nil
		case err := <-ended:
			return nil, err
		}
	}
}

func TestAcceptBacksOffWhenDescriptorsRunOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, failures := time.Now(), 0
		var at []time.Duration
		ln := &fakeAcceptor{closed: make(chan struct{}), next: func() (datapath.Conn, error) {
			at = append(at, time.Since(began))
			if failures++; failures <= 12 {
				return nil, os.NewSyscallError("accept4", syscall.EMFILE)
			}
			return newFakeConn(""), nil
		}}
		var log bytes.Buffer
		l, err := newSocket(Config{
			Name: "lan", Mode: access.SOCKS5,
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		}, ln)
		require.NoError(t, err)
		next := accepting(t, l)
		_, err = next()
		require.NoError(t, err)
		synctest.Wait()

		var gaps []time.Duration
		for i := 1; i <= 12; i++ {
			gaps = append(gaps, at[i]-at[i-1])
		}
		assert.Equal(t, "[5ms 10ms 20ms 40ms 80ms 160ms 320ms 640ms 1s 1s 1s 1s]", fmt.Sprint(gaps))
		assert.Equal(t, 1, strings.Count(log.String(), "\n"), "one line in ten seconds: %s", log.String())
		assert.Contains(t, log.String(), "too many open files")

		// A new shortage after the period is worth a new line, and the first delay.
		time.Sleep(complaintPeriod)
		failures = 11
		_, err = next() // of before the shortage
		require.NoError(t, err)
		_, err = next()
		require.NoError(t, err)
		synctest.Wait()
		assert.Equal(t, firstDelay, at[len(at)-2]-at[len(at)-3])
		assert.Equal(t, 2, strings.Count(log.String(), "\n"))
		time.Sleep(complaintPeriod) // let the timer go
	})
}

func TestAnErrorOfOneConnectionKeepsNoOtherWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := slices.Clone(connErrors)
		ln := &fakeAcceptor{closed: make(chan struct{}), next: func() (datapath.Conn, error) {
			if len(left) == 0 {
				return newFakeConn(""), nil
			}
			err := os.NewSyscallError("accept4", left[0])
			left = left[1:]
			return nil, err
		}}
		l, err := newSocket(Config{Name: "lan", Mode: access.SOCKS5}, ln)
		require.NoError(t, err)
		began := time.Now()
		_, err = accepting(t, l)()
		require.NoError(t, err)
		assert.Zero(t, time.Since(began))
	})
}

func TestCloseEndsAServeThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ln := &fakeAcceptor{closed: make(chan struct{}), next: func() (datapath.Conn, error) {
			return nil, syscall.ENFILE
		}}
		l, err := newSocket(Config{Mode: access.SOCKS5}, ln)
		require.NoError(t, err)
		ended := make(chan error)
		go func() { ended <- l.Serve(func(datapath.Conn) {}) }()
		synctest.Wait()
		require.NoError(t, l.Close())
		assert.ErrorIs(t, <-ended, net.ErrClosed)
	})
}

func TestPermanentAcceptErrorIsReturned(t *testing.T) {
	l, err := newSocket(Config{Name: "lan", Mode: access.SOCKS5}, &fakeAcceptor{next: func() (datapath.Conn, error) {
		return nil, syscall.EINVAL
	}})
	require.NoError(t, err)
	assert.ErrorIs(t, l.Serve(func(datapath.Conn) {}), syscall.EINVAL)
}

func TestWhatIsAppliedIsInForceOnceItIsCommitted(t *testing.T) {
	l, err := Listen(t.Context(), Config{Name: "lan", Mode: access.SOCKS5, Addr: "127.0.0.1:0"}, sockets(t))
	require.NoError(t, err)
	defer l.Close()
	commit, err := l.Apply(Config{Name: "lan", Mode: access.Connect})
	require.NoError(t, err)
	assert.Equal(t, access.SOCKS5, l.currentConfig().Mode)
	commit()
	assert.Equal(t, access.Connect, l.currentConfig().Mode)
	_, err = l.Apply(Config{Name: "lan", Mode: access.Forward})
	require.Error(t, err, "without a target")
	assert.Equal(t, access.Connect, l.currentConfig().Mode)
}

func TestRefusedClientGetsItsAnswerThoughItWroteMore(t *testing.T) {
	l, err := Listen(t.Context(), Config{Name: "lan", Mode: access.SOCKS5, Addr: "127.0.0.1:0"}, sockets(t))
	require.NoError(t, err)
	next := accepting(t, l)
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer client.Close()
	_, err = client.Write([]byte("\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50" + strings.Repeat("early",
		10_000)))
	require.NoError(t, err)
	conn, err := next()
	require.NoError(t, err)
	c, err := l.Greet(t.Context(), conn)
	require.NoError(t, err)

	answered := make(chan error)
	go func() { answered <- c.Answer(netip.AddrPort{}, ErrNotAllowed) }()
	// Closing with unread bytes would turn the FIN into RST, and lose this.
	got := make([]byte, 64)
	n := 0
	for n < 12 {
		m, err := client.Read(got[n:])
		require.NoError(t, err)
		n += m
	}
	assert.Equal(t, "\x05\x00\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00", string(got[:n]))
	require.NoError(t, client.Close())
	assert.NoError(t, <-answered)
}

// childEnv makes the test binary run starvedChild, which may lower its own
// descriptor limit without taking other tests with it.
const childEnv = "PENSTOCK_TEST_STARVED"

func TestRealDescriptorLimit(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.CombinedOutput()
	assert.NoError(t, err, "%s", out)
}

func starvedChild() int {
	if err := starve(); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func starve() error {
	start := time.Now()
	dp, err := kernel.New(kernel.Config{
		Clock: func() cc.Time { return cc.Time(time.Since(start)) + 1 }, Envelope: "cubic",
	})
	if err != nil {
		return err
	}
	complaints := make(lines, 10)
	l, err := Listen(context.Background(), Config{
		Name: "lan", Mode: access.SOCKS5, Addr: "127.0.0.1:0",
		Log: slog.New(slog.NewTextHandler(complaints, nil)),
	}, func(ln *net.TCPListener) (Acceptor, error) { return dp.Listener(ln) })
	if err != nil {
		return err
	}
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	defer client.Close()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	// Descriptors are given lowest first: the next one is the limit.
	next, err := unix.Dup(0)
	if err != nil {
		return err
	}
	if err := unix.Close(next); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next), Max: limit.Max}); err != nil {
		return err
	}
	accepted, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() { ended <- l.Serve(func(datapath.Conn) { accepted <- struct{}{} }) }()
	select {
	case <-accepted:
		return errors.New("accepted beyond the limit")
	case err := <-ended:
		return err
	case <-time.After(100 * time.Millisecond):
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	select {
	case <-accepted:
	case err := <-ended:
		return fmt.Errorf("the waiting connection was lost: %w", err)
	}
	if err := errors.Join(l.Close(), dp.Close()); err != nil {
		return err
	}
	if said := <-complaints; !strings.Contains(said, "too many open files") {
		return fmt.Errorf("a complaint of something else: %s", said)
	}
	if n := len(complaints); n > 0 {
		return fmt.Errorf("%d complaints too many: %s", n, <-complaints)
	}
	return nil
}

// lines takes what is logged, a line each.
type lines chan string

func (l lines) Write(b []byte) (int, error) {
	l <- string(b)
	return len(b), nil
}
