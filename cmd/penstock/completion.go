package main

import (
	"net"
	"net/http"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/telemetry"
)

// algorithmNames lists the algorithms with what they are, for shells.
func algorithmNames() (names []string) {
	for _, s := range cc.Specs() {
		names = append(names, s.Name+"\t"+s.About)
	}
	return names
}

// interfaceNames lists the interfaces of this machine, for shells.
func interfaceNames() (names []string) {
	all, _ := net.Interfaces() // without them there is nothing to propose
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names
}

// oneOf returns words, for shells.
func oneOf[T ~string](words ...T) func() []string {
	return func() []string { return check.Strings(words) }
}

// ruleNames asks the running proxy for its rules, for shells. A shell that waits shows no error.
func (a *proxyAddress) ruleNames(cmd *cobra.Command) (names []string) {
	var rules telemetry.Rules
	if a.askJSON(cmd.Context(), cmd, http.MethodGet, "/v1/rules", &rules) != nil {
		return nil
	}
	for _, r := range rules.Rules {
		names = append(names, telemetry.RuleName(r.Name))
	}
	return names
}

// completeRunFlags lets shells complete the flags of run. A flag with a key in the configuration has the choices of
// that key.
func completeRunFlags(cmd *cobra.Command) {
	cli.CompleteFlag(cmd, "algorithm", algorithmNames)
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if s, ok := f.Value.(scalar); ok && config.Choices(s.value) != nil {
			cli.CompleteFlag(cmd, f.Name, oneOf(config.Choices(s.value)...))
		}
	})
}
