package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/proxy/config"
)

// runFlags are the flags of run as written.
type runFlags struct {
	config, listen, telemetry string
	trace, lastGood           string
	stateDirectory            string
	ownState                  bool // stateDirectory was given
	pprof, keepPrivileges     bool
	watch                     bool

	algorithm config.Algorithm
	envelope  config.Envelope
	level     config.LogLevel
	format    config.LogFormat
	drain     time.Duration
	mark      config.Mark

	loaded config.Loaded // the configuration file
	broken error         // what is wrong with it, where loaded is the last good one
	wanted config.Loaded // what of it was read then
}

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

// errNoName refuses an empty file name, which comes of a script's variable that is not set.
var errNoName = errors.New("the name of the configuration file is empty")

// loadConfig reads the configuration and lays the flags over it.
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
	return f.layOver(flags, cfg)
}

// loadLastGood is load for the configuration that worked last, where there is one.
// Without one the error is what is wrong with the file.
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
	return f.layOver(flags, saved.Config)
}

// layOver lays the flags over cfg.
func (f *runFlags) layOver(flags *pflag.FlagSet, cfg config.Config) (config.Config, error) {
	for name, apply := range map[string]func(){
		"listen":    func() { cfg.Listeners[0].Address = f.listen },
		"telemetry": func() { cfg.Telemetry.Address = f.telemetry },
		"algorithm": func() {
			cfg.Defaults.Algorithm, cfg.Defaults.Params = f.algorithm, nil
			for _, d := range []*config.Direction{&cfg.Defaults.Down, &cfg.Defaults.Up} {
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
	return cfg, cli.BadInput(cfg.Validate()) // a mistake of the flags: what is in a file has been checked
}

// newLogger returns a logger of that format. It detaches a logqueue.Writer.
func newLogger(w io.Writer, format config.LogFormat, level slog.Leveler) *slog.Logger {
	if queue, ok := w.(*logqueue.Writer); ok {
		direct := newLogger(queue.To, format, level)
		queue.Detach(func(lost int) {
			direct.Error("lines of the log are missing here: whoever reads it was too slow", "lines", lost)
		})
	}
	file := fileOf(w)
	text := format == "text" || format == "auto" && file != nil && isTerminal(file)
	handler := func(w io.Writer, replace func([]string, slog.Attr) slog.Attr) slog.Handler {
		if text {
			return slog.NewTextHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: replace})
		}
		return slog.NewJSONHandler(w, &slog.HandlerOptions{
			Level: level,
			ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
				if replace != nil {
					a = replace(groups, a)
				}
				return inSeconds(groups, a)
			},
		})
	}
	if !isJournal(w) {
		return slog.New(handler(w, nil))
	}
	return slog.New(newJournalHandler(w, handler))
}

// takeStandardLog has what libraries write to package log go to log, too: they would write to standard
// error, and wait for who reads it.
func takeStandardLog(to *slog.Logger) {
	log.SetFlags(0)
	log.SetOutput(slog.NewLogLogger(to.Handler(), slog.LevelDebug).Writer())
}

// inSeconds names the unit of a duration, which JSON would show as a bare number.
func inSeconds(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	return a
}

// fileOf is the file that w writes to; nil: none.
func fileOf(w io.Writer) *os.File {
	if queue, ok := w.(*logqueue.Writer); ok {
		w = queue.To
	}
	file, _ := w.(*os.File)
	return file
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }
