package need

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestAUserNamespaceHasTheUsersOfItsMap(t *testing.T) {
	for lines, want := range map[string]bool{
		"         0          0 4294967295\n": true,
		"         0       1001          1\n": false,
		"0 1001 1\n1 100000 65536\n":         true,
		"0 1001 1\n1 100000 65533\n":         false,
		"":                                   false,
		"none\n":                             false,
	} {
		assert.Equal(t, want, maps(lines, otherUser), lines)
	}
}
