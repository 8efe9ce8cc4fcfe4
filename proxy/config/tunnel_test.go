package config_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

const (
	keyA = "EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE="
	keyB = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA="
	keyC = "CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCA="
)

const vpn = `
listeners:
  - name: vpn
    mode: wireguard
    address: ":51820"
    tunnel: {mtu: 1380, udp_idle: 30s, udp_sessions: 10, isolate: false, dns: 192.0.2.53}
    wireguard:
      private_key_file: vpn.key
      peers_file: peers.conf
      pool: [10.9.0.0/24, "fd00:9::/64"]
      peers:
        - {name: tablet, public_key: ` + keyB + `, allowed_ips: [10.9.0.3/32], keepalive: 25s}
  - {name: vpn2, mode: tun, device: penstock0}
`

// folder writes files as name, mode, content, and returns where they are.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return dir
}

func TestTunnelsAreReadWithTheirKeysAndPeers(t *testing.T) {
	dir := folder(t, map[string]string{
		"c.yaml": vpn, "vpn.key": keyC + "\n",
		"peers.conf": "[Peer]\n# Name = phone\nPublicKey = " + keyC + "\nPresharedKey = " + keyB + "\n" +
			"AllowedIPs = 10.9.0.2/32\n",
	})
	c, err := config.Load(filepath.Join(dir, "c.yaml"))
	require.NoError(t, err)
	require.NoError(t, c.Validate(), "as it is after its files were read")
	w := c.Listeners[0].WireGuard
	assert.Equal(t, keyC, w.PrivateKey.String())
	require.Len(t, w.Peers, 2)
	assert.Equal(t, "tablet", w.Peers[0].Name)
	assert.Equal(t, 25*time.Second, w.Peers[0].Keepalive)
	assert.Equal(t, "phone", w.Peers[1].Name)
	assert.Equal(t, keyB, w.Peers[1].Preshared.String())
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32")}, w.Peers[1].AllowedIPs)
	dns := netip.MustParseAddrPort("192.0.2.53:53")
	assert.Equal(t, access.Datagrams{Idle: 30 * time.Second, Sessions: 10, DNS: dns},
		c.Listeners[0].Tunnel.Datagrams())
	assert.Equal(t, access.Datagrams{Idle: 5 * time.Minute, Sessions: 1024, Isolate: true},
		c.Listeners[1].Tunnel.Datagrams())
}

func TestAFileOfWgQuicksIsAWholeListener(t *testing.T) {
	dir := folder(t, map[string]string{
		"c.yaml": "listeners: [{name: vpn, mode: wireguard, wireguard: {config_file: wg0.conf}}, " +
			"{name: two, mode: wireguard, wireguard: {config_file: wg1.conf}}]\n",
		"wg0.conf": "[Interface]\nPrivateKey = " + keyC + "\nListenPort = 51820\nMTU = 1300\n" +
			"Address = 10.9.0.1/24, 10.7.0.1\n" +
			"[Peer]\n# phone\nPublicKey = " + keyB + "\nAllowedIPs = 10.9.0.2/32\n",
		"wg1.conf": "[Interface]\nPrivateKey = " + keyC + "\nListenPort = 51821\n",
	})
	c, err := config.Load(filepath.Join(dir, "c.yaml"))
	require.NoError(t, err)
	require.NoError(t, c.Validate())
	l := c.Listeners[0]
	assert.Equal(t, ":51820", l.Address)
	assert.Equal(t, 1300, l.Tunnel.MTU)
	assert.Equal(t, keyC, l.WireGuard.PrivateKey.String())
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}, l.WireGuard.Pool)
	require.Len(t, l.WireGuard.Peers, 1)
	assert.Equal(t, "phone", l.WireGuard.Peers[0].Name)
}

