package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.zx2c4.com/wireguard/tun/netstack"
	"rsc.io/qr"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/wgclient"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

const gatewayConfig = `
listeners:
  - name: vpn
    mode: wireguard
    address: ":0"
    tunnel: {mtu: 1400}
    wireguard:
      private_key: EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=
      peers_file: peers.conf
      pool: [10.9.0.0/29, "fd00:9::/64"]
      peers:
        - {name: tablet, public_key: BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA=, allowed_ips: [10.9.0.2]}
telemetry: {address: "127.0.0.1:0"}
`

// gatewayFolder writes a configuration and returns where it is.
func gatewayFolder(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o640))
	return path
}

// unheard is where no proxy answers.
const unheard = "127.0.0.1:1"

func peerArgs(path string, args ...string) []string {
	return append(append([]string{"gateway", "peer"}, args...), "--config", path, "--telemetry", unheard)
}

func TestClientsAskTheGatewayForNamesWhereItAnswers(t *testing.T) {
	path := gatewayFolder(t, strings.Replace(gatewayConfig, "{mtu: 1400}", "{mtu: 1400, dns: 192.0.2.53}", 1))
	for given, want := range map[string]string{"": "DNS = 10.9.0.1\n", "9.9.9.9": "DNS = 9.9.9.9\n"} {
		args := []string{"add", "phone" + given, "--endpoint", "vpn.example.com:51820"}
		if given != "" {
			args = append(args, "--dns", given)
		}
		code, stdout, stderr := run(t, peerArgs(path, args...)...)
		require.Equal(t, cli.ExitOK, code, stderr)
		assert.Contains(t, stdout, want)
	}
}

func TestAPeerIsAddedListedAndRemoved(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	peers := filepath.Join(filepath.Dir(path), "peers.conf")
	code, stdout, stderr := run(t, peerArgs(path, "add", "Jane's phone", "--endpoint", "vpn.example.com:51820",
		"--dns", "9.9.9.9")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stderr, "no proxy answers at "+unheard)
	client, err := access.ParseQuick(stdout)
	require.NoError(t, err, stdout)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32"), netip.MustParsePrefix("fd00:9::2/128")},
		client.Addresses)
	assert.Equal(t, 1400, client.MTU)
	assert.Contains(t, stdout, "DNS = 9.9.9.9\n")
	assert.Contains(t, stdout, "Endpoint = vpn.example.com:51820\n")
	require.Len(t, client.Peers, 1)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")},
		client.Peers[0].AllowedIPs)

	info, err := os.Stat(peers)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o640), info.Mode(), "as the configuration has it")
	text, err := os.ReadFile(peers)
	require.NoError(t, err)
	assert.NotContains(t, string(text), client.PrivateKey.String(), "private keys of clients are stored nowhere")
	c, err := config.Load(path)
	require.NoError(t, err)
	public, err := client.PrivateKey.Public()
	require.NoError(t, err)
	require.Len(t, c.Listeners[0].WireGuard.Peers, 2)
	assert.Equal(t, public, c.Listeners[0].WireGuard.Peers[1].PublicKey)
	server, err := c.Listeners[0].WireGuard.PrivateKey.Public()
	require.NoError(t, err)
	assert.Equal(t, server, client.Peers[0].PublicKey)

	code, stdout, _ = run(t, peerArgs(path, "list")...)
	require.Equal(t, cli.ExitOK, code)
	assert.Regexp(t, `(?m)^Jane's phone +10\.9\.0\.3/32, fd00:9::2/128 +- +- +- +- +-$`, stdout)
	assert.Regexp(t, `(?m)^tablet +10\.9\.0\.2/32 +- `, stdout)

	require.NoError(t, os.Chmod(peers, 0o600))
	code, _, stderr = run(t, peerArgs(path, "remove", "Jane's phone")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	info, err = os.Stat(peers)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode(), "the mode stays")
	assert.Zero(t, info.Size())
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Len(t, left, 2, "nothing but the configuration and the peers is left")
}

