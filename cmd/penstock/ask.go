package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

// proxyPatience bounds how long a running proxy may take over an answer. A reload waits for listeners and files.
const proxyPatience = 10 * time.Second

// errTelemetryOff is the error of a request to a proxy that has no telemetry.
var errTelemetryOff = errors.New("telemetry.address is off, so that no proxy can be asked; SIGHUP has it reread its " +
	"files")

// askProxy asks the proxy with its telemetry at that address for a page. For an unspecified address, such as
// 0.0.0.0:9464, it asks localhost.
func askProxy(ctx context.Context, at, method, page string) (status int, body []byte, err error) {
	if at == "off" {
		return 0, nil, errTelemetryOff
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return 0, nil, cli.BadInput(fmt.Errorf("--telemetry: %q is not host:port, such as 127.0.0.1:9464", at))
	}
	if addr, err := netip.ParseAddr(host); host == "" || err == nil && addr.IsUnspecified() {
		at = net.JoinHostPort("localhost", port)
	}
	ctx, cancel := context.WithTimeout(ctx, proxyPatience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+at+page, nil)
	if err != nil {
		return 0, nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // does not ask the proxy of HTTP_PROXY
	resp, err := client.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return 0, nil, fmt.Errorf("no proxy answers at %s: %w; start it by penstock run, or say by --telemetry where it is",
			at, syscall.ECONNREFUSED)
	}
	if err != nil {
		return 0, nil, err
	}
	body, err = io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		err = fmt.Errorf("read what %s answers: %w", at, err)
	}
	return resp.StatusCode, body, err
}

// runningConfig returns the configuration of the proxy that runs. It returns the defaults if --config is not given and
// the usual file cannot be read.
func runningConfig(cmd *cobra.Command, path string) (config.Config, error) {
	cfg, err := config.Load(path)
	switch {
	case err == nil:
		return cfg, nil
	case cmd.Flags().Changed("config"):
		return cfg, badConfig(cmd.ErrOrStderr(), err)
	}
	return config.Default(), nil
}

// proxyAddress has the flags that say where a running proxy is asked.
type proxyAddress struct{ path, at string }

// registerFlags adds the flags.
func (a *proxyAddress) registerFlags(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&a.path, "config", "c", defaultConfig, "configuration `FILE` of the running proxy")
	cmd.Flags().StringVar(&a.at, "telemetry", "", "`host:port` where the running proxy answers, if that is not the "+
		"file's telemetry.address")
}

// telemetryAddress returns where the telemetry of the proxy is.
func (a *proxyAddress) telemetryAddress(cmd *cobra.Command) (string, error) {
	if a.at != "" {
		return a.at, nil
	}
	cfg, err := runningConfig(cmd, a.path)
	return cfg.Telemetry.Address, err
}

// askJSON asks for a page, and decodes the answer into out. If the proxy refuses, the error is its answer.
func (a *proxyAddress) askJSON(ctx context.Context, cmd *cobra.Command, method, page string, out any) error {
	at, err := a.telemetryAddress(cmd)
	if err != nil {
		return err
	}
	status, body, err := askProxy(ctx, at, method, page)
	switch {
	case err != nil:
		return err
	case status == http.StatusBadRequest:
		return cli.BadInput(errors.New(config.Printable(strings.TrimSpace(string(body)))))
	case status != http.StatusOK:
		return errors.New(config.Printable(strings.TrimSpace(string(body))))
	}
	if err := json.Unmarshal(body, out); err != nil {
		return fmt.Errorf("read what %s answers: %w", at, err)
	}
	return nil
}

// warningMark begins each line of the answer to a reload that tells of a warning.
const warningMark = "warning: "

// splitAnswer takes the warnings out of the answer to a reload, because they go to standard error.
func splitAnswer(answer string) (words string, warnings []string) {
	var other []string
	for line := range strings.Lines(answer) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, warningMark) {
			warnings = append(warnings, line)
		} else {
			other = append(other, line)
		}
	}
	return strings.Join(other, "\n"), warnings
}

