// Package layout checks that the tree is the one docs/architecture.md draws:
// which directories there are, which package may import which, and which calls
// are kept out of the pure part. A linter checks some of it too; this needs
// nothing but Go.
package layout

import (
	"fmt"
	"slices"
	"strings"
)

const module = "github.com/penstock-net/penstock"

// directories are all there are at the top level; hidden ones aside.
var directories = []string{"agents", "alcc", "cc", "cmd", "deploy", "docs", "internal", "proxy", "telemetry", "test"}

// files are all that may stand at the top level.
var files = []string{
	".gitignore", ".golangci.yml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "SECURITY.md",
	"Makefile",
	"README.md", "go.mod", "go.sum",
}

// ignored are what builds and measurements leave behind (see .gitignore), and
// the .git file of a worktree.
var ignored = []string{".git", "bin", "dist", "penstock", "penstock-lab", "results"}

// rule says what the packages that match it may import.
type rule struct {
	packages string   // below the module: "cc", or "proxy/datapath/..." for a folder and all below it
	module   []string // packages of this module they may import, in the same notation; others are forbidden
	banned   []string // packages of the standard library or of others they may not import, in the same notation
}

// impure is what has no place where time is an argument and nothing waits.
var impure = []string{
	"context", "io/fs", "log/...", "math/rand", "net/...", "os/...", "syscall", "golang.org/x/sys/...",
}

// active has no place where a configuration is read, which opens nothing but files.
var active = []string{"context", "net/http/...", "os/exec", "os/signal", "golang.org/x/sys/..."}