func TestMistakesInTunnelsAreToldWithTheirKey(t *testing.T) {
	wireguard := func(keys string) string {
		return "listeners: [{name: v, mode: wireguard, address: \":51820\", " + keys + "}]"
	}
	key := "private_key: " + keyA
	for name, c := range map[string]struct{ config, key, message string }{
		"no key": {wireguard("wireguard: {}"), "listeners[0].wireguard.private_key_file", "wg genkey"},
		"two keys": {
			wireguard("wireguard: {" + key + ", private_key_file: x}"),
			"listeners[0].wireguard.private_key_file", "not both",
		},
		"a key that is none": {
			wireguard("wireguard: {private_key: abc}"), "listeners[0].wireguard.private_key",
			"44 characters",
		},
		"a file beside it": {
			wireguard("wireguard: {config_file: x, peers_file: y}"),
			"listeners[0].wireguard.config_file", "remove peers_file",
		},
		"one address of many": {
			`listeners: [{name: v, mode: wireguard, address: "192.0.2.1:51820", wireguard: {` + key + "}}]",
			"listeners[0].address", "write :51820",
		},
		"no address": {
			"listeners: [{name: v, mode: wireguard, wireguard: {" + key + "}}]", "listeners[0].address", "missing",
		},
		"a small MTU": {
			wireguard("tunnel: {mtu: 1279}, wireguard: {" + key + "}"), "listeners[0].tunnel.mtu",
			"1280 to 65535",
		},
		"a large MTU": {
			wireguard("tunnel: {mtu: 65536}, wireguard: {" + key + "}"), "listeners[0].tunnel.mtu",
			"1280 to 65535",
		},
		"a name server without an address inside": {
			wireguard("tunnel: {dns: 192.0.2.53}, wireguard: " +
				"{" + key + "}"), "listeners[0].tunnel.dns", "wireguard.pool",
		},
		"a name server by name": {
			wireguard("tunnel: {dns: ns.example}, wireguard: {" + key + "}"), "listeners[0].tunnel.dns",
			`"ns.example" is no host's address`,
		},
		"no time to be idle": {
			wireguard("tunnel: {udp_idle: 10ms}, wireguard: {" + key + "}"),
			"listeners[0].tunnel.udp_idle", "at least 1s",
		},
		"no time at all": {
			wireguard("tunnel: {udp_idle: 0s}, wireguard: {" + key + "}"),
			"listeners[0].tunnel.udp_idle", "at least 1s",
		},
		"too many sessions": {
			wireguard("tunnel: {udp_sessions: 100000}, wireguard: {" + key + "}"),
			"listeners[0].tunnel.udp_sessions", "0 to 65536",
		},
		"a key that is gone": {
			wireguard("tunnel: {udp_share: 1.5}, wireguard: {" + key + "}"),
			"listeners[0].tunnel.udp_share", "UDP weighs as its busy flows do; remove it",
		},
		"a pool twice": {
			wireguard("wireguard: {" + key + ", pool: [10.9.0.0/24, 10.9.0.0/24]}"),
			"listeners[0].wireguard.pool[1]", "overlaps",
		},
		"a pool of one": {
			wireguard("wireguard: {" + key + ", pool: [10.9.0.1/32]}"),
			"listeners[0].wireguard.pool[0]", "no room",
		},
		"a peer without a name": {wireguard("wireguard: {" + key + ", peers: [{public_key: " + keyB + ", " +
			"allowed_ips: " +
			"[10.9.0.2]}]}"), "listeners[0].wireguard.peers[0].name", "missing"},
		"a peer without a key": {
			wireguard("wireguard: {" + key + ", peers: [{name: a, allowed_ips: [10.9.0.2]}]}"),
			"listeners[0].wireguard.peers[0].public_key", "missing",
		},
		"a peer without an address": {
			wireguard("wireguard: {" + key + ", peers: [{name: a, public_key: " + keyB + "}]}"),
			"listeners[0].wireguard.peers", "has no address in the tunnel",
		},
		"two with one address": {
			wireguard("wireguard: {" + key + ", peers: [{name: a, public_key: " + keyB + ", allowed_ips: " +
				"[10.9.0.2]}, {name: " +
				"b, public_key: " + keyC + ", allowed_ips: [10.9.0.2]}]}"),
			"listeners[0].wireguard.peers", `"a" and "b" both have 10.9.0.2/32`,
		},
		"a peer that takes everything": {
			wireguard("wireguard: {" + key + ", peers: [{name: a, public_key: " + keyB + ", allowed_ips: [10.9.0.2, " +
				"0.0.0.0/0]}]}"),
			"listeners[0].wireguard.peers[0].allowed_ips", "exit: true",
		},
		"a peer that takes the pool": {
			wireguard("wireguard: {" + key + ", pool: [10.9.0.0/24], peers: [{name: a, public_key: " + keyB + ", " +
				"allowed_ips: [10.9.0.0/16]}]}"),
			"listeners[0].wireguard.peers[0].allowed_ips", "the addresses of other peers",
		},
		"half a second": {wireguard("wireguard: {" + key + ", peers: [{name: a, public_key: " + keyB + ", " +
			"allowed_ips: [10.9.0.2], keepalive: 500ms}]}"), "listeners[0].wireguard.peers[0].keepalive", "whole " +
			"seconds"},
		"one port twice": {"listeners: [{name: v, mode: wireguard, address: \":1\", wireguard: {" + key + "}}, " +
			"{name: w, mode: wireguard, address: \"[::]:1\", wireguard: " +
			"{" + key + "}}]", "listeners[1].address", "already " +
			"listeners[0].address"},
		"one device twice": {
			"listeners: [{name: v, mode: tun, device: t}, {name: w, mode: tun, device: t}]",
			"listeners[1].device", "already listeners[0].device",
		},
		"no device": {"listeners: [{name: v, mode: tun}]", "listeners[0].device", "penstock0"},
		"peers behind a device": {
			"listeners: [{name: v, mode: tun, device: t, tunnel: {isolate: true}}]",
			"listeners[0].tunnel.isolate", "have a rule refuse",
		},
		"a device's address": {
			"listeners: [{name: v, mode: tun, device: t, address: \":1\"}]",
			"listeners[0].address", "remove it",
		},
		"a device that cannot be": {
			"listeners: [{name: v, mode: tun, device: a/b}]", "listeners[0].device",
			"no name of a network device",
		},
		"a proxy in a tunnel": {
			"listeners: [{name: v, mode: tun, device: t, users: [{name: a, password: b}]}]",
			"listeners[0].users", "cannot ask",
		},
		"a header in a tunnel": {
			"listeners: [{name: v, mode: tun, device: t, proxy_protocol: {from: [10.0.0.0/8]}}]",
			"listeners[0].proxy_protocol", "no PROXY header",
		},
		"a tunnel that is none": {
			"listeners: [{name: v, mode: mixed, address: \"127.0.0.1:1\", tunnel: {mtu: 1500}}]",
			"listeners[0].tunnel", "change the mode",
		},
		"keys of another mode": {
			"listeners: [{name: v, mode: tun, device: t, wireguard: {" + key + "}}]",
			"listeners[0].wireguard", "only mode wireguard",
		},
		"a device elsewhere": {
			"listeners: [{name: v, mode: mixed, address: \"127.0.0.1:1\", device: t}]", "listeners[0].device",
			"only modes tun and wireguard",
		},
		"a device without a use": {
			wireguard("device: t, wireguard: {" + key + "}"), "listeners[0].device",
			"set wireguard.datapath to kernel or auto",
		},
		"a device of the kernel's that cannot be": {
			wireguard("device: a/b, wireguard: {datapath: kernel, " + key + "}"), "listeners[0].device",
			"no name of a network device",
		},
		"an unknown datapath": {
			wireguard("wireguard: {datapath: ebpf, " + key + "}"), "listeners[0].wireguard.datapath", "not one of auto",
		},
		"sessions of what the kernel forwards": {
			wireguard("tunnel: {udp_idle: 5m}, wireguard: {datapath: kernel, " + key + "}"),
			"listeners[0].tunnel.udp_idle", "datapath: netstack",
		},
		"a window for what the kernel forwards": {
			wireguard("wireguard: {datapath: kernel, "+key+"}") +
				"\nrules: [{name: r, match: {protocol: udp}, max_rate: 1mbit}]",
			"rules[0].match.protocol", "have it refuse",
		},
		"a peer that would have all that the machine sends": {
			wireguard("wireguard: {datapath: kernel, " + key + ", peers: [{name: exit, public_key: " + keyB +
				", allowed_ips: [10.9.0.2/32, \"::/0\"]}]}"),
			"listeners[0].wireguard.peers", "\"exit\" has ::/0",
		},
		"a peer that would have it in halves": {
			wireguard("wireguard: {datapath: kernel, " + key + ", peers: [{name: exit, public_key: " + keyB +
				", allowed_ips: [0.0.0.0/1, 128.0.0.0/1]}]}"),
			"listeners[0].wireguard.peers", "\"exit\" has 0.0.0.0/1",
		},
		"networks that nothing forwards": {
			wireguard("wireguard: {reachable_from: [192.168.1.0/24], " + key + "}"),
			"listeners[0].wireguard.reachable_from", "only datapath kernel",
		},
		"one interface twice": {
			"listeners: [{name: v, mode: wireguard, address: \":1\", wireguard: {datapath: auto, " + key + "}}, " +
				"{name: w, mode: wireguard, address: \":2\", device: wg-v, wireguard: {datapath: kernel, " + key + "}}]",
			"listeners[1].device", "already listeners[0].device",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(c.config))
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.Equal(t, c.key, ce.Key)
			assert.Contains(t, ce.Message, c.message)
			assert.Positive(t, ce.Line)
		})
	}
}

