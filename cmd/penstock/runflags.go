package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"

	"github.com/goccy/go-yaml"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
)

// runFlags are the flags of run as written.
type runFlags struct {
	config, listen, telemetry string
	trace                     string
	pprof, keepPrivileges     bool

	algorithm proxy.Algorithm
	envelope  proxy.Envelope
	level     proxy.LogLevel
	format    proxy.LogFormat
	drain     proxy.Duration
	mark      proxy.Mark

	hash string // of the configuration file, once loaded
}

func (f *runFlags) register(flags *pflag.FlagSet) {
	flags.StringVarP(&f.config, "config", "c", "", "configuration `FILE`")
	flags.StringVar(&f.listen, "listen", "", "`host:port` for SOCKS5 and HTTP CONNECT, instead of 127.0.0.1:1080; not with --config")
	flags.StringVar(&f.telemetry, "telemetry", "", "`host:port` of metrics, health and the list of flows, or off (default "+proxy.DefaultTelemetry+")")
	flags.StringVar(&f.trace, "trace", "", "write what the algorithms see and answer to `FILE`, as JSON lines")
	flags.BoolVar(&f.pprof, "pprof", false, "serve Go's profiles under /debug/pprof/ beside the metrics")
	flags.BoolVar(&f.keepPrivileges, "keep-privileges", false, "keep the capabilities that are of no use once all sockets are open; for debuggers and profilers that need them in this process")
	flags.Var(scalar{&f.algorithm, "ALGORITHM"}, "algorithm", "congestion control where no rule names another, in both directions (default "+cc.Default+")")
	flags.Var(scalar{&f.envelope, "NAME"}, "envelope", "what holds our window in the kernel: auto, ebpf, bbr, cubic or reno (default auto)")
	flags.Var(scalar{&f.level, "LEVEL"}, "log-level", "debug, info, warn or error (default info)")
	flags.Var(scalar{&f.format, "FORMAT"}, "log-format", "text, json, or auto: text on a terminal (default auto)")
	flags.Var(scalar{&f.drain, "TIME"}, "drain", "how long open connections may go on after a signal (default 30s)")
	flags.Var(scalar{&f.mark, "MARK"}, "mark", "firewall mark of the proxy's own connections, such as 0x2000000")
}

// scalar is a flag that reads what the configuration's key of its type reads.
type scalar struct {
	value any // *T with T one of proxy's scalar types
	kind  string
}

// Set implements pflag.Value.
func (s scalar) Set(text string) error {
	err := yaml.Unmarshal([]byte(strconv.Quote(text)), s.value)
	var ye yaml.Error
	if errors.As(err, &ye) {
		return errors.New(ye.GetMessage()) // its position is one in a text nobody wrote
	}
	return err
}

// Type implements pflag.Value.
func (s scalar) Type() string { return s.kind }

// String implements pflag.Value: the defaults are those of the configuration.
func (s scalar) String() string { return "" }

// load reads the configuration and lays the flags over it.
func (f *runFlags) load(flags *pflag.FlagSet) (proxy.Config, error) {
	cfg := proxy.DefaultConfig()
	if f.config != "" {
		if flags.Changed("listen") {
			return cfg, errors.New("--listen is for running without a file; with --config, edit listeners there")
		}
		var err error
		if cfg, err = proxy.Load(f.config); err != nil {
			return cfg, err
		}
		text, err := os.ReadFile(f.config)
		if err != nil {
			return cfg, fmt.Errorf("--config: %w", err)
		}
		sum := sha256.Sum256(text)
		f.hash = hex.EncodeToString(sum[:])
	}
	for name, apply := range map[string]func(){
		"listen":    func() { cfg.Listeners[0].Address = f.listen },
		"telemetry": func() { cfg.Telemetry.Address = f.telemetry },
		"algorithm": func() {
			cfg.Defaults.Algorithm, cfg.Defaults.Params = f.algorithm, nil
			for _, d := range []*proxy.DirectionConfig{&cfg.Defaults.Down, &cfg.Defaults.Up} {
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
	return cfg, cfg.Check()
}

// newLogger returns a logger of that format.
func newLogger(w io.Writer, format proxy.LogFormat, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	file, _ := w.(*os.File)
	if format == "text" || format == "auto" && file != nil && isTerminal(file) {
		return slog.New(slog.NewTextHandler(w, o))
	}
	o.ReplaceAttr = inSeconds
	return slog.New(slog.NewJSONHandler(w, o))
}

// inSeconds names the unit of a duration, which JSON would show as a bare number.
func inSeconds(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	return a
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
