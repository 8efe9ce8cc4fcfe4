package access

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTokensAreReadLineByLine(t *testing.T) {
	phone, tablet := Token{"phone", "phone-0123456789abcdef"}, Token{"tablet", "tablet-0123456789abcdef"}
	got, err := ParseTokens(strings.NewReader("# who\n\nphone " + phone.Value + "\n  tablet\t" + tablet.Value + "  " +
		"\r\n"))
	require.NoError(t, err)
	assert.Equal(t, []Token{phone, tablet}, got)
	for want, text := range map[string]string{
		"line 2 is not a name and a token": "phone " + phone.Value + "\nsecret-that-must-not-show",
		"line 1: a token has 16 to 4096":   "phone short",
		"have the same token":              fmt.Sprintf("a %s\nb %s", phone.Value, phone.Value),
		"too long":                         strings.Repeat("x", 3*maxLineLen),
	} {
		_, err := ParseTokens(strings.NewReader(text))
		require.ErrorContains(t, err, want)
		assert.NotContains(t, err.Error(), "secret")
	}
}
