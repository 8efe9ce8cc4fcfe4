package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
	"github.com/penstock-net/penstock/telemetry"
)

func TestOnlyWhatIsNeededAfterwardsIsKept(t *testing.T) {
	const all = 1<<(unix.CAP_LAST_CAP+1) - 1
	marks := func(c *config.Config) { c.Mark = 7 }
	keeps := func(c *config.Config) { c.Listeners[0].KeepClient = true }
	device := func(c *config.Config) { c.Listeners[0].Mode = "tun" }
	captures := func(c *config.Config) { c.Listeners[0].Mode = "tproxy" }
	for name, c := range map[string]struct {
		change    func(*config.Config)
		envelope  string
		held      bool
		has, want caps.Set
	}{
		"held UDP, by threads that cannot keep it alone": {
			nil, "reno", true, all,
			caps.NetAdmin | caps.NetBindService,
		},
		"a proxy that everybody may run":                {nil, "reno", false, all, caps.NetBindService},
		"a transparent listener, which is open by then": {captures, "reno", false, all, caps.NetBindService},
		"a TUN device, which is made again when it goes": {
			device, "reno", false, all,
			caps.NetAdmin | caps.NetBindService,
		},
		"a mark on each connection": {
			marks, "reno", false, all,
			caps.NetAdmin | caps.NetBindService,
		},
		"the client's address on each connection": {
			keeps, "reno", false, all,
			caps.NetAdmin | caps.NetBindService,
		},
		"an envelope that is not for everybody": {
			nil, "cubic", false, all,
			caps.NetAdmin | caps.NetBindService,
		},
		"a mark by CAP_NET_RAW alone": {
			marks, "reno", false, caps.NetRaw | caps.BPF,
			caps.NetRaw,
		},
		"the client's address by CAP_NET_RAW alone":                {keeps, "reno", false, caps.NetRaw, caps.NetRaw},
		"an envelope that CAP_NET_RAW is no help with":             {nil, "cubic", false, caps.NetRaw, 0},
		"a process with the one capability that it needs":          {marks, "reno", false, caps.NetAdmin, caps.NetAdmin},
		"a process with the one capability that it can do without": {nil, "reno", false, caps.NetAdmin, 0},
		"a process without any":                                    {marks, "cubic", false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config.Default()
			if c.change != nil {
				c.change(&cfg)
			}
			needed := neededCapabilities(cfg, c.envelope, []string{"reno", "bbr"}, c.held, c.has)
			assert.Equal(t, c.want.String(), needed.String())
		})
	}
}

func TestWhyPrivilegesStayIsSaid(t *testing.T) {
	assert.Contains(t, explainKept(fmt.Errorf("x: %w", syscall.EPERM)), "SystemCallFilter=capset")
	assert.Contains(t, explainKept(syscall.EINVAL), "the kernel refused")
}

func TestMain(m *testing.M) {
	clitest.Main(m, main, func() { _ = os.RemoveAll(builds) }) // nothing where nothing was built
}

// builds is the directory of static; empty: nothing was built.
var builds string

// static is the program as it is released, without cgo, built once.
var static = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "penstock-static-")
	if err != nil {
		return "", err
	}
	builds = dir
	path := filepath.Join(dir, "penstock")
	build := exec.Command("go", "build", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return path, os.Chmod(dir, 0o755) //nolint:gosec // run by another user, too
})

// child is a proxy in a process of its own.
type child struct {
	t    *testing.T
	log  journal
	proc *os.Process
	done chan struct{}
}

// starter is an exec.Cmd, or one inside a namespace.
type starter interface {
	Start() error
	Wait() error
}

// launch starts the program with a configuration as prepare has it and waits
// until it has said what it does with its privileges.
func launch(t *testing.T, config string, prepare func(args []string) (starter, *exec.Cmd)) *child {
	t.Helper()
	path, err := static()
	require.NoError(t, err)
	dir := t.TempDir()
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o755)) //nolint:gosec // read by another user, too
	}
	file := filepath.Join(dir, "penstock.yaml")
	config += "\nlog: {format: json}\nshutdown: {drain: 1ms}\n"
	require.NoError(t, os.WriteFile(file, []byte(config), 0o644)) //nolint:gosec // as above
	c := &child{t: t, done: make(chan struct{})}
	start, cmd := prepare([]string{path, "run", "--config", file})
	cmd.Stderr = &c.log
	require.NoError(t, start.Start())
	c.proc = cmd.Process
	go func() {
		_ = start.Wait() // a signal ends it
		close(c.done)
	}()
	t.Cleanup(func() {
		_ = c.proc.Signal(syscall.SIGTERM)
		<-c.done
	})
	return c
}

