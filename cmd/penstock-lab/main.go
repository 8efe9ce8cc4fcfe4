// Command penstock-lab measures Penstock: in virtual time, and over emulated links
// between network namespaces with the program penstock at the edge.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/edge"
)

func main() {
	os.Exit(runCommandLine(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// runCommandLine runs one command line and returns its exit code.
func runCommandLine(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return cli.Run(ctx, root, stderr)
}

// packaging are commands that only builds for packages have.
var packaging []*cobra.Command

func rootCommand() *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "penstock-lab",
		Short: "Measure congestion control on emulated links",
		Long: `Penstock-lab compares congestion-control algorithms: in virtual time, which takes
seconds and no privileges, and over real sockets and emulated links, with the
program penstock at the edge.

Exit codes:
  0  it worked
  1  something failed while running, or an expectation does not hold
  2  the command line is wrong`,
	}, nil)
	root.PersistentFlags().String(proxyFlag, "",
		"the program that is the proxy of real runs; default: penstock beside this program, or else in $PATH")
	root.AddCommand(
		demoCommand(),
		simCommand(),
		benchCommand(),
		mdiCommand(),
		nativeCommand(),
		reportCommand(),
		shellCommand(),
		traceCommand(),
		cli.VersionCommand(),
	)
	root.AddCommand(packaging...)
	return root
}

// proxyFlag names the program that is the proxy of real runs.
const proxyFlag = "penstock"

// findProxy finds the program that is the proxy of real runs, and gives it the models of the command.
func (s *session) findProxy() error {
	named, err := s.cmd.Flags().GetString(proxyFlag)
	if err != nil {
		return err
	}
	path, err := edge.Find(named)
	if err != nil {
		return fmt.Errorf("%w; build it by make build, or name it by --%s", err, proxyFlag)
	}
	said, err := exec.CommandContext(s.cmd.Context(), path, "version").Output()
	if err != nil {
		return fmt.Errorf("%s version: %w; name another program by --%s", path, err, proxyFlag)
	}
	s.env.Executable = path
	for _, model := range cli.Models(s.cmd) {
		s.env.Args = append(s.env.Args, "--mdi-model", model)
	}
	own, other := cli.ReadBuild().String(), strings.TrimSpace(string(said))
	if other != own {
		s.proxy = other
		fmt.Fprintf(s.cmd.ErrOrStderr(), "note: the proxy is another build: %s is %s, this is %s\n", path, other, own)
	}
	return nil
}
