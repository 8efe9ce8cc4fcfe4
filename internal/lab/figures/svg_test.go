package figures

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestALabelIsShownAsItIs(t *testing.T) {
	svg, err := SVG(NewPlot("", ""), `$0 and ${rate}, #000000 & "x"`)
	require.NoError(t, err)
	assert.Contains(t, svg, `<svg role="img" aria-label="$0 and ${rate}, #000000 &amp; &#34;x&#34;"`)
}
