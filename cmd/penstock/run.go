package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// runCommand starts the proxy. A configuration with a mistake is replaced by the last good one, where one is kept.
func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the proxy",
		Long: `Run starts the proxy. Without a configuration file it offers SOCKS5 and HTTP
CONNECT on 127.0.0.1:1080, controls both directions with its own algorithm, and needs no
privilege. Flags override the file.

SIGTERM and SIGINT end it: no new connections are taken, open ones may go on for
the time of --drain, and a second signal ends it at once. SIGHUP rereads the
configuration file: running connections go on under the new rules, and what cannot
change while running is refused. SIGUSR2 starts the program file, which may be another by
now, with the same arguments and --takeover.`,
		Example: `  penstock run
  penstock run --config /etc/penstock/penstock.yaml
  penstock run --algorithm copa:delta=0.1 --listen 127.0.0.1:3128
  penstock run --config /etc/penstock/penstock.yaml --takeover  # an upgrade: see docs/install.md`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			signal.Ignore(syscall.SIGPIPE)         // who reads the log may go
			rereads := make(chan os.Signal, 1)     // one that waits stands for all that follow
			signal.Notify(rereads, syscall.SIGHUP) // from now on: it would end a proxy that is still starting
			defer signal.Stop(rereads)
			upgrades := make(chan os.Signal, 1)
			signal.Notify(upgrades, syscall.SIGUSR2)
			defer signal.Stop(upgrades)
			f.locateState(os.Getenv("STATE_DIRECTORY"))
			cfg, err := f.loadConfig(cmd.Flags())
			var mistake *config.Error
			if errors.As(err, &mistake) {
				cfg, err = f.loadLastGood(cmd.Flags(), err)
			}
			if err != nil {
				return badConfig(cmd.ErrOrStderr(), err)
			}
			h := &service{cfg: cfg, flags: f, given: cmd.Flags(), successor: make(chan int), drained: make(chan struct{})}
			h.reloads.service = h
			h.level.Set(cfg.Log.Level.Level())
			h.log = slog.New(h.events.Handler(newLogger(cmd.ErrOrStderr(), cfg.Log.Format, &h.level).Handler()))
			redirectStandardLog(h.log)
			return h.runService(cmd.Context(), rereads, upgrades)
		},
	}
	f.registerFlags(cmd.Flags())
	completeRunFlags(cmd)
	return cmd
}

// runFlags are the flags of run as written, and the configuration that was read.
type runFlags struct {
	config         string // file; empty: the built-in configuration
	listen         string // host:port; only without config
	telemetry      string // host:port, or off
	trace          string // file; empty: none
	lastGood       string // file; empty: in the state directory, if that was given
	stateDirectory string // empty: nothing is kept
	ownState       bool   // stateDirectory was given, by a flag or by systemd
	pprof          bool
	keepPrivileges bool
	watch          bool
	takeover       bool

	algorithm policy.Algorithm
	envelope  config.Envelope
	level     config.LogLevel
	format    config.LogFormat
	drain     time.Duration
	mark      config.Mark

	loaded config.Loaded // the configuration in force: the file's, or the last good one
	broken error         // the mistake in the file, if loaded is the last good one; nil otherwise
	wanted config.Loaded // what was read of the file with the mistake
}

// registerFlags defines the flags. Flags with a key in the configuration read what that key reads (scalar).
func (f *runFlags) registerFlags(flags *pflag.FlagSet) {
	flags.StringVarP(&f.config, "config", "c", "", "configuration `FILE`")
	flags.StringVar(&f.listen, "listen", "", "`host:port` for SOCKS5 and HTTP CONNECT, instead of 127.0.0.1:1080; "+
		"not with --config")
	flags.StringVar(&f.telemetry, "telemetry", "", "`host:port` of metrics, health and the list of flows, or off "+
		"(default "+config.DefaultTelemetry+")")
	flags.StringVar(&f.stateDirectory, "state-directory", "", "`DIR` for what the next start needs: where peers of "+
		"tunnels are, and the configuration that works, with its secrets, to start with when --config has a mistake "+
		"(default $STATE_DIRECTORY, as systemd sets it, else FILE.state beside the file of --config, for peers alone)")
	flags.StringVar(&f.lastGood, "last-good", "", "keep the configuration that works in `FILE`, not in the state "+
		"directory")
	flags.BoolVar(&f.watch, "watch", false, "reload when the file of --config, or one that it names, has changed")
	flags.BoolVar(&f.takeover, "takeover", false, "take the listening sockets and established connections over from the "+
		"proxy that runs with the same state directory; that one ends once the connections that cannot move have, "+
		"or after shutdown.drain")
	flags.StringVar(&f.trace, "trace", "", "write what the algorithms see and answer to `FILE`, as JSON lines")
	flags.BoolVar(&f.pprof, "pprof", false, "serve Go's profiles under /debug/pprof/ beside the metrics")
	flags.BoolVar(&f.keepPrivileges, "keep-privileges", false,
		"keep the capabilities that are of no use once all sockets are open; for debuggers and profilers that need "+
			"them in this process")
	flags.Var(scalar{&f.algorithm, "ALGORITHM"}, "algorithm",
		"congestion control where no rule names another, in both directions (default "+cc.Default+")")
	flags.Var(scalar{&f.envelope, "NAME"}, "envelope", "the kernel's congestion control under our window: auto, "+
		"ebpf, bbr, cubic or reno (default auto)")
	flags.Var(scalar{&f.level, "LEVEL"}, "log-level", "debug, info, warn or error (default info)")
	flags.Var(scalar{&f.format, "FORMAT"}, "log-format", "text, json, or auto: text on a terminal (default auto)")
	flags.Var(scalar{&f.drain, "TIME"}, "drain", "how long open connections may go on after a signal (default 30s)")
	flags.Var(scalar{&f.mark, "MARK"}, "mark", "firewall mark of the proxy's own connections, such as 0x2000000")
}

