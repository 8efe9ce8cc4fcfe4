package main

import (
	"encoding/json"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/proxy"
)

func schemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file",
		Long: `Schema prints a JSON Schema (draft 2020-12) that editors use to complete and
check a configuration while it is written.`,
		Example: "  penstock schema > penstock.schema.json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetEscapeHTML(false)
			enc.SetIndent("", "  ")
			return enc.Encode(proxy.Schema())
		},
	}
}
