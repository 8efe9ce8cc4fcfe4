//go:build packaging

package main

import (
	"debug/buildinfo"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// These commands are for packages alone: "make packages" builds the program with them.
func init() { packaging = append(packaging, manualCommand(), billCommand()) }

// manualCommand writes man pages and completions from the commands themselves.
func manualCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "manual DIR",
		Short:  "Write man pages and completions into a directory",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			root.DisableAutoGenTag = true
			for _, dir := range []string{"man", "completion"} {
				if err := os.MkdirAll(filepath.Join(args[0], dir), 0o755); err != nil { //nolint:gosec // for everybody
					return err
				}
			}
			head := &doc.GenManHeader{Section: "1", Source: "Penstock", Manual: "Penstock"}
			if seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
				date := time.Unix(seconds, 0).UTC()
				head.Date = &date
			}
			if err := doc.GenManTree(root, head, filepath.Join(args[0], "man")); err != nil {
				return err
			}
			completion := func(name string) string { return filepath.Join(args[0], "completion", name) }
			if err := root.GenBashCompletionFileV2(completion("penstock.bash"), true); err != nil {
				return err
			}
			if err := root.GenZshCompletionFile(completion("_penstock")); err != nil {
				return err
			}
			return root.GenFishCompletionFile(completion("penstock.fish"), true)
		},
	}
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
