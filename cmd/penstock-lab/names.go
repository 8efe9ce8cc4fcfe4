package main

import (
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
)

// names is a flag that lists algorithms or senders, separated by commas. It may be repeated.
type names struct {
	list  *[]string // the default, until the flag is given
	given bool
}

// Set implements pflag.Value. What follows a comma and is a setting (NAME=VALUE) or a profile behind one belongs to
// the name before it. Each name counts once.
func (n *names) Set(text string) error {
	if !n.given {
		*n.list, n.given = nil, true
	}
	var these []string
	for word := range strings.SplitSeq(text, ",") {
		if last := len(these) - 1; last >= 0 && sets(these[last], word) {
			these[last] += "," + word
		} else {
			these = append(these, word)
		}
	}
	for _, name := range these {
		if !slices.Contains(*n.list, name) {
			*n.list = append(*n.list, name)
		}
	}
	return nil
}

// sets reports whether the word is a setting or a profile of the algorithm before it.
func sets(before, word string) bool {
	if strings.Contains(word, ":") {
		return false
	}
	if strings.Contains(word, "=") {
		return true
	}
	name, _, more := strings.Cut(before, ":")
	spec, err := cc.Lookup(name)
	return err == nil && more && slices.ContainsFunc(spec.Profiles, func(p cc.Profile) bool { return p.Name == word })
}

// Type implements pflag.Value.
func (n *names) Type() string { return "names" }

// String implements pflag.Value.
func (n *names) String() string {
	if n.list == nil {
		return ""
	}
	return strings.Join(*n.list, ",")
}
