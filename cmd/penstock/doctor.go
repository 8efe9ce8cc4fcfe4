package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/doctor"
)

// trialsFlag is the flag of the child process that makes trials in a user namespace.
const trialsFlag = "namespace-trials"

// doctorCommand prints what internal/doctor finds. It starts itself again, in a user namespace, for trials that need
// one.
func doctorCommand() *cobra.Command {
	var asJSON, trials bool
	var file string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Tell what this machine and this process can do, and how to get the rest",
		Long: `Doctor tries what the proxy, its capture rules, the lab and the benchmarks need,
and says for each what it found and how to mend what is not there. It looks with
the rights it is run with: run it as the proxy will run.

Capture rules and TUN devices are tried for real in a network namespace that is
gone afterwards. Nothing is left behind but modules that the kernel loaded on
the way. The exit code is 0 unless Penstock cannot run here at all.

With --config it says what that configuration needs of the machine: addresses and ports
that are free, capabilities, modules, capture rules. The exit code is 1 where something
is missing.`,
		Example: `  penstock doctor
  sudo -u penstock penstock doctor
  systemd-run --pty -p User=penstock -p AmbientCapabilities=CAP_NET_ADMIN penstock doctor
  sudo -u penstock penstock doctor --config /etc/penstock/penstock.yaml
  penstock doctor --json | jq '.checks[] | select(.state != "ok")'`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if trials {
				return doctor.PrintTrials(cmd.Context(), cmd.OutOrStdout())
			}
			program := doctor.Program{
				Version: cli.ReadBuild().Version, Clock: monotonicTime, Trials: []string{"doctor", "--" + trialsFlag},
			}
			if cmd.Flags().Changed("config") {
				f := runFlags{config: file}
				cfg, err := f.loadConfig(cmd.Flags())
				if err != nil {
					return badConfig(cmd.ErrOrStderr(), err)
				}
				program.Config = &cfg
			}
			r := doctor.Diagnose(cmd.Context(), program)
			write := r.Text
			if asJSON {
				write = r.JSON
			}
			return errors.Join(write(cmd.OutOrStdout()), r.Fatal)
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration `FILE` that the machine is judged for")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&trials, trialsFlag, false, "make the trials that need a namespace, right here")
	if err := cmd.Flags().MarkHidden(trialsFlag); err != nil {
		panic(err) // it was defined in the line before
	}
	return cmd
}
