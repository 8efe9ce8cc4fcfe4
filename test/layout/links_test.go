package layout

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	fences   = regexp.MustCompile("(?ms)^[ ]*```.*?^[ ]*```")
	headings = regexp.MustCompile(`(?m)^#+ (.*)$`)
	// links has the target's file and its anchor, of links that lead to no other host.
	links = regexp.MustCompile(`\]\(([^)#\s:]*)(?:#([^)\s]+))?\)`)
	// named are pages that code, messages and examples name.
	named = regexp.MustCompile(`docs/[\w/-]+\.md`)
)

// anchors returns the names by which links reach the headings of a page.
func anchors(page string) map[string]bool {
	found := map[string]bool{}
	for _, h := range headings.FindAllStringSubmatch(fences.ReplaceAllString(page, ""), -1) {
		name := regexp.MustCompile(`[^\w\- ]`).ReplaceAllString(strings.ToLower(h[1]), "")
		found[strings.ReplaceAll(name, " ", "-")] = true
	}
	return found
}

func TestLinksOfThePagesLeadSomewhere(t *testing.T) {
	checked := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md"} {
		pages, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		for _, path := range pages {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			for _, link := range links.FindAllStringSubmatch(fences.ReplaceAllString(string(text), ""), -1) {
				checked++
				target := path
				if link[1] != "" {
					target = filepath.Join(filepath.Dir(path), link[1])
				}
				if _, err := os.Stat(target); !assert.NoError(t, err, "%s: %s", path, link[0]) || link[2] == "" {
					continue
				}
				page, err := os.ReadFile(target)
				require.NoError(t, err)
				assert.True(t, anchors(string(page))[link[2]], "%s: %s: no such heading", path, link[0])
			}
		}
	}
	assert.Greater(t, checked, 50)
}

// writtenTogether bounds the bytes of all pages that are written by hand, but for pages whose reference is generated.
const writtenTogether = 130_000

// references are generated, but for their beginnings.
var references = []string{"configuration.md", "metrics.md", "http-api.md", "algorithms.md"}

func TestPagesStayShort(t *testing.T) {
	together := 0
	for pattern, most := range map[string]int{
		"README.md": 5_850, "CONTRIBUTING.md": 2_100, "SECURITY.md": 1_400, "docs/*.md": 9_750, "docs/decisions/*.md": 4_200,
	} {
		pages, err := filepath.Glob(filepath.Join(root, pattern))
		require.NoError(t, err)
		require.NotEmpty(t, pages)
		for _, path := range pages {
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			written, _, _ := strings.Cut(string(text), "<!-- Generated")
			if !slices.Contains(references, filepath.Base(path)) {
				together += len(written)
			}
			assert.LessOrEqual(t, len(written), most, "bytes of %s that are written by hand", path)
		}
	}
	assert.LessOrEqual(t, together, writtenTogether, "bytes of all pages that are written by hand")
}

func TestPagesThatFilesNameAreThere(t *testing.T) {
	checked := 0
	for _, path := range filesBelow(t, directories...) {
		if strings.HasPrefix(path, "test/layout/") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, path))
		require.NoError(t, err)
		for _, page := range named.FindAllString(string(text), -1) {
			checked++
			assert.FileExists(t, filepath.Join(root, page), "%s names it", path)
		}
	}
	assert.Greater(t, checked, 10)
}
