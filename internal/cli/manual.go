//go:build packaging

package cli

import (
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// ManualCommand writes man pages and completions of a program from its commands. more writes further pages into the
// directory of man pages; nil: there are none. date is that of the sources.
func ManualCommand(more func(dir string, date time.Time) error) *cobra.Command {
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
			date := time.Now().UTC()
			if seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
				date = time.Unix(seconds, 0).UTC()
			}
			head := &doc.GenManHeader{Section: "1", Source: "Penstock", Manual: "Penstock", Date: &date}
			if err := doc.GenManTree(root, head, filepath.Join(args[0], "man")); err != nil {
				return err
			}
			if more != nil {
				if err := more(filepath.Join(args[0], "man"), date); err != nil {
					return err
				}
			}
			completion := func(name string) string { return filepath.Join(args[0], "completion", name) }
			if err := root.GenBashCompletionFileV2(completion(root.Name()+".bash"), true); err != nil {
				return err
			}
			if err := root.GenZshCompletionFile(completion("_" + root.Name())); err != nil {
				return err
			}
			return root.GenFishCompletionFile(completion(root.Name()+".fish"), true)
		},
	}
}
