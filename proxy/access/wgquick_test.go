package access

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	keyA = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	keyB = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA="
	keyC = "CCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCA="
)

// interfaceFile is one as people have it for wg-quick.
const interfaceFile = `# my gateway
[Interface]
PrivateKey = ` + keyA + `
Address = 10.9.0.1/24, fd00:9::1/64
ListenPort=51820
MTU = 1380   # for the old link
DNS = 10.9.0.1
PostUp = iptables -A FORWARD -i %i -j ACCEPT

# phone
[Peer]
PublicKey = ` + keyB + `
PresharedKey = ` + keyC + `
allowedips = 10.9.0.2/32
AllowedIPs = fd00:9::2
PersistentKeepalive = 25

[Peer]
PublicKey = ` + keyC + `
AllowedIPs = 10.9.0.3/32, 192.168.7.1/24
Endpoint = 203.0.113.9:51820
PersistentKeepalive = off
`

func prefixList(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func key(t testing.TB, s string) Key {
	k, err := ParseKey(s)
	require.NoError(t, err)
	return k
}

func TestAWgQuickFileSaysWhatItSaysToWgQuick(t *testing.T) {
	f, err := ParseQuick(interfaceFile)
	require.NoError(t, err)
	assert.Equal(t, key(t, keyA), f.PrivateKey)
	assert.EqualValues(t, 51820, f.Port)
	assert.Equal(t, 1380, f.MTU)
	assert.Equal(t, prefixList("10.9.0.1/24", "fd00:9::1/64"), f.Addresses)
	assert.Equal(t, []Peer{
		{
			Name: "phone", PublicKey: key(t, keyB), Preshared: key(t, keyC),
			AllowedIPs: prefixList("10.9.0.2/32", "fd00:9::2/128"), Keepalive: 25 * time.Second,
		},
		{Name: keyC[:8], PublicKey: key(t, keyC), AllowedIPs: prefixList("10.9.0.3/32", "192.168.7.0/24")},
	}, f.Peers)
}

func TestPeersAreCalledWhatTheCommentsSay(t *testing.T) {
	peer := "PublicKey = " + keyA + "\n"
	other := "[Peer]\nPublicKey = " + keyB + "\n"
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"a name inside":              {"[Peer]\n# Name = phone\n" + peer, []string{"phone"}},
		"a name at the end":          {"[Peer]\n" + peer + "#name=Jane's phone\n", []string{"Jane's phone"}},
		"a name above":               {"# Name = phone\n[Peer]\n" + peer, []string{"phone"}},
		"words above":                {"# phone\n[Peer]\n" + peer, []string{"phone"}},
		"the words right above":      {"# all of us\n# phone\n[Peer]\n" + peer, []string{"phone"}},
		"words below":                {"[Peer]\n# phone\n" + peer, []string{"phone"}},
		"the name goes before words": {"# old\n[Peer]\n# Name = phone\n" + peer, []string{"phone"}},
		"a name between two is the second's": {
			"[Peer]\n" + peer + "# Name = tablet\n" + other,
			[]string{keyA[:8], "tablet"},
		},
		"and the first's before an empty line": {
			"[Peer]\n" + peer + "# Name = phone\n\n" + other,
			[]string{"phone", keyB[:8]},
		},
		"words further down are no name": {
			"[Peer]\n" + peer + "# since May\n\n" + other,
			[]string{keyA[:8], keyB[:8]},
		},
		"words behind an empty line are none":   {"# a file\n\n[Peer]\n" + peer, []string{keyA[:8]}},
		"a key that is switched off is no name": {"[Peer]\n# Endpoint = 192.0.2.1:1\n" + peer, []string{keyA[:8]}},
		"too long a name is none": {
			"[Peer]\n# Name = " + strings.Repeat("x", 65) + "\n" + peer,
			[]string{keyA[:8]},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := ParseQuick(c.text)
			require.NoError(t, err)
			var got []string
			for _, p := range f.Peers {
				got = append(got, p.Name)
			}
			assert.Equal(t, c.want, got)
		})
	}
}