// table is the import table; the first match counts.
var table = []rule{
	{packages: "cc", banned: append([]string{"sync/atomic"}, impure...)}, // and sync, but for sharedTable
	// sync/atomic: what is read before a group's lock is held
	{packages: "cc/flow", module: []string{"cc"}, banned: impure},
	{packages: "cc/ccp", module: []string{"cc"}, banned: impure}, // sync: messages come on another goroutine
	{packages: "cc/sim", module: []string{"cc", "cc/flow"}, banned: append([]string{"sync/..."}, impure...)},
	{packages: "alcc", module: []string{
		"alcc/frame", "cc", "cc/ccp", "cc/flow", "proxy/agent", "proxy/datapath", "proxy/datapath/kernel",
	}},
	{packages: "alcc/frame", module: []string{"cc"}},
	{packages: "alcc/relay", module: []string{"alcc", "proxy/destination"}},
	{packages: "alcc/mobile", module: []string{"alcc", "alcc/relay", "cc", "proxy/greeting"}},
	{packages: "proxy/nldump"},
	{packages: "proxy/takeover"},
	{packages: "proxy/fleet", module: []string{"cc", "cc/flow", "proxy/config/check", "proxy/fleet/division"}},
	{packages: "proxy/fleet/division", module: []string{"cc"}, banned: impure},
	{packages: "proxy/happyeyeballs"},
	{packages: "proxy/capture", module: []string{"proxy/nldump"}},
	{packages: "proxy/linkstat", module: []string{"cc", "proxy/config/check", "proxy/nldump"}},
	{packages: "proxy/agent", module: []string{
		"cc", "cc/ccp", "proxy/access", "proxy/config/check", "proxy/datapath", "proxy/happyeyeballs",
	}},
	{packages: "proxy/access", module: []string{"proxy/config/check"}, banned: active},
	{
		packages: "proxy/config", module: []string{
			"cc", "cc/ccp", "cc/flow", "proxy/access", "proxy/agent", "proxy/config/check", "proxy/fleet", "proxy/linkstat",
			"proxy/policy",
		},
		banned: active,
	},
	{packages: "proxy/config/check", banned: active},
	{packages: "proxy/config/configtest", banned: active},
	{packages: "proxy/destination", banned: active},
	{packages: "proxy/policy", module: []string{"cc", "cc/flow", "proxy/config/check", "proxy/destination"}},
	{packages: "proxy/datapath", module: []string{"cc", "cc/flow"}},
	{packages: "proxy/datapath/datapathtest", module: []string{"cc", "cc/flow", "proxy/datapath/...", "internal/need"}},
	{packages: "proxy/datapath/...", module: []string{"cc", "cc/flow", "proxy/datapath/...", "proxy/happyeyeballs"}},
	{packages: "proxy/greeting", banned: impure},
	{packages: "proxy/ingress", module: []string{
		"cc", "cc/flow", "proxy/access", "proxy/config/check", "proxy/datapath/...", "proxy/greeting",
	}},
	{packages: "proxy/tunnel", module: []string{"cc", "cc/flow", "proxy/access", "proxy/datapath", "proxy/ingress"}},
	{packages: "proxy/tunnel/kernelspace", module: []string{
		"cc", "cc/flow", "proxy/access", "proxy/capture", "proxy/datapath", "proxy/ingress", "proxy/nldump",
		"proxy/tunnel",
	}},
	{packages: "proxy/tunnel/userspace", module: []string{
		"cc", "cc/flow", "proxy/access", "proxy/datapath/...", "proxy/happyeyeballs", "proxy/ingress", "proxy/tunnel",
	}},
	{packages: "proxy", module: []string{
		"cc", "cc/ccp", "cc/flow", "proxy/access", "proxy/agent", "proxy/capture", "proxy/config",
		"proxy/destination", "proxy/policy", "proxy/datapath/...", "proxy/ingress", "proxy/takeover",
		"proxy/tunnel/...",
	}},
	{packages: "telemetry", module: []string{
		"cc", "cc/flow", "proxy", "proxy/agent", "proxy/datapath", "proxy/linkstat", "proxy/policy",
		"telemetry/compare", "telemetry/page",
	}},
	{packages: "telemetry/compare", banned: impure},
	{packages: "telemetry/otlp"},
	{packages: "telemetry/page", module: []string{"cc", "cc/flow", "proxy"}},
	{packages: "internal/need"},
	{packages: "internal/netlab", module: []string{"cc", "cc/flow", "cc/sim", "proxy/datapath/quic"}},
	{packages: "internal/caps"},
	{packages: "internal/certs"},
	{packages: "internal/wgclient"},
	{packages: "internal/logqueue"},
	{packages: "internal/cli/clitest", module: []string{"internal/need"}},
	{packages: "internal/cli", module: []string{"cc", "proxy/config"}},
	{packages: "internal/doctor", module: []string{"cc", "proxy/...", "internal/caps"}},
	{packages: "internal/lab/...", module: []string{
		"cc", "cc/ccp", "cc/flow", "cc/sim", "proxy/...", "telemetry/...", "internal/...",
	}},
	{packages: "cmd/penstock", module: []string{
		"cc", "cc/ccp", "cc/flow", "proxy/...", "telemetry/...", "internal/caps", "internal/cli", "internal/doctor",
		"internal/logqueue",
	}},
	{packages: "cmd/penstock-lab", module: []string{
		"alcc", "cc", "cc/ccp", "cc/flow", "cc/sim", "proxy/...", "telemetry/...", "internal/...",
	}},
	{packages: "cmd/penstock-relay", module: []string{"alcc/relay"}},
	{packages: "test/...", module: []string{"..."}},
	{packages: "agents/...", module: []string{"cc/ccp", "agents/..."}},
	{packages: "deploy"},
}

// sharedTable is the one file of cc that may import sync, for sync.OnceValue
// alone: Sprout's forecast table is large, the same for every flow, and never
// written once it is built.
const sharedTable = "cc/sprout_table.go"

