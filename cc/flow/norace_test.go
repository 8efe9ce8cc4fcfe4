//go:build !race

package flow

const raced = false
