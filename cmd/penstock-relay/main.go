// Penstock-relay is the end in the network of connections from phones that use package alcc/mobile. It serves those who
// know its token, and reaches public addresses alone unless -allow names others (package alcc/relay).
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/penstock-net/penstock/alcc/relay"
)

// main runs until SIGINT or SIGTERM. It exits with 1 after an error.
func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := runRelay(ctx, os.Args[1:], os.Stderr); {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "penstock-relay:", err)
		os.Exit(1)
	}
}

// usage stands before the flags in what -help prints.
const usage = `Usage: penstock-relay -token-file FILE -certificate FILE -key FILE [-listen ADDRESS:PORT]

Carries connections of phones that know the token to public addresses, with an
algorithm of Penstock on what goes to the phones. Phones run package
github.com/penstock-net/penstock/alcc/mobile.

`

// flagOfOption puts flags in the place of the library's names for them.
var flagOfOption = strings.NewReplacer("relay: Server.Token has", "-token-file: the token has",
	"relay: Server.MaxConnections", "-max-connections", "alcc: Options.Algorithm", "-algorithm")

// runRelay relays until ctx ends, and prints to out where it listens. Errors name the flag.
func runRelay(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("penstock-relay", flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		fmt.Fprint(out, usage)
		flags.PrintDefaults()
	}
	listen := flags.String("listen", ":8443", "`ADDRESS:PORT` for phones")
	tokenFile := flags.String("token-file", "", "`FILE` with the token in its first line, 16 bytes or more")
	certificate := flags.String("certificate", "", "`FILE` with the certificate for TLS and what stands above it, in "+
		"PEM")
	key := flags.String("key", "", "`FILE` with the certificate's key")
	plain := flags.Bool("plain", false, "no TLS, so that who is on the path reads the token")
	var server relay.Server
	flags.StringVar(&server.Algorithm, "algorithm", "penstock", "what decides on what goes to phones")
	flags.IntVar(&server.MaxConnections, "max-connections", 0, "how many at once; 0: 1024")
	flags.Func("allow", "`PREFIX` of destinations beside public addresses; repeat for several",
		func(text string) error {
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				return errors.New("write a prefix such as 10.0.0.0/8, or 192.0.2.7/32 for one address")
			}
			server.Allow = append(server.Allow, prefix)
			return nil
		})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("there is nothing to do with %q", flags.Arg(0))
	}
	// The token comes from a file, since a command line can be read by all users of the machine.
	if *tokenFile == "" {
		return errors.New("-token-file is missing: a relay without a token would be open to all")
	}
	text, err := os.ReadFile(*tokenFile)
	if err != nil {
		return fmt.Errorf("-token-file: %w", err)
	}
	// Editors end the line, and a token may be followed by a note on whom it was given to.
	first, _, _ := strings.Cut(string(text), "\n")
	server.Token = strings.TrimSpace(first)
	if err := server.Validate(); err != nil {
		return errors.New(flagOfOption.Replace(err.Error()))
	}
	if _, _, err := net.SplitHostPort(*listen); err != nil {
		return fmt.Errorf("-listen: %q is not ADDRESS:PORT, such as :8443", *listen)
	}
	var config *tls.Config // nil: no TLS
	if !*plain {
		if *certificate == "" || *key == "" {
			return errors.New("-certificate and -key are missing: give both, or -plain, where nobody is on the path")
		}
		pair, err := tls.LoadX509KeyPair(*certificate, *key)
		if err != nil {
			return fmt.Errorf("-certificate and -key: %w", err)
		}
		config = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}
	}
	ln, err := net.Listen("tcp", *listen)
	if err != nil {
		return fmt.Errorf("-listen: %w", err)
	}
	// With port 0 the system chooses, so the address that was given does not do.
	fmt.Fprintf(out, "penstock-relay: listening on %v\n", ln.Addr())
	if config != nil {
		ln = tls.NewListener(ln, config)
	}
	return server.Serve(ctx, ln)
}