// says waits for a line of the log.
func (c *child) says(msg string) map[string]any {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		select {
		case <-c.done:
			return true
		default:
			return strings.Contains(c.log.String(), `"msg":"`+msg)
		}
	}, 20*time.Second, time.Millisecond)
	for text := range strings.Lines(c.log.String()) {
		var line map[string]any
		if json.Unmarshal([]byte(text), &line) == nil && strings.HasPrefix(fmt.Sprint(line["msg"]), msg) {
			return line
		}
	}
	require.Fail(c.t, "nothing logged as "+msg, c.log.String())
	return nil
}

// tasks reads a line of the status of each thread.
func (c *child) tasks(key string) []string {
	c.t.Helper()
	dir := fmt.Sprintf("/proc/%d/task", c.proc.Pid)
	entries, err := os.ReadDir(dir)
	require.NoError(c.t, err)
	var values []string
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name(), "status"))
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it has ended
		}
		require.NoError(c.t, err)
		_, rest, found := strings.Cut(string(text), "\n"+key+":\t")
		require.True(c.t, found)
		value, _, _ := strings.Cut(rest, "\n")
		values = append(values, value)
	}
	require.NotEmpty(c.t, values)
	return values
}

// hasOnly checks the capabilities of every thread but for those that hold UDP, which have CAP_NET_ADMIN alone.
func (c *child) hasOnly(want caps.Set, holding ...int) {
	c.t.Helper()
	for _, set := range []string{"CapEff", "CapPrm"} {
		others := 0
		for _, value := range c.tasks(set) {
			bits, err := strconv.ParseUint(value, 16, 64)
			require.NoError(c.t, err)
			if len(holding) > 0 && caps.Set(bits) == caps.NetAdmin {
				others++
				continue
			}
			assert.Equal(c.t, want.String(), caps.Set(bits).String(), set)
		}
		assert.Equal(c.t, append(holding, 0)[0], others, "threads that hold UDP and count what passes")
	}
	for _, set := range []string{"CapInh", "CapAmb"} {
		for _, value := range c.tasks(set) {
			assert.Equal(c.t, "0000000000000000", value, set)
		}
	}
	for _, value := range c.tasks("NoNewPrivs") {
		assert.Equal(c.t, "1", value)
	}
}

// forwards sends bytes through a listener of mode forward to a server that
// echoes, and returns the address that the server saw.
func forwards(t *testing.T, dial func() (net.Conn, error), ln net.Listener) netip.AddrPort {
	t.Helper()
	saw := make(chan net.Addr, 1)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		saw <- conn.RemoteAddr()
		_, _ = io.Copy(conn, conn)
		_ = conn.Close()
	}()
	conn, err := dial()
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	echoes(t, conn)
	return netip.MustParseAddrPort((<-saw).String())
}

func needRoot(t *testing.T) {
	t.Helper()
	effective, _, err := caps.Held()
	require.NoError(t, err)
	if os.Getuid() != 0 || !effective.Has(caps.NetAdmin|caps.NetBindService) {
		t.Skip("needs root with CAP_NET_ADMIN and CAP_NET_BIND_SERVICE, to have something to drop")
	}
}

