//go:build packaging

package main

import "github.com/penstock-net/penstock/internal/cli"

// init adds what packages alone need: "make packages" builds the program with it.
func init() { packaging = append(packaging, cli.ManualCommand(nil)) }
