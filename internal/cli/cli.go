// Package cli is what the commands of Penstock's programs have in common: exit codes,
// errors, the version and models of the algorithm mdi.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
)

// Exit codes.
const (
	ExitOK     = 0
	ExitFail   = 1  // something went wrong while running
	ExitInput  = 2  // the command line is wrong; Go's crashes end with it, too
	ExitConfig = 78 // the configuration is wrong (EX_CONFIG of sysexits.h)
)

// inputError is a mistake in what the user wrote, as opposed to something that
// failed: it ends the process with ExitInput.
type inputError struct{ error }

// Unwrap is for errors.Is and errors.As.
func (e inputError) Unwrap() error { return e.error }

// BadInput marks err as the user's to fix; nil stays nil.
func BadInput(err error) error {
	if err == nil {
		return nil
	}
	return inputError{err}
}

// Status is the exit code of a program that a command ran for the user, and its own. Nothing is printed.
type Status int

// Error implements error.
func (s Status) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// Root completes the command of a program: version, models, and errors that name the
// cure. elsewhere tells of commands that another program has, by name.
func Root(root *cobra.Command, elsewhere map[string]string) *cobra.Command {
	root.SilenceUsage, root.SilenceErrors = true, true
	root.Args = func(c *cobra.Command, args []string) error { return knownCommand(c, args, elsewhere) }
	// Not cobra's own: its template has the linker keep every method of every type.
	version := root.Flags().BoolP("version", "v", false, "print the version")
	root.RunE = func(c *cobra.Command, _ []string) error {
		if *version {
			return printVersion(c)
		}
		return c.Help()
	}
	root.SetFlagErrorFunc(flagError)
	root.PersistentFlags().Var(new(modelFlag), modelFlagName,
		"add the model in FILE to mdi's choices by NAME, for the flags behind this one; repeat for several")
	return root
}

// packages are those of the module in front of an error. They tell a user nothing.
var packages = regexp.MustCompile(`^(?:(?:proxy|ingress|kernel|kernelspace|userspace|capture|netlab): )+`)

// Run runs root and returns its exit code. It reports an error once, to stderr, and
// says what was wrong: the command line, the configuration, or the run.
func Run(ctx context.Context, root *cobra.Command, stderr io.Writer) int {
	began := markBegin(root)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return ExitOK
	}
	var status Status
	if errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(stderr, "%s: %s\n", root.Name(), config.Printable(packages.ReplaceAllString(err.Error(), "")))
	var input inputError
	var mistake *config.Error
	switch {
	case !*began, errors.As(err, &input):
	case errors.As(err, &mistake):
		for _, line := range config.Rest(err) {
			fmt.Fprintln(stderr, line)
		}
		return ExitConfig
	default:
		return ExitFail
	}
	if !*began {
		fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", cmd.CommandPath())
	}
	return ExitInput
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
		if check := c.Args; check != nil {
			c.Args = func(c *cobra.Command, args []string) error { return argsError(c, args, check(c, args)) }
		}
		for _, sub := range c.Commands() {
			wrap(sub)
		}
	}
	wrap(cmd)
	return began
}

// argsError says which arguments a command takes, where the library says only how many.
func argsError(c *cobra.Command, args []string, err error) error {
	if err == nil || !strings.HasPrefix(err.Error(), "accepts ") && !strings.HasPrefix(err.Error(), "requires ") {
		return err
	}
	given := fmt.Sprintf("%d arguments do", len(args))
	if len(args) == 1 {
		given = "one argument does"
	}
	return fmt.Errorf("%s not fit; write: %s", given, strings.TrimSuffix(c.UseLine(), " [flags]"))
}

// NoArgs refuses arguments, and says where a file goes.
func NoArgs(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case c.HasSubCommands():
		return knownCommand(c, args, nil)
	case c.Flags().Lookup("config") != nil:
		return fmt.Errorf("%s takes no arguments; the file goes behind a flag: %s --config %s", c.CommandPath(),
			c.CommandPath(), args[0])
	}
	return fmt.Errorf("%s takes no arguments, but there is %q", c.CommandPath(), args[0])
}

// knownCommand refuses a word that is no command, with those that were perhaps meant.
func knownCommand(c *cobra.Command, args []string, elsewhere map[string]string) error {
	if len(args) == 0 {
		return nil
	}
	err := fmt.Errorf("unknown command %q for %q", args[0], c.CommandPath())
	if program := elsewhere[args[0]]; program != "" {
		return fmt.Errorf("%w; run %s %s", err, program, args[0])
	}
	c.SuggestionsMinimumDistance = 2 // cobra sets it for the root alone
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(near, " or "))
	}
	return err
}

// CompleteFlag has shells complete the values of a flag. A value may have its description behind a tab.
func CompleteFlag(c *cobra.Command, flag string, values func() []string) {
	complete := func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return values(), cobra.ShellCompDirectiveNoFileComp
	}
	if err := c.RegisterFlagCompletionFunc(flag, complete); err != nil { // there is no such flag
		panic(err)
	}
}

// commandsWith returns the commands below c that have the flag.
func commandsWith(c *cobra.Command, flag string) (have []string) {
	for _, sub := range c.Commands() {
		if sub.Hidden {
			continue
		}
		if sub.Flags().Lookup(flag) != nil || sub.PersistentFlags().Lookup(flag) != nil {
			have = append(have, sub.CommandPath())
		}
		have = append(have, commandsWith(sub, flag)...)
	}
	return have
}

// flagError says in words what the libraries say of a flag that there is none, and of a number or a time that is none.
func flagError(c *cobra.Command, err error) error {
	var absent *pflag.NotExistError
	if errors.As(err, &absent) {
		var names []string
		c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := cc.Nearest(absent.GetSpecifiedName(), names); near != "" {
			return fmt.Errorf("%w; did you mean --%s?", err, near)
		}
		if have := commandsWith(c.Root(), absent.GetSpecifiedName()); len(have) > 0 {
			return fmt.Errorf("%w; commands that have it: %s", err, strings.Join(have, ", "))
		}
		return err
	}
	var wrong *pflag.InvalidValueError
	if !errors.As(err, &wrong) {
		return err
	}
	var want string
	switch kind := wrong.GetFlag().Value.Type(); {
	case strings.HasPrefix(kind, "duration"):
		want = "a time with its unit, such as 10s or 1h30m"
	case kind == "uint16":
		want = "a whole number from 0 to 65535"
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
