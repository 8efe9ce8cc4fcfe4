package layout

import (
	"path"
	"regexp"
	"slices"
	"strings"
)

// placeName finds what a page calls a folder or a file of this module: a path that begins with a folder of the top
// level, or the name of a Go file, with or without its folder.
var placeName = regexp.MustCompile(`\w[\w./-]*\w`)

// mayBeMissing is how many of them may be gone.
const mayBeMissing = 0

// placesIn returns the folders and files that a page names, each once.
func placesIn(page string) (places []string) {
	for _, found := range placeName.FindAllString(page, -1) {
		top, _, nested := strings.Cut(found, "/")
		isPath := nested && slices.Contains(directories, top)
		if (isPath || path.Ext(found) == ".go") && !slices.Contains(places, found) {
			places = append(places, found)
		}
	}
	return places
}

// missingPlaces returns those that the tree has not. The files of the tree are given by their paths. A place exists
// when it is a file or a folder there, or the last part of a file's path.
func missingPlaces(places, tree []string) (missing []string) {
	for _, place := range places {
		if !slices.ContainsFunc(tree, func(file string) bool {
			return file == place || strings.HasPrefix(file, place+"/") || strings.HasSuffix(file, "/"+place)
		}) {
			missing = append(missing, place)
		}
	}
	return missing
}
