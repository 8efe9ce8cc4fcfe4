//go:build packaging

package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

// These commands are for packages alone: "make packages" builds the program with them.
func init() { packaging = append(packaging, cli.ManualCommand(writeConfigPage), billCommand()) }

// writeConfigPage writes penstock.yaml(5) from the schema of the configuration.
func writeConfigPage(dir string, date time.Time) error {
	roff := strings.NewReplacer(`\`, `\e`, "\n.", "\n\\&.", "\n'", "\n\\&'", "-", `\-`)
	var b strings.Builder
	fmt.Fprintf(&b, ".TH PENSTOCK.YAML 5 %q Penstock Penstock\n.SH NAME\npenstock.yaml \\- configuration of penstock(1)\n"+
		".SH DESCRIPTION\nOne strict YAML file. A key that does not exist, or a number without its unit, is an error "+
		"with its line and the cure; penstock check FILE finds it before a start. penstock reload has a running "+
		"proxy read the file again.\n", date.Format("Jan 2006"))
	properties, _ := config.Schema()["properties"].(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		part, _ := properties[name].(map[string]any)
		about, _ := part["description"].(string)
		fmt.Fprintf(&b, ".SH %s\n%s\n", strings.ToUpper(name), roff.Replace(about))
		rows := referenceRows(name, part)
		if len(rows) == 0 {
			fmt.Fprintf(&b, "Value: %s.\n", roff.Replace(valueKind(part)))
		}
		for _, r := range rows {
			fmt.Fprintf(&b, ".TP\n.B %s\n(%s) %s\n", roff.Replace(r.key), roff.Replace(r.value),
				roff.Replace(r.meaning))
		}
	}
	b.WriteString(".SH FILES\n/etc/penstock/penstock.yaml\n.SH SEE ALSO\npenstock\\-run(1), penstock\\-check(1)\n")
	return os.WriteFile(filepath.Join(dir, "penstock.yaml.5"), []byte(b.String()), 0o644) //nolint:gosec // for everybody
}

// component is one of CycloneDX 1.5.
type component struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	PURL    string `json:"purl,omitempty"`
}

// billCommand tells what a program was built from, by what the Go linker wrote into it.
func billCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "sbom FILE",
		Short:  "Print what a program was built from, as CycloneDX",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			info, err := buildinfo.ReadFile(args[0])
			if err != nil {
				return err
			}
			parts := []component{{
				Type: "library", Name: "std", Version: info.GoVersion,
				PURL: "pkg:golang/std@" + info.GoVersion,
			}}
			for _, m := range info.Deps {
				if m.Replace != nil {
					m = m.Replace
				}
				parts = append(parts, component{"library", m.Path, m.Version, "pkg:golang/" + m.Path + "@" + m.Version})
			}
			out := json.NewEncoder(cmd.OutOrStdout())
			out.SetIndent("", " ")
			return out.Encode(map[string]any{
				"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
				"metadata": map[string]any{"component": component{
					Type: "application", Name: "penstock",
					Version: info.Main.Version,
				}},
				"components": parts,
			})
		},
	}
}
