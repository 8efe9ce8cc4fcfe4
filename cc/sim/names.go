package sim

import (
	"fmt"
	"slices"
)

// nameOf is a value's name in a list; one without is called by its type and number.
func nameOf[T ~uint8](names []string, v T, kind string) string {
	if int(v) < len(names) {
		return names[v]
	}
	return fmt.Sprintf("%s(%d)", kind, uint8(v))
}

// valueOf is the value of a name in a list; an unknown name is put into the mistake.
func valueOf[T ~uint8](names []string, name, mistake string) (T, error) {
	i := slices.Index(names, name)
	if i < 0 {
		return 0, fmt.Errorf(mistake, name)
	}
	return T(i), nil //nolint:gosec // a few names
}
