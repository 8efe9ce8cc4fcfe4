package need

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
)

// ended is a test that notes how it was ended.
type ended struct {
	testing.TB
	how string
}

func (e *ended) Helper()               {}
func (e *ended) Fatalf(string, ...any) { e.how += "failed" }
func (e *ended) Skipf(string, ...any)  { e.how += "skipped" }

func TestWhatIsRequiredIsNotSkipped(t *testing.T) {
	missing := errors.New("refused")
	for value, want := range map[string]struct {
		first string
		code  int
	}{
		"":                 {"skipped", 0},
		"elsewhere":        {"skipped", 0},
		"namespaces":       {"failed", 1},
		"other,namespaces": {"failed", 1},
	} {
		t.Setenv(Variable, value)
		e := &ended{}
		Namespaces(e, missing)
		assert.Equal(t, want.first, e.how[:len(want.first)], value)
		assert.Equal(t, want.code, NoNamespaces(missing), value)
	}
}