func TestASharedKeyGoesToBothEnds(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	code, stdout, stderr := run(t, peerArgs(path, "add", "phone", "--endpoint", "192.0.2.1:51820",
		"--preshared-key")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	client, err := access.ParseQuick(stdout)
	require.NoError(t, err)
	c, err := config.Load(path)
	require.NoError(t, err)
	shared := c.Listeners[0].WireGuard.Peers[1].Preshared
	assert.NotZero(t, shared)
	assert.Equal(t, shared, client.Peers[0].Preshared)
}

// wg-quick has an address with the length of its network, which is not the peer's alone.
func TestAnAddressWithALengthIsOnePeers(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	code, _, stderr := run(t, peerArgs(path, "add", "phone", "--endpoint", "192.0.2.1:51820",
		"--address", "10.9.0.7/24")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	c, err := config.Load(path)
	require.NoError(t, err)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.9.0.7/32")}, c.Listeners[0].WireGuard.Peers[1].AllowedIPs)
}

func TestMistakesAboutPeersChangeNothing(t *testing.T) {
	plain := strings.Replace(gatewayConfig, "      peers_file: peers.conf\n", "", 1)
	two := strings.Replace(gatewayConfig, "listeners:\n",
		"listeners:\n  - {name: other, mode: wireguard, address: \":0\", wireguard: {private_key: "+
			"EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=, peers_file: other.conf}}\n", 1)
	end := []string{"--endpoint", "192.0.2.1:51820"}
	for name, c := range map[string]struct {
		config string
		args   []string
		says   string
	}{
		"a name twice": {
			gatewayConfig, append([]string{"add", "tablet"}, end...),
			`two peers are called "tablet"`,
		},
		"a name of two lines": {gatewayConfig, append([]string{"add", "a\nb"}, end...), "no name for a peer"},
		"an address twice": {
			gatewayConfig, append([]string{"add", "phone", "--address", "10.9.0.2"}, end...),
			"both have 10.9.0.2/32",
		},
		"the gateway's address": {
			gatewayConfig, append([]string{"add", "phone", "--address", "10.9.0.1/32"}, end...),
			"--address: 10.9.0.1 is the gateway's own, as the first of 10.9.0.0/29; give another one",
		},
		"an address that is none": {
			gatewayConfig, append([]string{"add", "phone", "--address", "10.9"}, end...),
			"--address",
		},
		"an address that no file may have": {
			gatewayConfig, append([]string{"add", "phone", "--address", "::ffff:10.9.0.7"}, end...),
			"--address",
		},
		"no port to tell the client": {
			gatewayConfig,
			[]string{"add", "phone", "--endpoint", "vpn.example.com"},
			"--endpoint: say the port",
		},
		"an endpoint with half its brackets": {
			gatewayConfig, []string{"add", "phone", "--endpoint", "[vpn.example.com"}, "is not HOST or HOST:PORT",
		},
		"an endpoint that is no address": {
			gatewayConfig, []string{"add", "phone", "--endpoint", "2001:db8::zz"}, "is not HOST or HOST:PORT",
		},
		"an endpoint with a comment": {
			gatewayConfig, []string{"add", "phone", "--endpoint", "x#y:1"}, "is not HOST or HOST:PORT",
		},
		"an endpoint that is none": {gatewayConfig, []string{"add", "phone", "--endpoint", "a b:1"}, "--endpoint"},
		"name servers by name": {
			gatewayConfig, append([]string{"add", "phone", "--dns", "dns.example"}, end...),
			"--dns",
		},
		"what is no prefix": {
			gatewayConfig, append([]string{"add", "phone", "--allowed-ips", "all"}, end...),
			"--allowed-ips",
		},
		"no file": {
			plain, append([]string{"add", "phone"}, end...),
			"listeners[0].wireguard.peers_file: missing",
		},
		"a peer of the configuration": {
			gatewayConfig, []string{"remove", "tablet"}, "remove it there",
		},
		"a peer that is not": {gatewayConfig, []string{"remove", "phone"}, `no peer "phone"`},
		"which listener":     {two, append([]string{"add", "phone"}, end...), "--listener: say which of other, vpn"},
		"a listener that is not": {
			two, append([]string{"add", "phone", "--listener", "x"}, end...),
			`--listener: "x" is not one of other, vpn`,
		},
		"no pool":    {two, append([]string{"add", "phone", "--listener", "other"}, end...), "no wireguard.pool"},
		"no gateway": {runConfig, []string{"list"}, "has no listener of mode wireguard"},
	} {
		t.Run(name, func(t *testing.T) {
			path := gatewayFolder(t, c.config)
			require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "peers.conf"), nil, 0o600))
			code, stdout, stderr := run(t, peerArgs(path, c.args...)...)
			assert.Equal(t, cli.ExitInput, code)
			assert.Empty(t, stdout)
			assert.Contains(t, stderr, c.says)
			for _, file := range []string{"peers.conf", "other.conf"} {
				if text, err := os.ReadFile(filepath.Join(filepath.Dir(path), file)); err == nil {
					assert.Empty(t, text)
				}
			}
		})
	}
}