func TestMistakesInAWgQuickFileAreToldWithTheirLine(t *testing.T) {
	for text, want := range map[string]string{
		"[Peer]\n\nAllowedIPs = 10.0.0.1/32\n":         "line 1: this peer has no PublicKey",
		"[Peer]\nPublicKey = abc\n":                    "line 2: publickey: this is no key",
		"[Peer]\nAllowedIPs = 10.9.0/32\n":             `line 2: allowedips: "10.9.0/32" is neither`,
		"[Peer]\nPersistentKeepalive = 70000\n":        `line 2: persistentkeepalive: "70000"`,
		"[Peer]\nColour = blue\n":                      "line 2: colour: no such key in [Peer]",
		"[Interface]\nPublicKey = x\n":                 "line 2: publickey: no such key in [Interface]",
		"[Interface]\nListenPort = 70000\n":            `"70000" is no port`,
		"PublicKey = " + keyA + "\n":                   "line 1: publickey stands in no section",
		"[Peers]\n":                                    "line 1: [peers] is no section",
		"[Peer]\nPublicKey\n":                          "line 2: ",
		"[Interface]\nMTU = many\n":                    `"many" is no number of bytes`,
		"[Interface]\nAddress = ::ffff:10.0.0.1/120\n": "line 2: address",
	} {
		_, err := ParseQuick(text)
		assert.ErrorContains(t, err, want, "%q", text)
	}
}

func TestASectionIsTakenOutAndTheRestStaysAsItWas(t *testing.T) {
	rest, found, err := RemoveSection(interfaceFile, "phone")
	require.NoError(t, err)
	assert.True(t, found)
	before, _, _ := strings.Cut(interfaceFile, "# phone")
	_, after, _ := strings.Cut(interfaceFile, "Keepalive = 25\n\n")
	assert.Equal(t, before+after, rest)
	_, found, err = RemoveSection(interfaceFile, "tablet")
	require.NoError(t, err)
	assert.False(t, found)
}

func TestWhatIsAddedIsReadAgainAndCanBeRemoved(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) (k Key) {
			copy(k[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, label))
			return k
		}
		p := Peer{
			Name:      rapid.StringMatching(`[a-zA-Z0-9_-]{1,64}`).Draw(t, "name"),
			PublicKey: draw("key"), Preshared: draw("preshared"),
			AllowedIPs: prefixList("10.9.0.7/32", "fd00::7/128"), Keepalive: time.Duration(rapid.IntRange(0,
				65535).Draw(t,
				"keepalive")) * time.Second,
		}
		before := rapid.SampledFrom([]string{"", "# peers\n", interfaceFile, strings.TrimSpace(interfaceFile)}).Draw(t,
			"before")
		had, err := ParseQuick(before)
		require.NoError(t, err)
		text := AddSection(before, p)
		f, err := ParseQuick(text)
		require.NoError(t, err)
		assert.Equal(t, append(had.Peers, p), f.Peers)
		rest, found, err := RemoveSection(text, p.Name)
		require.NoError(t, err)
		assert.True(t, found)
		assert.Equal(t, strings.TrimSpace(before), strings.TrimSpace(rest))
	})
}

func FuzzParseQuick(f *testing.F) {
	f.Add(interfaceFile)
	f.Add("# a\n[peer]\n#Name=b\nPublicKey=" + keyA + "\n\n# c\n[Peer]")
	f.Fuzz(func(t *testing.T, text string) {
		file, err := ParseQuick(text)
		if err != nil {
			return
		}
		last := 0
		require.Len(t, file.spans, len(file.Peers))
		for i, p := range file.Peers {
			assert.NotEmpty(t, p.Name)
			assert.NotContains(t, p.Name, "\n")
			assert.LessOrEqual(t, last, file.spans[i].from)
			assert.Less(t, file.spans[i].from, file.spans[i].to)
			last = file.spans[i].to
		}
		for _, p := range file.Peers {
			rest, found, err := RemoveSection(text, p.Name)
			require.NoError(t, err)
			assert.True(t, found)
			less, err := ParseQuick(rest)
			require.NoError(t, err, "%q", rest)
			assert.Len(t, less.Peers, len(file.Peers)-1)
		}
	})
}
