package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

func reloadCommand() *cobra.Command {
	var path, at string
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Have a running proxy read its configuration again",
		Long: `Reload has the proxy of this machine read its configuration file again, and waits
for its answer. It exits with 78 and the reason when the proxy keeps the configuration it has:
the file is wrong, or changes what takes a restart.

The proxy is asked at the telemetry.address of the file. Where that is off, or the file is wrong,
the proxy gets a SIGHUP if $MAINPID names it, as it does in a unit's ExecReload.`,
		Example: "  penstock reload --config /etc/penstock/penstock.yaml",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return reloadProxy(cmd.Context(), path, at, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", defaultConfig, "configuration `FILE` of the running proxy")
	cmd.Flags().StringVar(&at, "telemetry", "", "`host:port` where the running proxy answers, if that is not the "+
		"file's telemetry.address")
	return cmd
}

func reloadProxy(ctx context.Context, path, at string, w, notes io.Writer) error {
	cfg, err := config.Load(path)
	if err != nil {
		_, _ = hangUp() // so that its log, metrics and status have it, too
		return badConfig(notes, err)
	}
	address := at
	if address == "" {
		address = cfg.Telemetry.Address
	}
	status, body, err := askProxy(ctx, address, http.MethodPost, "/-/reload")
	if errors.Is(err, errTelemetryOff) {
		sent, err := hangUp()
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
	case err != nil && at == "":
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

// hangUp sends SIGHUP to the process that systemd says is the proxy.
func hangUp() (sent bool, err error) {
	pid, _ := strconv.Atoi(os.Getenv("MAINPID")) // 0 where it is not set
	if pid <= 1 {
		return false, nil
	}
	if err := syscall.Kill(pid, syscall.SIGHUP); err != nil {
		return false, fmt.Errorf("SIGHUP to process %d ($MAINPID): %w", pid, err)
	}
	return true, nil
}
