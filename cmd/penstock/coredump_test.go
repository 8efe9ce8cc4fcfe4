package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestThereAreNoCoreDumps(t *testing.T) {
	var before, after unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_CORE, &before))
	t.Cleanup(func() { assert.NoError(t, unix.Setrlimit(unix.RLIMIT_CORE, &before)) })
	require.NoError(t, unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: before.Max, Max: before.Max}))
	forbidCoreDumps()
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_CORE, &after))
	assert.Equal(t, unix.Rlimit{Cur: 0, Max: before.Max}, after)
}
