package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
)

// newGatewayConfig is the configuration that gateway init writes.
const newGatewayConfig = `# A WireGuard gateway. UDP port 51820 must be reachable from outside.
listeners:
  - name: vpn
    mode: wireguard
    address: ":51820"
    wireguard:
      private_key_file: vpn.key
      peers_file: peers.conf                  # written by penstock gateway peer
      pool: [10.9.0.0/24, "fd00:9::/64"]      # addresses for peers
`

func initCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "init FILE",
		Short: "Write the configuration of a new gateway, with its key and an empty list of peers",
		Long: `Init writes a configuration with a listener of mode wireguard, and beside it
vpn.key, a new private key, and peers.conf, for "penstock gateway peer add". It
replaces nothing that is there.`,
		Example: `  penstock gateway init penstock.yaml
  penstock gateway peer add phone --config penstock.yaml --endpoint vpn.example.com --dns 9.9.9.9`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return initGateway(args[0], c.ErrOrStderr())
		},
	}
}

func initGateway(config string, notes io.Writer) (err error) {
	key, err := access.GenerateKey()
	if err != nil {
		return err
	}
	dir := filepath.Dir(config)
	var made []string
	defer func() {
		if err != nil {
			for _, path := range made {
				err = errors.Join(err, os.Remove(path))
			}
		}
	}()
	for _, f := range []struct {
		path, content string
		mode          fs.FileMode
	}{
		{config, newGatewayConfig, 0o644},
		{filepath.Join(dir, "vpn.key"), key.String() + "\n", 0o600},
		{filepath.Join(dir, "peers.conf"), "", 0o600},
	} {
		out, err := os.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.mode)
		if errors.Is(err, fs.ErrExist) {
			return cli.BadInput(fmt.Errorf("%s is there already; name a file in another directory, or remove it",
				f.path))
		}
		if err != nil {
			return err
		}
		made = append(made, f.path)
		_, err = io.WriteString(out, f.content)
		if err := errors.Join(err, out.Close()); err != nil {
			return err
		}
		fmt.Fprintf(notes, "made: %s\n", f.path)
	}
	fmt.Fprintf(notes, "next:\n  penstock gateway peer add NAME --config %s --endpoint HOST\n"+
		"  penstock run --config %[1]s\n", shellWord(config))
	return nil
}

// shellWord is a file's name as a shell takes it.
func shellWord(name string) string {
	if !strings.ContainsFunc(name, func(r rune) bool {
		return !strings.ContainsRune("/._-+,:@%", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}