func TestARunningProxyHasOnlyThePrivilegesItNeeds(t *testing.T) {
	needRoot(t)
	available, allowed, err := kernel.Envelopes()
	require.NoError(t, err)
	restricted := slices.DeleteFunc(slices.Clone(available), func(name string) bool {
		return slices.Contains(allowed, name) || !slices.Contains([]string{"bbr", "cubic", "reno"}, name)
	})
	asRoot := func(args []string) (starter, *exec.Cmd) {
		cmd := exec.Command(args[0], args[1:]...)
		return cmd, cmd
	}
	// As systemd starts it with User= and AmbientCapabilities=.
	asUser := func(args []string) (starter, *exec.Cmd) {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
			AmbientCaps: []uintptr{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW},
		}
		return cmd, cmd
	}
	type row struct {
		start    func([]string) (starter, *exec.Cmd)
		settings string
		want     caps.Set
	}
	rows := map[string]row{
		"root needs nothing but low ports": {asRoot, "envelope: reno", caps.NetBindService},
		"root with a mark": {
			asRoot, "envelope: reno\nmark: 0x2000000",
			caps.NetAdmin | caps.NetBindService,
		},
		"a user who needs none of what he has": {asUser, "envelope: reno", 0},
		"a user with a mark":                   {asUser, "envelope: reno\nmark: 0x2000000", caps.NetAdmin},
	}
	if len(restricted) > 0 {
		rows["root with an envelope that is not for everybody"] = row{
			asRoot, "envelope: " + restricted[0], caps.NetAdmin | caps.NetBindService,
		}
	}
	for name, c := range rows {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer ln.Close()
			p := launch(t, fmt.Sprintf("%s\ntelemetry: {address: \"off\"}\nlisteners: [{name: f, mode: forward, "+
				"address: \"127.0.0.1:0\", target: %q}]\n",
				c.settings, ln.Addr()), c.start)
			line := p.says("privileges")
			assert.Equal(t, "privileges", line["msg"])
			assert.Equal(t, "INFO", line["level"])
			assert.Equal(t, c.want.String(), line["kept"])
			assert.NotEmpty(t, line["dropped"])
			p.hasOnly(c.want)
			address := fmt.Sprint(p.says("listening")["address"])
			forwards(t, func() (net.Conn, error) { return net.Dial("tcp", address) }, ln)
			p.hasOnly(c.want) // also on the threads that the connection may have brought
		})
	}
}

func TestTheKernelHoldsWindowsAfterPrivilegesAreGone(t *testing.T) {
	needRoot(t)
	if err := bpf.Check(); err != nil {
		t.Skip("needs a kernel and rights for the ebpf envelope: ", err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p := launch(t, fmt.Sprintf("envelope: ebpf\ntelemetry: {address: \"127.0.0.1:0\"}\nlisteners: [{name: f, mode: "+
		"forward, address: \"127.0.0.1:0\", target: %q}]\n", ln.Addr()),
		func(args []string) (starter, *exec.Cmd) {
			cmd := exec.Command(args[0], args[1:]...)
			return cmd, cmd
		})
	kept := fmt.Sprint(p.says("privileges")["kept"])
	assert.NotContains(t, kept, "CAP_BPF")
	assert.NotContains(t, kept, "CAP_SYS_ADMIN")
	address, page := fmt.Sprint(p.says("listening")["address"]), fmt.Sprint(p.says("telemetry")["flows"])
	forwards(t, func() (net.Conn, error) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return nil, err
		}
		echoesMuch(t, conn)
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get(page)
		require.NoError(t, err)
		defer resp.Body.Close()
		var flows []telemetry.Flow
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&flows))
		require.Len(t, flows, 1)
		for _, leg := range []*telemetry.Leg{flows[0].ClientLeg, flows[0].ServerLeg} {
			assert.Equal(t, kernel.EBPF, leg.Envelope)
			assert.Empty(t, leg.Missing)
		}
		return conn, nil
	}, ln)
}

func TestPrivilegesCanBeKept(t *testing.T) {
	needRoot(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p := launch(t, fmt.Sprintf("telemetry: {address: \"off\"}\nlisteners: [{name: f, mode: forward, address: "+
		"\"127.0.0.1:0\", target: %q}]\n", ln.Addr()),
		func(args []string) (starter, *exec.Cmd) {
			cmd := exec.Command(args[0], append(args[1:], "--keep-privileges")...)
			return cmd, cmd
		})
	address := fmt.Sprint(p.says("listening")["address"])
	// It serves only after it would have dropped them.
	forwards(t, func() (net.Conn, error) { return net.Dial("tcp", address) }, ln)
	_, all, err := caps.Held()
	require.NoError(t, err)
	for _, value := range p.tasks("CapPrm") {
		bits, err := strconv.ParseUint(value, 16, 64)
		require.NoError(t, err)
		assert.Equal(t, all.String(), caps.Set(bits).String())
	}
	assert.NotContains(t, p.log.String(), `"msg":"privileges`)
}

// TestCapturingGoesOnWithoutPrivileges has the proxy at the edge of
//
//	client ── cell0 ── edge ── wan0 ── server
//
// take what the client sends to the server, and send it on as the client.
func TestCapturingGoesOnWithoutPrivileges(t *testing.T) {
	lab, err := netlab.NewRouted()
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.Close()) }()
	for name, c := range map[string]struct {
		settings, own string
		want          caps.Set
		sees          netip.Addr
		holding       int // threads with CAP_NET_ADMIN: one gives verdicts, one reads the counters of what passes
	}{
		"as the proxy": {"", "", caps.NetBindService, lab.EdgeFar.V4, 0},
		"holding UDP":  {"", ", udp: {queue: 2510}", caps.NetBindService, lab.EdgeFar.V4, 2},
		"as the client": {
			"mark: 0x2000000\n", ", keep_client: true", caps.NetAdmin | caps.NetBindService,
			lab.ClientAddr.V4, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := launch(t, fmt.Sprintf("envelope: reno\n%stelemetry: {address: \"off\"}\nlisteners: [{name: t, "+
				"mode: tproxy, address: \"[::]:7000\"%s}]\n",
				c.settings, c.own), func(args []string) (starter, *exec.Cmd) {
				cmd := lab.Edge.Command(context.Background(), args[0], args[1:]...)
				return cmd, cmd.Cmd
			})
			p.says("privileges")
			p.hasOnly(c.want, c.holding)
			rules := capture.Rules{
				Mode: capture.TPROXY, Port: 7000, Interfaces: []string{netlab.NearDevice},
				Connected: capture.ConnectedCapture, Hold: capture.Hold{All: c.holding > 0},
			}
			require.NoError(t, lab.Edge.Do(func() error { return rules.Apply(t.Context()) }))
			if c.holding > 0 {
				p.says("UDP is held: rules send it into the queue")
			}
			target := netip.AddrPortFrom(lab.ServerAddr.V4, 8080).String()
			ln, err := lab.Server.Listen("tcp", target)
			require.NoError(t, err)
			defer ln.Close()
			saw := forwards(t, func() (net.Conn, error) { return lab.Client.Dial("tcp", target) }, ln)
			assert.Equal(t, c.sees, saw.Addr())
			p.hasOnly(c.want, c.holding)
		})
	}
}