func TestAddressesAreTakenInOrderUntilThereAreNone(t *testing.T) {
	pool := netip.MustParsePrefix("10.9.0.0/29")
	taken := []netip.Prefix{
		netip.MustParsePrefix("10.9.0.4/31"), netip.MustParsePrefix("0.0.0.0/0"),
		netip.MustParsePrefix("fd00::/8"),
	}
	var got []string
	for {
		a, ok := nextFree(pool, taken)
		if !ok {
			break
		}
		got = append(got, a.String())
		taken = append(taken, netip.PrefixFrom(a, 32))
	}
	assert.Equal(t, []string{"10.9.0.2", "10.9.0.3", "10.9.0.6"}, got)
	subnet := netip.MustParsePrefix("fd00:9::/80")
	beyond, ok := nextFree(netip.MustParsePrefix("fd00:9::/64"), []netip.Prefix{subnet})
	assert.True(t, ok)
	assert.Equal(t, netip.MustParseAddr("fd00:9:0:0:1::"), beyond, "behind 2^48 addresses that are taken")
	a, ok := nextFree(netip.MustParsePrefix("fd00:9::/127"), nil)
	assert.False(t, ok, "%v", a)
}

func TestWhoeverIsAddedWhileTheProxyRunsComesIn(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig+neverReached)
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "peers.conf"), nil, 0o600))
	in := startRunWithout(t, "--config", path)
	in.log.has(t, `"WARN","msg":"rules[0]: all matches every connection`)
	metrics, ok := in.log.line(t, "telemetry")["metrics"].(string)
	require.True(t, ok)
	at := strings.TrimSuffix(strings.TrimPrefix(metrics, "http://"), "/metrics")
	udp, ok := in.log.line(t, "listening")["address"].(string)
	require.True(t, ok)
	port := udp[strings.LastIndexByte(udp, ':')+1:]

	peer := func(args ...string) (string, string) {
		t.Helper()
		code, stdout, stderr := run(t, append(append([]string{"gateway", "peer"}, args...), "--config", path,
			"--telemetry", at)...)
		require.Equal(t, cli.ExitOK, code, stderr)
		return stdout, stderr
	}
	printed, notes := peer("add", "phone", "--endpoint", "127.0.0.1:"+port)
	assert.Contains(t, notes, "the running proxy has taken it over\nwarning: rules[0]: all matches every connection")
	phone := joinAs(t, printed)
	list, _ := peer("list")
	assert.Regexp(t, `(?m)^phone +10\.9\.0\.3/32, fd00:9::2/128 +never `, list)

	// Refused, and so heard.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := phone.DialContextTCPAddrPort(ctx, netip.MustParseAddrPort("169.254.169.254:80"))
	require.ErrorContains(t, err, "refused")
	_, body := in.get("/v1/peers")
	var peers []telemetry.Peer
	require.NoError(t, json.Unmarshal([]byte(body), &peers))
	require.Len(t, peers, 2)
	assert.Equal(t, "phone", peers[0].Name)
	assert.NotZero(t, peers[0].Handshake)
	list, _ = peer("list")
	assert.Regexp(t, `(?m)^phone .* \d+s ago .* 127\.0\.0\.1:\d+$`, list)
	_, page := in.get("/metrics")
	assert.Contains(t, page, `penstock_tunnel_peers_active{listener="vpn"} 1`)
	assert.Contains(t, page, `penstock_flow_rejections_total{listener="vpn",reason="denied"} 1`)

	peer("remove", "phone")
	_, page = in.get("/metrics")
	assert.Contains(t, page, `penstock_tunnel_peers{listener="vpn"} 1`)
	in.signal()
	in.expect("STOPPING=1")
	assert.Equal(t, cli.ExitOK, <-in.code)
}

