//go:build linux

package bpf

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheFilterForTOSBytesLoads(t *testing.T) {
	if err := Check(); err != nil {
		t.Skip(err)
	}
	f, err := OpenTOSFilter()
	require.NoError(t, err)
	assert.NoError(t, f.Close())
}
