package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

func schemaCommand() *cobra.Command {
	var markdown bool
	cmd := &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file",
		Long: `Schema prints a JSON Schema (draft 2020-12) that editors use to complete and
check a configuration while it is written.`,
		Example: "  penstock schema > penstock.schema.json",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if markdown {
				return writeReference(cmd.OutOrStdout(), config.Schema())
			}
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetEscapeHTML(false)
			enc.SetIndent("", "  ")
			return enc.Encode(config.Schema())
		},
	}
	cmd.Flags().BoolVar(&markdown, "markdown", false, "print the tables of docs/configuration.md instead")
	return cmd
}