// joinAs starts a WireGuard client with a configuration as it was printed.
func joinAs(t *testing.T, text string) *netstack.Net {
	t.Helper()
	c, err := access.ParseQuick(text)
	require.NoError(t, err)
	var endpoint string
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, "Endpoint = "); ok {
			endpoint = strings.TrimSpace(v)
		}
	}
	return wgclient.Client{
		PrivateKey: c.PrivateKey, ServerKey: c.Peers[0].PublicKey, Endpoint: endpoint,
		Addresses: []netip.Addr{c.Addresses[0].Addr()}, MTU: c.MTU,
	}.Open(t)
}

func TestAProxyThatRefusesTheFileIsToldOf(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "peers.conf"), nil, 0o600))
	in := startRunWithout(t, "--config", path)
	metrics, ok := in.log.line(t, "telemetry")["metrics"].(string)
	require.True(t, ok)
	at := strings.TrimSuffix(strings.TrimPrefix(metrics, "http://"), "/metrics")
	require.NoError(t, os.WriteFile(path, []byte(strings.Replace(gatewayConfig, "mtu: 1400", "mtu: 1300", 1)), 0o640))
	code, stdout, stderr := run(t, "gateway", "peer", "add", "phone", "--endpoint", "127.0.0.1:1", "--config", path,
		"--telemetry", at)
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, stderr, "listeners[0].tunnel.mtu: cannot change while the tunnel of listener")
	assert.Contains(t, stdout, "PrivateKey = ", "it is nowhere else")
	in.signal()
	in.expect("STOPPING=1")
	assert.Equal(t, cli.ExitOK, <-in.code)
}

func TestAQRCodeIsDrawnModuleByModule(t *testing.T) {
	const text = "[Interface]\nPrivateKey = x\n"
	var b bytes.Buffer
	require.NoError(t, writeQR(&b, text))
	code, err := qr.Encode(text, qr.L)
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	require.Len(t, lines, (code.Size+2*quietZone+1)/2)
	for y, line := range lines {
		row := []rune(strings.TrimSuffix(strings.TrimPrefix(line, "\x1b[30;107m"), "\x1b[0m"))
		require.Len(t, row, code.Size+2*quietZone)
		for x, r := range row {
			upper, lower := code.Black(x-quietZone, 2*y-quietZone), code.Black(x-quietZone, 2*y+1-quietZone)
			assert.Equal(t, upper, r == '█' || r == '▀', "%d,%d", x, 2*y)
			assert.Equal(t, lower, r == '█' || r == '▄', "%d,%d", x, 2*y+1)
		}
	}
	assert.Error(t, writeQR(io.Discard, strings.Repeat("x", 4000)))
}

func TestANewPrivateKeyIsPrinted(t *testing.T) {
	_, one, _ := run(t, "gateway", "key")
	_, two, _ := run(t, "gateway", "key")
	_, err := access.ParseKey(strings.TrimSpace(one))
	require.NoError(t, err)
	assert.NotEqual(t, one, two)
}

// full is where nothing can be written.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

func TestWhoeverCannotBeGivenTheKeyIsNotLetIn(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	peers := filepath.Join(filepath.Dir(path), "peers.conf")
	require.NoError(t, os.WriteFile(peers, nil, 0o600))
	args := peerArgs(path, "add", "phone", "--endpoint", "192.0.2.1:51820")
	assert.Equal(t, cli.ExitFail, runCommandLine(t.Context(), args, full{}, io.Discard))
	text, err := os.ReadFile(peers)
	require.NoError(t, err)
	assert.Empty(t, text)
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".peers.conf*"))
	require.NoError(t, err)
	assert.Empty(t, left, "nor is anything left of the attempt")
}

