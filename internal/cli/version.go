package cli

import (
	_ "embed"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

// release is the version that the source is, or leads to. Packages, the image and the Makefile read the same file.
//
//go:embed VERSION
var release string

// version is set by make: -X github.com/penstock-net/penstock/internal/cli.version=1.2.3. It has the revision behind a
// + where the source is no release. Empty: go build made the program.
var version = ""

// unreleased ends the version of a program that only the revision tells from others.
const unreleased = "-devel"

// Build identifies a program.
type Build struct {
	Version  string // such as 1.2.3; 1.2.3-devel when neither the linker nor the module system named one
	Revision string // of the source; empty: unknown
	Modified bool   // the source differed from Revision
	Tags     string // of the build, with commas between them, but for such as take no function away; empty: none
}

// ReadBuild says what the linker and the module system noted of this program.
func ReadBuild() Build {
	b := Build{Version: version}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	if b.Version == "" {
		b.Version = strings.TrimSpace(release)
		if info.Main.Version != "v"+b.Version { // a commit that has no tag
			b.Version += unreleased
		}
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		case "-tags":
			b.Tags = s.Value
		}
	}
	return b
}

// String is the build as records of runs have it.
func (b Build) String() string { return b.versionLine("penstock") }

// versionLine tells the build of a program in one line.
func (b Build) versionLine(program string) string {
	s := program + " " + b.Version
	if b.Revision != "" {
		s += " " + b.Revision
		if b.Modified {
			s += " (modified)"
		}
	}
	s = fmt.Sprintf("%s %s %s/%s", s, runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if b.Tags != "" {
		s += " -tags " + b.Tags
	}
	return s
}

// Exact reports whether a Build's String stands for one source. That of a changed or unknown source does not.
func Exact(build string) bool {
	return !strings.Contains(build, "dirty") && !strings.Contains(build, " (modified)") &&
		!strings.Contains(build, unreleased+" go")
}

// VersionCommand prints the version of its program.
func VersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return printVersion(cmd) },
	}
}

// printVersion prints the version, and the build it is from where that says more.
func printVersion(cmd *cobra.Command) error {
	_, err := fmt.Fprintln(cmd.OutOrStdout(), ReadBuild().versionLine(cmd.Root().Name()))
	return err
}
