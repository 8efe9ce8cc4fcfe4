package access

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestKeysAreWrittenAsWgWritesThem(t *testing.T) {
	private, err := GenerateKey()
	require.NoError(t, err)
	public, err := private.Public()
	require.NoError(t, err)
	again, err := ParseKey(private.String())
	require.NoError(t, err)
	assert.Equal(t, private, again)
	assert.NotEqual(t, private, public)
	for _, bad := range []string{"", "abc", private.Hex(), private.String()[1:]} {
		_, err := ParseKey(bad)
		assert.Error(t, err, bad)
	}
}
