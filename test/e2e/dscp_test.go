//go:build linux

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// marks has a node mark the TCP packets that it sends, and count those that come by their mark.
type marks struct {
	t    *testing.T
	node *netlab.Node
}

// mark begins that; sends empty: the packets stay as they are.
func mark(t *testing.T, node *netlab.Node, sends, counts string) marks {
	t.Helper()
	m := marks{t, node}
	set := ""
	if sends != "" {
		set = fmt.Sprintf("meta l4proto tcp ip dscp set %[1]s; meta l4proto tcp ip6 dscp set %[1]s;", sends)
	}
	m.nft(fmt.Sprintf(`table inet marks {
		counter marked {}
		counter others {}
		chain out { type filter hook output priority mangle; %s }
		chain in {
			type filter hook input priority filter;
			meta l4proto != tcp accept
			ip dscp %[2]s counter name marked accept
			ip6 dscp %[2]s counter name marked accept
			counter name others
		}
	}`, set, counts), "-f", "-")
	return m
}

func (m marks) nft(input string, args ...string) string {
	m.t.Helper()
	cmd := m.node.Command(context.Background(), "nft", args...)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &out
	require.NoError(m.t, cmd.Run(), "%s", &out)
	return out.String()
}

var packetsCounted = regexp.MustCompile(`packets (\d+)`)

// count is how many packets have come with the mark that is counted, and how many others.
func (m marks) count() (marked, others int) {
	m.t.Helper()
	for name, n := range map[string]*int{"marked": &marked, "others": &others} {
		found := packetsCounted.FindStringSubmatch(m.nft("", "list", "counter", "inet", "marks", name))
		require.Len(m.t, found, 2)
		*n, _ = strconv.Atoi(found[1])
	}
	return marked, others
}

const (
	some = 16 // packets at least are those of an exchange, each of up to 64 KiB
	few  = 4  // packets at most leave between the proxy's answer and the mark
)

// exchange has a connection bring bytes both ways, and returns what had come to the client before, by its mark.
func (w way) exchange(s *scene, came marks) (marked, others int) {
	s.t.Helper()
	client, server := w.pair(s)
	marked, others = came.count()
	const size = 2 * megabyte
	go func() {
		_, _ = io.Copy(server, io.LimitReader(server, size))
		_ = server.CloseWrite()
	}()
	go func() { _, _ = io.Copy(struct{ io.Writer }{client}, io.LimitReader(random(1, size), size)) }()
	n, err := io.Copy(io.Discard, client)
	require.NoError(s.t, err)
	require.EqualValues(s.t, size, n)
	return marked, others
}

func TestARuleKeepsTheMarksOfBothSides(t *testing.T) {
	need.Programs(t, "nft")
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			s := w.open(t, "rules: [{name: keep, match: {ports: [8080]}, dscp: keep}]\n")
			back := "af41"
			if !present.privileged() && !w.v6 {
				back = "ef" // the kernel tells the mark of an IPv4 server to programs in eBPF alone
			}
			client, server := mark(t, s.Client, "ef", back), mark(t, s.Server, "af41", "ef")
			_, before := w.exchange(s, client)

			marked, others := server.count()
			assert.Greater(t, marked, some)
			assert.Zero(t, others, "from the SYN on")
			marked, others = client.count()
			assert.Greater(t, marked, some)
			assert.LessOrEqual(t, others, before+few, "but for the handshakes, and what the proxy itself says")
		})
	}
}

func TestAClientIsAnsweredWithItsOwnMarkWhereTheServerSetsNone(t *testing.T) {
	need.Programs(t, "nft")
	for _, name := range []string{"forward", "socks5 on the mixed port over IPv6"} {
		w := named(name)
		t.Run(w.name, func(t *testing.T) {
			s := w.open(t, "defaults: {dscp: keep}\n")
			client := mark(t, s.Client, "ef", "ef")
			_, before := w.exchange(s, client)
			marked, others := client.count()
			assert.Greater(t, marked, some)
			assert.LessOrEqual(t, others, before+few)
		})
	}
}

func TestMarksAreNotCarriedUnlessARuleAsks(t *testing.T) {
	need.Programs(t, "nft")
	for name, extra := range map[string]string{
		"by default":     "",
		"by a rule":      "defaults: {dscp: keep}\nrules: [{name: off, match: {}, dscp: off}]\n",
		"by its name":    "rules: [{name: keep, match: {server_name: [example.com]}, dscp: keep}]\n",
		"by its address": "rules: [{name: keep, match: {destination: [192.0.2.0/24]}, dscp: keep}]\n",
	} {
		t.Run(name, func(t *testing.T) {
			w := named("socks5")
			s := w.open(t, extra)
			client, server := mark(t, s.Client, "ef", "af41"), mark(t, s.Server, "af41", "ef")
			w.exchange(s, client)
			marked, _ := server.count()
			assert.Zero(t, marked)
			marked, _ = client.count()
			assert.Zero(t, marked)
		})
	}
}
