package layout

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The checks above pass on a tidy tree, so these show that they can fail.

func TestCheckFindsWhatTheTableForbids(t *testing.T) {
	table := []rule{
		{packages: "low", banned: []string{"os/...", "math/rand"}},
		{packages: "mid/...", module: []string{"low"}},
		{packages: "cmd/...", module: []string{"..."}},
	}
	homes := map[string][]string{"example.org/heavy/...": {"mid/x"}}
	for name, c := range map[string]struct {
		unit unit
		want []string
	}{
		"an allowed import passes":      {unit{path: "mid/x", imports: []string{module + "/low", "os"}}, nil},
		"a heavy import passes at home": {unit{path: "mid/x", imports: []string{"example.org/heavy/part"}}, nil},
		"an upward import fails": {
			unit{path: "low", imports: []string{module + "/mid/x"}},
			[]string{"low may not import mid/x"},
		},
		"a sideways import fails": {
			unit{path: "mid/x", imports: []string{module + "/mid/y"}},
			[]string{"mid/x may not import mid/y"},
		},
		"a banned import fails": {
			unit{path: "low", imports: []string{"os"}},
			[]string{"low may not import os"},
		},
		"what is below a banned import fails": {
			unit{path: "low", imports: []string{"os/exec"}},
			[]string{"low may not import os/exec"},
		},
		"a ban of v1 leaves v2 alone":          {unit{path: "low", imports: []string{"math/rand/v2"}}, nil},
		"a name that only begins alike passes": {unit{path: "low", imports: []string{"osmosis"}}, nil},
		"a heavy import elsewhere fails": {
			unit{path: "mid/y", imports: []string{"example.org/heavy"}},
			[]string{"mid/y imports example.org/heavy, which stays in mid/x"},
		},
		"a package without a row fails": {unit{path: "new"}, []string{"new is in no row of the import table"}},
		"a test that imports a lab fails": {
			unit{path: "low", tests: []string{module + "/internal/netlab"}},
			[]string{"low's tests import internal/netlab, which only cmd, test and the lab may"},
		},
		"a command's test may use the lab": {unit{path: "cmd/x", tests: []string{module + "/internal/netlab"}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, c.want, check(c.unit, table, homes))
		})
	}
}

func TestImpuritiesFindsForbiddenCalls(t *testing.T) {
	pure := purity{clock: true, globalRand: true, goroutines: true, shared: true}
	for name, c := range map[string]struct {
		src  string
		want string // part of the only complaint; empty: none
	}{
		"durations pass":              {`import "time"; var d = time.Second`, ""},
		"a seeded source passes":      {`import "math/rand/v2"; var r = rand.New(rand.NewPCG(1, 2))`, ""},
		"a method named Now passes":   {`var c clock; var n = c.Now(); type clock struct{}; func (clock) Now() int { return 0 }`, ""},
		"time.Now fails":              {`import "time"; var n = time.Now()`, "time.Now"},
		"a reference to it fails too": {`import "time"; var n = time.Now`, "time.Now"},
		"an alias does not hide it":   {`import t "time"; func f() { t.Sleep(1) }`, "time.Sleep"},
		"global randomness fails":     {`import "math/rand/v2"; var n = rand.IntN(3)`, "rand.IntN"},
		"v1 counts as well":           {`import "math/rand"; var n = rand.Intn(3)`, "rand.Intn"},
		"a goroutine fails":           {`func f() { go f() }`, "goroutine"},
		"a channel fails":             {`var c chan int`, "channel"},
		"a value built once passes":   {`import "sync"; var f = sync.OnceValue(func() int { return 1 })`, ""},
		"a mutex fails":               {`import "sync"; var m sync.Mutex`, "sync.Mutex"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := impurities("x.go", "package x; "+c.src, pure)
			require.NoError(t, err)
			if c.want == "" {
				assert.Empty(t, got)
				return
			}
			require.Len(t, got, 1)
			assert.Contains(t, got[0], c.want)
		})
	}
}
