package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
)

const (
	modelFlagName = "mdi-model"
	maxModelBytes = 64 << 20 // that are read of a model
)

// modelFlag adds a model to the algorithm mdi as soon as it is read, so that
// the flags behind it can name it.
type modelFlag struct{ files []string }

// Set implements pflag.Value.
func (f *modelFlag) Set(text string) error {
	name, path, ok := strings.Cut(text, "=")
	if !ok || path == "" {
		return errors.New("write NAME=FILE")
	}
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := cc.LoadMDI(name, io.LimitReader(file, maxModelBytes)); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	f.files = append(f.files, text)
	return nil
}

// Type implements pflag.Value.
func (f *modelFlag) Type() string { return "NAME=FILE" }

// String implements pflag.Value.
func (f *modelFlag) String() string { return strings.Join(f.files, " ") }

// Models are the models that were added on cmd's command line, as NAME=FILE.
func Models(cmd *cobra.Command) []string {
	if f := cmd.Flag(modelFlagName); f != nil {
		if models, ok := f.Value.(*modelFlag); ok {
			return models.files
		}
	}
	return nil
}