// homes names the only places that may import a heavy dependency. Tests may
// import any.
var homes = map[string][]string{
	"charm.land/...":                   {"cmd/..."},
	"kernel.org/...":                   {"internal/caps"},
	"github.com/spf13/...":             {"cmd/...", "internal/cli"},
	"github.com/prometheus/...":        {"telemetry", "telemetry/otlp", "internal/lab/edge"},
	"github.com/coreos/go-systemd/...": {"cmd/..."},
	"github.com/goccy/go-yaml/...":     {"proxy/config", "cmd/...", "internal/lab/recipe"},
	"github.com/expr-lang/expr/...":    {"internal/lab/recipe"},
	"github.com/google/nftables/...":   {"proxy/capture", "internal/netlab"},
	"github.com/vishvananda/...": {
		"proxy/capture", "proxy/datapath/hold", "proxy/ingress", "proxy/linkstat", "proxy/nldump",
		"proxy/tunnel/kernelspace", "internal/doctor", "internal/netlab", "internal/lab/stage",
	},
	"github.com/pires/go-proxyproto/...": {"proxy", "proxy/ingress"},
	"golang.org/x/crypto/...":            {"proxy/policy"},
	"gvisor.dev/...":                     {"proxy/datapath/netstack", "proxy/tunnel/userspace", "internal/netlab"},
	"golang.zx2c4.com/...": {
		"proxy/tunnel/userspace", "proxy/tunnel/kernelspace", "internal/netlab", "internal/wgclient",
	},
	"github.com/quic-go/...": {
		"proxy/datapath/quic", "proxy/tunnel/userspace", "internal/netlab", "internal/lab/stage",
	},
	"github.com/yosida95/...":  {"proxy/tunnel/userspace", "internal/netlab"},
	"github.com/hashicorp/...": {"proxy/fleet"},
	"gonum.org/v1/plot/...":    {"internal/lab/..."},
	"gonum.org/v1/gonum/...":   {"cc"},
}

// upper are the packages that stand above all others, and users those that may
// use them.
var (
	upper = []string{"cmd/...", "internal/netlab", "internal/lab/..."}
	users = []string{"cmd/...", "internal/lab/...", "test/..."}
)

// unit is one package with what it imports directly.
type unit struct {
	path    string   // below the module
	imports []string // of its code
	tests   []string // of its tests
}

// matches reports whether path is what pattern means: itself, or for "x/..."
// itself and everything below.
func matches(pattern, path string) bool {
	prefix, below := strings.CutSuffix(pattern, "...")
	if !below {
		return pattern == path
	}
	return strings.HasPrefix(path+"/", prefix)
}

func matchesAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, path) })
}

// check returns what is wrong with u, one sentence each.
func check(u unit, table []rule, homes map[string][]string) []string {
	i := slices.IndexFunc(table, func(r rule) bool { return matches(r.packages, u.path) })
	if i < 0 {
		return []string{fmt.Sprintf("%s is in no row of the import table", u.path)}
	}
	var wrong []string
	for _, imp := range u.imports {
		if complaint := table[i].complaint(imp); complaint != "" {
			wrong = append(wrong, u.path+" "+complaint)
		}
		for heavy, at := range homes {
			if matches(heavy, imp) && !matchesAny(at, u.path) {
				wrong = append(wrong, fmt.Sprintf("%s imports %s, which stays in %s", u.path, imp,
					strings.Join(at, " and ")))
			}
		}
	}
	for _, imp := range u.tests {
		own, ours := strings.CutPrefix(imp, module+"/")
		upward := ours && matchesAny(upper, own)
		if upward && own != u.path && !matchesAny(users, u.path) {
			wrong = append(wrong, fmt.Sprintf("%s's tests import %s, which only cmd, test and the lab may", u.path,
				own))
		}
	}
	return wrong
}

// complaint says why a package under r may not import imp; empty: it may.
func (r rule) complaint(imp string) string {
	if own, ours := strings.CutPrefix(imp, module+"/"); ours {
		if !matchesAny(r.module, own) {
			return "may not import " + own
		}
		return ""
	}
	if matchesAny(r.banned, imp) && imp != "net/netip" { // which is values alone
		return "may not import " + imp
	}
	return ""
}
