package main

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

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