// readyCommand asks whether a proxy serves, for probes. Its exit code is the answer.
func readyCommand() *cobra.Command {
	var path, at string
	var alive bool
	cmd := &cobra.Command{
		Use:   "ready",
		Short: "Tell whether a running proxy serves new connections",
		Long: `Ready asks the proxy of this machine whether it serves new connections, and exits with 0
if it does and with 1 and the reason if not: for probes where there is no shell and no curl.

The proxy is asked at the telemetry.health or the telemetry.address of the file; without one
at the usual address.`,
		Example: `  penstock ready
  penstock ready --alive --config /etc/penstock/penstock.yaml`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if at == "" {
				cfg, err := runningConfig(cmd, path)
				if err != nil {
					return err
				}
				if at = cfg.Telemetry.Health; at == "off" {
					at = cfg.Telemetry.Address
				}
			}
			page := "/readyz"
			if alive {
				page = "/healthz"
			}
			status, body, err := askProxy(cmd.Context(), at, http.MethodGet, page)
			words := config.Printable(strings.TrimSpace(string(body)))
			switch {
			case errors.Is(err, errTelemetryOff):
				return fmt.Errorf("%w; telemetry.health is off, too: set it to 127.0.0.1:9465", err)
			case err != nil:
				return err
			case status != http.StatusOK:
				return fmt.Errorf("not ready: %s", words)
			}
			fmt.Fprintln(cmd.OutOrStdout(), words)
			return nil
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", defaultConfig, "configuration `FILE` of the running proxy")
	cmd.Flags().StringVar(&at, "telemetry", "", "`host:port` where the running proxy answers, if that is not the "+
		"file's")
	cmd.Flags().BoolVar(&alive, "alive", false, "whether the process answers at all, as while it drains")
	return cmd
}

// reloadCommand reloads a running proxy and waits for its answer, which SIGHUP does not give.
func reloadCommand() *cobra.Command {
	var from proxyAddress
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Have a running proxy read its configuration again",
		Long: `Reload has the proxy of this machine read its configuration file again, and waits
for its answer. It exits with 78 and the reason when the proxy keeps the configuration it has:
the file is wrong, or changes what takes a restart.

Where $MAINPID names a proxy whose program file is another one than this, as after an upgrade, this
one is started with the same arguments, and takes over (run --takeover). It reads the configuration.

Else the proxy is asked at the telemetry.address of the file. Where that is off, or the file is wrong,
the proxy gets a SIGHUP if $MAINPID names it, as it does in a unit's ExecReload.`,
		Example: "  penstock reload --config /etc/penstock/penstock.yaml",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reloadProxy(cmd.Context(), from, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	from.registerFlags(cmd)
	return cmd
}

// reloadProxy asks for a reload over HTTP. It sends SIGHUP if telemetry is off. It also does if the file is wrong, so
// that the proxy's log and metrics show the attempt. w gets the outcome, notes the warnings.
func reloadProxy(ctx context.Context, from proxyAddress, w, notes io.Writer) error {
	cfg, err := config.Load(from.path)
	if err != nil {
		_, _ = sendSIGHUP()
		return badConfig(notes, err)
	}
	if args := argumentsOfOther(mainPID()); args != nil {
		adoptWatchdog(mainPID())
		pid, err := startSuccessor(ctx, args)
		if err == nil {
			fmt.Fprintf(w, "process %d of another program has taken over\n", pid)
		}
		return err
	}
	address := cmp.Or(from.at, cfg.Telemetry.Address)
	status, body, err := askProxy(ctx, address, http.MethodPost, "/-/reload")
	if errors.Is(err, errTelemetryOff) {
		sent, err := sendSIGHUP()
		switch {
		case err != nil:
			return err
		case !sent:
			return errTelemetryOff
		}
		fmt.Fprintln(w, "told by SIGHUP; telemetry.address is off, so that only its log says whether it took the file")
		printWarnings(notes, cfg)
		return nil
	}
	answer := strings.TrimSpace(string(body))
	switch {
	case err != nil && from.at == "":
		return fmt.Errorf("not reloaded: %w; where telemetry.address is new in the file, it takes a restart", err)
	case err != nil:
		return fmt.Errorf("not reloaded: %w", err)
	case status == http.StatusUnprocessableEntity:
		return &config.Error{Message: answer}
	case status != http.StatusOK:
		return fmt.Errorf("not reloaded: %s", answer)
	}
	words, warnings := splitAnswer(answer)
	for _, warning := range warnings {
		fmt.Fprintln(notes, config.Printable(warning))
	}
	fmt.Fprintln(w, config.Printable(words))
	return nil
}

// sendSIGHUP sends SIGHUP to the proxy that $MAINPID names. sent is false outside of a unit.
func sendSIGHUP() (sent bool, err error) {
	pid := mainPID()
	if pid == 0 {
		return false, nil
	}
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		return false, fmt.Errorf("SIGHUP to process %d ($MAINPID): %w", pid, err)
	}
	return true, nil
}

// mainPID returns the process id of the proxy, which systemd passes in $MAINPID; 0: outside of a unit.
func mainPID() int {
	if pid, _ := strconv.Atoi(os.Getenv("MAINPID")); pid > 1 {
		return pid
	}
	return 0
}