func TestMistakesInATunnelsFilesAreToldWithTheKeyThatNamesThem(t *testing.T) {
	load := func(change func(dir string, files map[string]string)) error {
		files := map[string]string{
			"c.yaml": vpn, "vpn.key": keyC,
			"peers.conf": "[Peer]\nPublicKey = " + keyC + "\nAllowedIPs = 10.9.0.2/32\n",
		}
		change("", files)
		dir := folder(t, files)
		change(dir, files)
		_, err := config.Load(filepath.Join(dir, "c.yaml"))
		return err
	}
	for name, c := range map[string]struct {
		change func(dir string, files map[string]string)
		says   string
	}{
		"a key that others read": {func(dir string, _ map[string]string) {
			if dir != "" {
				require.NoError(t, os.Chmod(filepath.Join(dir, "vpn.key"), 0o644))
			}
		}, "wireguard.private_key_file: "},
		"no key in the file": {
			func(_ string, f map[string]string) { f["vpn.key"] = "secret" },
			"vpn.key: this is no key",
		},
		"no file": {
			func(_ string, f map[string]string) { delete(f, "peers.conf") },
			"penstock gateway peer add makes",
		},
		"no whole file": {
			func(_ string, f map[string]string) {
				f["c.yaml"] = "listeners: [{name: v, mode: wireguard, wireguard: {config_file: wg0.conf}}]"
			},
			"wg0.conf; penstock gateway init makes",
		},
		"a peer without a key": {
			func(_ string, f map[string]string) { f["peers.conf"] = "[Peer]\n" },
			"peers.conf: line 1: this peer has no PublicKey",
		},
		"an address of another's": {func(_ string, f map[string]string) {
			f["peers.conf"] = strings.Replace(f["peers.conf"], ".2/32", ".3/32", 1)
		}, "both have 10.9.0.3/32"},
		"a whole file": {func(_ string, f map[string]string) {
			f["peers.conf"] = "[Interface]\nPrivateKey " +
				"= " + keyC + "\n"
		}, "write config_file: peers.conf"},
		"peers alone": {func(_ string, f map[string]string) {
			f["c.yaml"] = "listeners: [{name: v, mode: wireguard, wireguard: {config_file: peers.conf}}]"
		}, "wireguard.config_file: it has no PrivateKey"},
		"no port in a whole file": {func(_ string, f map[string]string) {
			f["c.yaml"] = "listeners: [{name: v, mode: wireguard, wireguard: {config_file: peers.conf}}]"
			f["peers.conf"] = "[Interface]\nPrivateKey = " + keyC
		}, "it has no ListenPort"},
		"too small an MTU in a file": {func(_ string, f map[string]string) {
			f["c.yaml"] = "listeners: [{name: v, mode: wireguard, wireguard: {config_file: peers.conf}}]"
			f["peers.conf"] = "[Interface]\nPrivateKey = " + keyC + "\nListenPort = 1\nMTU = 576"
		}, "MTU = 576 is outside"},
	} {
		t.Run(name, func(t *testing.T) {
			err := load(c.change)
			require.ErrorContains(t, err, c.says)
			assert.Contains(t, err.Error(), "c.yaml:")
		})
	}
}