// scalar is a flag that reads what the configuration's key of its type reads.
type scalar struct {
	value any // a pointer to it
	kind  string
}

// Set implements pflag.Value.
func (s scalar) Set(text string) error { return config.Set(s.value, text) }

// Type implements pflag.Value.
func (s scalar) Type() string { return s.kind }

// String implements pflag.Value: the defaults are those of the configuration.
func (s scalar) String() string { return "" }

// errNoName refuses an empty file name, because it comes from a variable of a script that is not set.
var errNoName = errors.New("the name of the configuration file is empty")

// loadConfig reads the configuration and applies the flags. It stores what was read in f.loaded, also of a file with a
// mistake, so that the files can be watched until it is mended.
func (f *runFlags) loadConfig(flags *pflag.FlagSet) (config.Config, error) {
	cfg := config.Default()
	if f.config == "" && flags.Changed("config") {
		return cfg, errNoName
	}
	if f.config != "" {
		if flags.Changed("listen") {
			return cfg, errors.New("--listen is for running without a file; with --config, edit listeners there")
		}
		var err error
		if f.loaded, err = config.LoadFiles(f.config); err != nil {
			return cfg, err
		}
		cfg = f.loaded.Config
	}
	return f.applyFlags(flags, cfg)
}

// loadLastGood reads the configuration that worked last and applies the flags. If there is none it returns broken, the
// mistake in the file.
func (f *runFlags) loadLastGood(flags *pflag.FlagSet, broken error) (config.Config, error) {
	if f.config == "" || f.lastGood == "" {
		return config.Config{}, broken
	}
	saved, err := config.LoadSaved(f.lastGood, f.config)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			broken = fmt.Errorf("%w (and the last good one: %v)", broken, err) //nolint:errorlint // the file's mistake decides
		}
		return config.Config{}, broken
	}
	f.loaded, f.broken, f.wanted = saved, broken, f.loaded
	return f.applyFlags(flags, saved.Config)
}

// flagOfKey has the flags that errors name in place of a key. Flags of other keys check their values themselves.
var flagOfKey = map[string]string{"listeners[0].address": "--listen", "telemetry.address": "--telemetry"}

// applyFlags puts the values of flags into cfg. Only flags that were given count, because cfg has the defaults.
func (f *runFlags) applyFlags(flags *pflag.FlagSet, cfg config.Config) (config.Config, error) {
	for name, apply := range map[string]func(){
		"listen":    func() { cfg.Listeners[0].Address = f.listen },
		"telemetry": func() { cfg.Telemetry.Address = f.telemetry },
		"algorithm": func() {
			cfg.Defaults.Algorithm, cfg.Defaults.Params = f.algorithm, nil
			for _, d := range []*policy.DirectionSettings{&cfg.Defaults.Down, &cfg.Defaults.Up} {
				d.Algorithm, d.Params = "", nil
			}
		},
		"envelope":   func() { cfg.Envelope = f.envelope },
		"log-level":  func() { cfg.Log.Level = f.level },
		"log-format": func() { cfg.Log.Format = f.format },
		"drain":      func() { cfg.Shutdown.Drain = f.drain },
		"mark":       func() { cfg.Mark = f.mark },
	} {
		if flags.Changed(name) {
			apply()
		}
	}
	err := cfg.Validate() // an error is of a flag, because the file has been checked
	var mistake *config.Error
	if errors.As(err, &mistake) {
		mistake.Key = cmp.Or(flagOfKey[mistake.Key], mistake.Key)
	}
	return cfg, cli.BadInput(err)
}

// locateState decides where this process stores what the next one needs: in the directory of --state-directory, else
// in systemd's (env is its STATE_DIRECTORY), else beside the configuration file. The last good configuration is not
// stored beside the file unless --last-good asks for it, because it has secrets.
func (f *runFlags) locateState(env string) {
	if f.stateDirectory == "" {
		f.stateDirectory, _, _ = strings.Cut(strings.TrimLeft(env, ":"), ":") // the first that has a name
	}
	switch {
	case f.stateDirectory != "":
		f.ownState = true
		if f.lastGood == "" && f.config != "" {
			f.lastGood = filepath.Join(f.stateDirectory, "last-good")
		}
	case f.config != "":
		f.stateDirectory = f.config + ".state"
	}
}
