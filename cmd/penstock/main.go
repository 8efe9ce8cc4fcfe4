// Command penstock is a transparent TCP proxy that decides, with a
// congestion-control algorithm of its own choosing, how much each connection
// through it may have in flight. This package only wires: flags, configuration
// and signals; the work is done below it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
)

// Exit codes.
const (
	exitOK     = 0
	exitFail   = 1  // something went wrong while running
	exitInput  = 2  // the command line is wrong; Go's crashes end with it, too
	exitConfig = 78 // the configuration is wrong (EX_CONFIG of sysexits.h)
)

// started is when the process began. Time enters the program here and in now;
// everything below is handed a Clock.
var started = time.Now()

// now reads the monotonic clock: the time since the process started, plus one
// second so that it is never zero, which means "unset".
func now() cc.Time { return cc.Time(time.Since(started) + time.Second) }

// inputError is a mistake in what the user wrote, as opposed to something that
// failed: it ends the process with exit code 2.
type inputError struct{ error }

func (e inputError) Unwrap() error { return e.error }

// badInput marks err as the user's to fix; nil stays nil.
func badInput(err error) error {
	if err == nil {
		return nil
	}
	return inputError{err}
}

func main() {
	os.Exit(execute(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// execute runs one command line and returns its exit code.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return finish(ctx, root, stderr)
}

// finish runs root, reports its error once and tells whose fault it was.
func finish(ctx context.Context, root *cobra.Command, stderr io.Writer) int {
	began := markBegin(root)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	stderr = complaints(stderr)
	fmt.Fprintf(stderr, "penstock: %s\n", config.Printable(err.Error()))
	var input inputError
	var mistake *config.Error
	switch {
	case !*began, errors.As(err, &input):
	case errors.As(err, &mistake):
		for _, line := range mistake.Rest() {
			fmt.Fprintln(stderr, line)
		}
		return exitConfig
	default:
		return exitFail
	}
	if !*began {
		fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", cmd.CommandPath())
	}
	return exitInput
}

// markBegin notes when a command's own code begins: an error before that is
// about the command line (an unknown command or flag, a wrong argument).
func markBegin(cmd *cobra.Command) *bool {
	began := new(bool)
	var wrap func(*cobra.Command)
	wrap = func(c *cobra.Command) {
		if run := c.RunE; run != nil {
			c.RunE = func(c *cobra.Command, args []string) error {
				*began = true
				return run(c, args)
			}
		}
		for _, sub := range c.Commands() {
			wrap(sub)
		}
	}
	wrap(cmd)
	return began
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "penstock",
		Short: "A TCP proxy that keeps the queues of the path empty",
		Long: `Penstock splits TCP connections and decides, with a congestion-control
algorithm of your choice, how much each direction may have in flight. It needs
no kernel module and nothing at the far ends.

Exit codes:
  0  it worked
  1  something failed while running
  2  the command line is wrong
  78 the configuration is wrong`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       readBuild().String(),
		Args:          knownCommand,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SuggestionsMinimumDistance = 2
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.PersistentFlags().Var(new(mdiModelFlag), "mdi-model", "add the model in FILE to mdi's choices by NAME, for the flags behind this one; repeat for several")
	root.AddCommand(
		runCommand(),
		checkCommand(),
		reloadCommand(),
		doctorCommand(),
		rulesCommand(),
		gatewayCommand(),
		simCommand(),
		benchCommand(),
		demoCommand(),
		algorithmsCommand(),
		mdiCommand(),
		schemaCommand(),
		versionCommand(),
	)
	return root
}

// knownCommand refuses a word that is no command, with those that were perhaps meant.
func knownCommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q for %q", args[0], c.CommandPath())
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(near, " or "))
	}
	return err
}

// flagError says in words what the libraries say of a number or a time that is none.
func flagError(err error) error {
	var wrong *pflag.InvalidValueError
	if !errors.As(err, &wrong) {
		return err
	}
	var want string
	switch kind := wrong.GetFlag().Value.Type(); {
	case strings.HasPrefix(kind, "duration"):
		want = "a time with its unit, such as 10s or 1h30m"
	case strings.HasPrefix(kind, "uint"):
		want = "a whole number, not below 0"
	case strings.HasPrefix(kind, "int"):
		want = "a whole number"
	case strings.HasPrefix(kind, "float"):
		want = "a number"
	default:
		return err
	}
	return fmt.Errorf("--%s: %q is not %s", wrong.GetFlag().Name, wrong.GetValue(), want)
}