func TestAPeerInsideAnothersAddressesIsWarnedOf(t *testing.T) {
	c, err := config.Parse([]byte("listeners: [{name: v, mode: wireguard, address: \":1\", wireguard: " +
		"{private_key: " + keyA + ", peers: [" +
		"{name: office, public_key: " + keyB + ", allowed_ips: [10.9.0.0/16]}, {name: phone, public_key: " +
		keyC + ", " +
		"allowed_ips: [10.9.0.2]}]}}]"))
	require.NoError(t, err)
	require.Len(t, c.Warnings(), 1)
	assert.Contains(t, c.Warnings()[0], "peer phone lie within those of office")
}

func TestTunnelsWithAddressesFromOnePoolAreWarnedOf(t *testing.T) {
	const tunnel = "{name: %s, mode: wireguard, address: \":%d\", wireguard: {private_key: " + keyA + ", pool: [%s]}}"
	for pool, warned := range map[string]bool{"10.9.0.128/25": true, "10.10.0.0/24": false} {
		first := fmt.Sprintf(tunnel, "a", 1, "10.9.0.0/24, \"fd00:9::/64\"")
		c, err := config.Parse([]byte("listeners: [" + first + ", " + fmt.Sprintf(tunnel, "b", 2, pool) + "]"))
		require.NoError(t, err)
		if !warned {
			assert.Empty(t, c.Warnings())
			continue
		}
		require.Len(t, c.Warnings(), 1)
		assert.Contains(t, c.Warnings()[0], "those of listeners[0] have their addresses from "+pool)
	}
}
