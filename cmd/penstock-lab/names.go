package main

import "strings"

// names is a flag that lists algorithms or senders, separated by commas. It may be repeated.
type names struct {
	list  *[]string // the default, until the flag is given
	given bool
}

// Set implements pflag.Value. What follows a comma and is a setting (NAME=VALUE) belongs to the name before it.
func (n *names) Set(text string) error {
	if !n.given {
		*n.list, n.given = nil, true
	}
	for word := range strings.SplitSeq(text, ",") {
		if last := len(*n.list) - 1; last >= 0 && strings.Contains(word, "=") && !strings.Contains(word, ":") {
			(*n.list)[last] += "," + word
		} else {
			*n.list = append(*n.list, word)
		}
	}
	return nil
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
