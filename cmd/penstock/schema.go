package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

// schemaCommand prints what config.Schema says of every key, for editors or for the documentation.
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

// writeReference prints every key of a configuration schema as tables, one for
// each top-level key.
func writeReference(w io.Writer, schema map[string]any) error {
	var b strings.Builder
	properties, _ := schema["properties"].(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		part, _ := properties[name].(map[string]any)
		fmt.Fprintf(&b, "\n### %s\n\n%s\n", name, part["description"])
		rows := referenceRows(name, part)
		if len(rows) == 0 {
			fmt.Fprintf(&b, "\nValue: %s.\n", valueKind(part))
			continue
		}
		b.WriteString("\n| key | value | meaning |\n|---|---|---|\n")
		for _, r := range rows {
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", r.key, escapeCell(r.value), escapeCell(r.meaning))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// referenceRow is what the reference says of one key.
type referenceRow struct{ key, value, meaning string }

// referenceRows returns a row for each key below path, and after it the rows of what lies below that key.
func referenceRows(path string, schema map[string]any) []referenceRow {
	if items, ok := schema["items"].(map[string]any); ok {
		path, schema = path+"[]", items
	}
	properties, _ := schema["properties"].(map[string]any)
	required, _ := schema["required"].([]string)
	var rows []referenceRow
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		part, _ := properties[name].(map[string]any)
		about, _ := part["description"].(string)
		if slices.Contains(required, name) {
			about += " Required."
		}
		at := path + "." + name
		below := referenceRows(at, part)
		if keys, _ := part["properties"].(map[string]any); len(keys) > 0 && isSubset(keys, properties) {
			about += " Takes, of the keys beside it: " + strings.Join(slices.Sorted(maps.Keys(keys)), ", ") + "."
			below = nil
		}
		rows = append(rows, referenceRow{at, valueKind(part), about})
		rows = append(rows, below...)
	}
	return rows
}

// isSubset reports whether others has all keys with the same descriptions. The keys of one direction are a subset of
// the keys for both.
func isSubset(keys, others map[string]any) bool {
	for name, key := range keys {
		if other, found := others[name]; !found || !reflect.DeepEqual(key, other) {
			return false
		}
	}
	return true
}

// valueKind says in words what a key takes: its choices, examples, or type.
func valueKind(schema map[string]any) string {
	if list, ok := schema["enum"].([]string); ok {
		return strings.Join(list, ", ")
	}
	if examples, ok := schema["examples"].([]string); ok {
		return "such as " + strings.Join(examples, ", ")
	}
	if items, ok := schema["items"].(map[string]any); ok {
		if items["type"] == "object" {
			return "list"
		}
		return "list; " + valueKind(items)
	}
	switch t := schema["type"].(type) {
	case string:
		return map[string]string{
			"object": "keys", "string": "text", "integer": "number", "number": "number", "boolean": "true or false",
		}[t]
	case []string:
		return strings.Join(t, " or ")
	}
	return "number or range"
}
