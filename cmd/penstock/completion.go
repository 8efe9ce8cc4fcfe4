package main

import (
	"net"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
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
func oneOf(words ...string) func() []string { return func() []string { return words } }

// ruleNames asks the running proxy for its rules, for shells. A shell that waits shows no error.
func (a *proxyAddress) ruleNames(cmd *cobra.Command) (names []string) {
	var rules telemetry.Rules
	if a.askJSON(cmd.Context(), cmd, http.MethodGet, "/v1/rules", &rules) != nil {
		return nil
	}
	for _, r := range rules.Rules {
		names = append(names, ruleName(r.Name))
	}
	return names
}

// completeRunFlags has shells complete the flags of run.
func completeRunFlags(cmd *cobra.Command) {
	cli.CompleteFlag(cmd, "algorithm", algorithmNames)
	cli.CompleteFlag(cmd, "envelope", oneOf("auto", "ebpf", "bbr", "cubic", "reno"))
	cli.CompleteFlag(cmd, "log-level", oneOf("debug", "info", "warn", "error"))
	cli.CompleteFlag(cmd, "log-format", oneOf("text", "json", "auto"))
}