// A configuration in a user's closed directory, and what it names, can be read
// again after the privileges of the start are gone.
func TestAReloadReadsWhatTheStartRead(t *testing.T) {
	needRoot(t)
	if effective, _, err := caps.Held(); err != nil || !effective.Has(caps.DACReadSearch) {
		t.Skip("needs CAP_DAC_READ_SEARCH")
	}
	const config = `listeners: [{name: local, mode: connect, address: "127.0.0.1:0", users: [{name: u, password_file: pw}]}]
telemetry: {address: "127.0.0.1:0"}
`
	for name, c := range map[string]struct {
		owner int
		keep  caps.Set
	}{
		"of another user": {65534, caps.NetBindService | caps.DACReadSearch},
		"of our own":      {0, caps.NetBindService},
	} {
		t.Run(name, func(t *testing.T) {
			p := launch(t, config+"envelope: reno\n", func(args []string) (starter, *exec.Cmd) {
				dir := filepath.Dir(args[3])
				require.NoError(t, os.WriteFile(filepath.Join(dir, "pw"), []byte("hunter2\n"), 0o600))
				for _, f := range []string{"pw", "penstock.yaml", "."} {
					require.NoError(t, os.Chown(filepath.Join(dir, f), c.owner, c.owner))
				}
				require.NoError(t, os.Chmod(dir, 0o700))
				cmd := exec.Command(args[0], args[1:]...)
				return cmd, cmd
			})
			p.says("privileges")
			p.hasOnly(c.keep)
			metrics := p.says("telemetry")["metrics"].(string)
			resp, err := http.Post(strings.TrimSuffix(metrics, "/metrics")+"/-/reload", "", nil)
			require.NoError(t, err)
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, http.StatusOK, resp.StatusCode, "%s", body)
			if c.keep.Has(caps.DACReadSearch) {
				assert.Len(t, p.says("CAP_DAC_READ_SEARCH is kept")["files"], 2)
			}
		})
	}
}

// Without the privilege that could be kept, the start says what no reload will read.
func TestTheStartSaysWhatNoReloadWillRead(t *testing.T) {
	needRoot(t)
	need.Programs(t, "setpriv")
	p := launch(t, `listeners: [{name: local, mode: connect, address: "127.0.0.1:0"}]
telemetry: {address: "off"}
envelope: reno
`, func(args []string) (starter, *exec.Cmd) {
		dir := filepath.Dir(args[3])
		require.NoError(t, os.Chown(dir, 65534, 65534))
		require.NoError(t, os.Chmod(dir, 0o700))
		cmd := exec.Command("setpriv", append([]string{"--bounding-set=-dac_read_search", "--inh-caps=-all"},
			args...)...)
		return cmd, cmd
	})
	line := p.says("a reload will not be able to read these files again")
	assert.Len(t, line["files"], 1)
	assert.Equal(t, "WARN", line["level"])
}
