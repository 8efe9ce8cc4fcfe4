// Command penstock is a transparent TCP proxy that decides, with a
// congestion-control algorithm of its own choosing, how much each connection
// through it may have in flight. This package only wires: flags, configuration
// and signals; the work is done below it.
package main

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/logqueue"
)

// started is when the process began. Time enters the program here and in now;
// everything below is handed a Clock.
var started = time.Now()

// monotonicTime reads the monotonic clock: the time since the process started, plus one
// second so that it is never zero, which means "unset".
func monotonicTime() cc.Time { return cc.Time(time.Since(started) + time.Second) }

// main hands over to runCommandLine, which tests call as well.
func main() {
	if restartAsOrphan() {
		os.Exit(cli.ExitOK)
	}
	forbidCoreDumps()
	os.Exit(runCommandLine(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// runCommandLine runs one command line and returns its exit code. The log is written at once until run detaches it,
// and what waits is flushed at the end.
func runCommandLine(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	log := &logqueue.Writer{To: stderr}
	defer log.Flush()
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(log)
	return cli.Run(ctx, root, errorWriter(log))
}

// inLab are commands of penstock-lab. A user who gives one to penstock learns from the error where it is.
var inLab = map[string]string{
	"demo": "penstock-lab", "bench": "penstock-lab", "sim": "penstock-lab", "mdi": "penstock-lab",
}

// packaging are the commands of builds with the tag packaging.
var packaging []*cobra.Command

// rootCommand returns penstock with all its commands.
func rootCommand() *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "penstock",
		Short: "A TCP proxy that keeps the queues of the path empty",
		Long: `Penstock splits TCP connections and decides, with a congestion-control
algorithm of your choice, how much each direction may have in flight. It needs
no kernel module and nothing at the far ends. penstock-lab measures it.

Exit codes:
  0  it worked
  1  something failed while running
  2  the command line is wrong
  78 the configuration is wrong`,
	}, inLab)
	root.AddCommand(
		runCommand(),
		checkCommand(),
		reloadCommand(),
		readyCommand(),
		doctorCommand(),
		topCommand(),
		fleetCommand(),
		compareCommand(),
		proveCommand(),
		rulesCommand(),
		gatewayCommand(),
		algorithmsCommand(),
		schemaCommand(),
		cli.VersionCommand(),
	)
	root.AddCommand(packaging...)
	return root
}

// forbidCoreDumps keeps the secrets in memory, such as keys and passwords, out of core dumps on the disk. The hard
// limit stays, so that prlimit(1) can allow a core all the same. PR_SET_DUMPABLE would do more, but an unprivileged
// process could not open its /proc/self then.
func forbidCoreDumps() {
	var core unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &core) == nil {
		core.Cur = 0
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &core) // a lower soft limit is always allowed
	}
}
