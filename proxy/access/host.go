package access

import "strings"

// HostBytes reports whether s has only bytes that a client's host name may have: letters, digits, hyphens and dots
// (RFC 1123 §2.1), and underscores, which do occur.
func HostBytes(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_'
	})
}
