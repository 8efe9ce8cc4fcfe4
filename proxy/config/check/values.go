package check

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// MaxName bounds names that become labels of metrics, in bytes.
const MaxName = 64

// maxHost bounds host names, in bytes (RFC 1035 §2.3.4).
const maxHost = 255

// Fraction is a part of a whole, above 0 up to 1, or 0 for none.
type Fraction float64

// ParseFraction reads a number such as 0.95.
func ParseFraction(s string) (Fraction, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= 0 && v <= 1) { // NaN is neither
		return 0, fmt.Errorf("%q is no part of a whole; write a number above 0, up to 1, such as 0.95, or 0 for none", s)
	}
	return Fraction(v), nil
}

// Strings returns words without their type.
func Strings[T ~string](values []T) []string {
	all := make([]string, len(values))
	for i, v := range values {
		all[i] = string(v)
	}
	return all
}

// Name checks that a name has letters, digits, - and _ only.
func Name(key, name string) error {
	if name == "" {
		return Errorf(key, "missing; give it a name of letters, digits, - and _")
	}
	odd := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
	}
	if len(name) > MaxName || strings.ContainsFunc(name, odd) {
		return Errorf(key, "%q: a name has at most %d letters, digits, - and _", name, MaxName)
	}
	return nil
}

// Taken are values that must be unique, with the keys that have them.
type Taken map[string]string

// Add adds a value, and returns an error if another key has it. Empty values may repeat.
func (t Taken) Add(key, value string) error {
	if other, taken := t[value]; taken && value != "" {
		return &Error{Key: key, Message: fmt.Sprintf("%q is already ", value), Other: other}
	}
	t[value] = key
	return nil
}

// AddSecret is Add for a value that no message may show.
func (t Taken) AddSecret(key, value string) error {
	if other, taken := t[value]; taken {
		return &Error{Key: key, Message: "it is already ", Other: other}
	}
	t[value] = key
	return nil
}

// Address checks a host:port to listen on. The host is an address, since a name may have several.
func Address(key, s string) error {
	if s == "" {
		return Errorf(key, "missing; write host:port, such as 127.0.0.1:1080 or [::]:7000")
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return Errorf(key, "%q is not host:port, such as 127.0.0.1:1080 or [::]:7000", s)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return Errorf(key, "port %q is not a number up to 65535", port)
	}
	if host == "" || host == "localhost" {
		return nil
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return Errorf(key, "%q is not an address of this machine, such as 127.0.0.1 or [::]", host)
	}
	return nil
}

// Target checks a host:port to connect to. The host is an address or a name.
func Target(key, s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return Errorf(key, "%q is not host:port, such as server.example:443", s)
	}
	if _, err := netip.ParseAddr(host); err != nil && (!IsHostName(host) || len(host) > maxHost) {
		return Errorf(key, "%q is neither an address nor a host name, such as server.example", host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return Errorf(key, "port %q is not a number from 1 to 65535", port)
	}
	return nil
}

// IsLoopback reports whether only this machine reaches an address of the configuration.
func IsLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

// IsHostName reports whether s has only bytes that a client's host name may have: letters, digits, hyphens and dots
// (RFC 1123 §2.1), and underscores, which do occur.
func IsHostName(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_'
	})
}

// IsDeviceName reports whether name is one that a network device may have (IFNAMSIZ); banned are the bytes that it may
// not have.
func IsDeviceName(name, banned string) bool {
	return len(name) <= MaxDevice && !strings.ContainsAny(name, banned) && name != "." && name != ".."
}

// MaxDevice is what a network device's name has room for: IFNAMSIZ without its terminating zero, in bytes.
const MaxDevice = 15