func TestAFileKeepsItsOwnerWhenItIsReplaced(t *testing.T) {
	needRoot(t) // to give a file away
	dir := t.TempDir()
	path, link := filepath.Join(dir, "peers.conf"), filepath.Join(dir, "link")
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o640))
	require.NoError(t, os.Chown(path, 1, 2))
	require.NoError(t, os.Symlink("peers.conf", link))
	require.NoError(t, replaceFile(link, []byte("new"), nil))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "new", string(text))
	info, err := os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o640), info.Mode())
	owner := info.Sys().(*syscall.Stat_t)
	assert.EqualValues(t, 1, owner.Uid)
	assert.EqualValues(t, 2, owner.Gid)
}

func TestTheGatewayReadsNoDevice(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	for path, says := range map[string]string{"/dev/zero": "it is a device", fifo: "at least one listener"} {
		code, _, stderr := run(t, "gateway", "peer", "list", "--config", path)
		assert.NotEqual(t, cli.ExitOK, code)
		assert.Contains(t, stderr, says)
	}
}

func TestBytesAreRounded(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0B", 999: "999B", 1000: "1.0kB", 1234567: "1.2MB", 9949: "9.9kB", 9950: "10kB", 48_000_123: "48MB",
		250_349_752: "250MB", 1_161_962_416: "1.2GB", 999_499_999: "999MB", 999_500_000: "1.0GB", 1 << 63: "9223PB",
	} {
		assert.Equal(t, want, roundBytes(n), n)
	}
}

// Whoever makes a gateway anywhere else than in /etc/penstock needs its path in the next command.
func TestInitTellsTheNextCommand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "my gateway.yaml")
	code, _, stderr := run(t, "gateway", "init", file)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stderr, "penstock gateway peer add NAME --config '"+file+"'")
	assert.Contains(t, stderr, "penstock run --config '"+file+"'")
}

// A peer with its client's AllowedIPs would shut all others out.
func TestAPeerThatTakesEverythingIsRefused(t *testing.T) {
	for list, refused := range map[string]bool{
		"0.0.0.0/0": true, "10.9.0.7/32, ::/0": true, "128.0.0.0/1": true, "10.0.0.0/8": true, "fd00:9::/64": true,
		"10.9.0.7/32": false, "10.9.0.7/32, 192.168.50.0/24, 172.16.0.0/12": false,
	} {
		path := gatewayFolder(t, gatewayConfig)
		peers := filepath.Join(filepath.Dir(path), "peers.conf")
		write := func(extra string) (code int, stderr string) {
			text := "[Peer]\n# Name = laptop\n" + extra + "PublicKey = CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCA=\nAllowedIPs = " + list + "\n"
			require.NoError(t, os.WriteFile(peers, []byte(text), 0o600))
			code, _, stderr = run(t, "check", path)
			return code, stderr
		}
		code, stderr := write("")
		if !refused {
			assert.Equal(t, cli.ExitOK, code, "%s: %s", list, stderr)
			continue
		}
		assert.Equal(t, cli.ExitConfig, code, list)
		assert.Contains(t, stderr, peers+": line 4: peer \"laptop\" has ", list)
		assert.Contains(t, stderr, `"# Exit = true"`)
		assert.Equal(t, 1, strings.Count(stderr, "laptop"), "it is told once: %s", stderr)
		code, stderr = write("# Exit = true\n")
		assert.Equal(t, cli.ExitOK, code, stderr)
		assert.Contains(t, stderr, "tunnel.isolate: false", "nobody would reach it")
	}
}

func TestAPeerIsAddedAsAnExitOnlyWhereThatIsMeant(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	peers := filepath.Join(filepath.Dir(path), "peers.conf")
	require.NoError(t, os.WriteFile(peers, nil, 0o600))
	add := []string{
		"gateway", "-c", path, "peer", "add", "site", "--endpoint", "192.0.2.1:7", "--telemetry", "127.0.0.1:1",
		"--address", "10.9.0.9,0.0.0.0/0",
	}
	code, _, stderr := run(t, add...)
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "--exit")
	text, err := os.ReadFile(peers)
	require.NoError(t, err)
	assert.Empty(t, text)
	code, _, stderr = run(t, append(add, "--exit")...)
	require.Equal(t, cli.ExitOK, code, stderr)
	text, err = os.ReadFile(peers)
	require.NoError(t, err)
	assert.Contains(t, string(text), "# Exit = true\n")
	code, _, stderr = run(t, "check", path)
	assert.Equal(t, cli.ExitOK, code, stderr)
}
