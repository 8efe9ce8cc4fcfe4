package cli

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
)

func TestOnlyInputErrorsAreTheUsers(t *testing.T) {
	root := &cobra.Command{Use: "x", SilenceErrors: true, SilenceUsage: true}
	for name, err := range map[string]error{
		"fail":  errors.New("disk full"),
		"input": fmt.Errorf("read: %w", BadInput(errors.New("no such key"))),
		"named": errors.New("proxy: ingress: listener \"a\": kernel: it is closed"),
	} {
		root.AddCommand(&cobra.Command{Use: name, RunE: func(*cobra.Command, []string) error { return err }})
	}
	for name, want := range map[string]int{"fail": ExitFail, "named": ExitFail, "input": ExitInput} {
		root.SetArgs([]string{name})
		var stderr bytes.Buffer
		assert.Equal(t, want, Run(t.Context(), root, &stderr), name)
		if name == "named" {
			assert.Equal(t, "x: listener \"a\": kernel: it is closed\n", stderr.String(), "without the packages in front")
		}
	}
}

func TestModelsAreHandedOn(t *testing.T) {
	root, sub := &cobra.Command{Use: "root"}, &cobra.Command{Use: "sub"}
	root.AddCommand(sub)
	assert.Empty(t, Models(sub))
	root.PersistentFlags().Var(&modelFlag{files: []string{"one=a", "two=b"}}, modelFlagName, "")
	assert.Equal(t, []string{"one=a", "two=b"}, Models(sub))
}

func TestABuildOfAChangedOrUnknownSourceIsNotExact(t *testing.T) {
	for said, b := range map[string]Build{
		"yes":     {Version: "v1.2.3"},
		"yes, of": {Version: "1.2.3-devel", Revision: "5806077"},
		"no":      {Version: "1.2.3-devel"},
		"no, mod": {Version: "1.2.3-devel", Revision: "5806077", Modified: true},
		"no, git": {Version: "v1.2.3-4-g5806077-dirty"},
		"no, go":  {Version: "v1.2.4-0.20260101000000-580607700000+dirty"},
	} {
		assert.Equal(t, said[0] == 'y', Exact(b.String()), b.String())
	}
	assert.Regexp(t, `^\d+\.\d+\.\d+-devel$`, ReadBuild().Version, "of a test")
}
