package config

import (
	"fmt"
	"net"
	"reflect"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
)

// CheckReload finds what differs in next and cannot change while the proxy runs, but for
// what listeners are. What may has the tag reload:"yes", or reload:"sockets" if it may of all listeners but tunnels.
// The error is an *Error.
func (c Config) CheckReload(next Config) error {
	var key string
	compare := func() { key = firstChange("", reflect.ValueOf(c), reflect.ValueOf(next)) }
	if mistake := new(reading).runRecovering(nil, compare); mistake != nil {
		return mistake
	}
	return cannotChange(key)
}

// CheckReload finds what differs in next, which is listener i of a configuration and the same listener as l, and
// cannot change while l is open. Of a tunnel that is all that says where it is and what it is. The error is an *Error.
func (l Listener) CheckReload(i int, next Listener) error {
	switch {
	case l.Mode.Tunnels():
		if key := firstChange("", reflect.ValueOf(l), reflect.ValueOf(next)); key != "" {
			return reloadErrorf(fmt.Sprintf("listeners[%d].%s", i, key), "cannot change while the tunnel of listener %q runs; put "+
				"the old value back, restart the proxy, or add a second listener beside it", l.Name)
		}
	case l.KeepClient != next.KeepClient && l.Mode == next.Mode: // the privilege for it may be gone
		return cannotChange(fmt.Sprintf("listeners[%d].keep_client", i))
	}
	return nil
}

// IsSame reports whether next, of a later configuration, is the listener l: then what is open need not be opened
// again. A tunnel is known by its name, a socket by its address.
func (l Listener) IsSame(next Listener) bool {
	if l.Mode.Tunnels() {
		return l.Name == next.Name
	}
	return !next.Mode.Tunnels() && l.Address == next.Address
}

// CheckRoom refuses next, which is listener i of a configuration and is to be opened, while the tunnel l has its port or
// device. The error is an *Error.
func (l Listener) CheckRoom(i int, next Listener) error {
	if !l.Mode.Tunnels() || !next.Mode.Tunnels() {
		return nil
	}
	device := func(l *Listener) string {
		if l.Mode == access.WireGuard && l.WireGuard.Path() != DatapathNetstack {
			return l.Interface()
		}
		return l.Device
	}
	var key string
	switch _, port, _ := net.SplitHostPort(next.Address); {
	case next.Address != "" && port != "0" && l.Address == next.Address:
		key = "address"
	case device(&l) != "" && device(&l) == device(&next):
		key = "device"
	default:
		return nil
	}
	return reloadErrorf(fmt.Sprintf("listeners[%d].%s", i, key), "the tunnel of listener %q has it until its connections have "+
		"ended; restart the proxy, or choose another", l.Name)
}

// cannotChange is about a key; nil for none.
func cannotChange(key string) error {
	if key == "" {
		return nil
	}
	return reloadErrorf(key, "cannot change while running; put the old value back, or restart the proxy")
}

func reloadErrorf(key, format string, args ...any) error {
	return places(nil).locateError(keyErrorf(key, format, args...))
}

// firstChange returns the first key of a section that differs, but for those
// that may.
func firstChange(section string, a, b reflect.Value) string {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		key, x, y := section+name, a.Field(i), b.Field(i)
		switch {
		case f.Tag.Get("reload") == "yes":
		case f.Type.Kind() == reflect.Struct && mayChange(f.Type):
			if changed := firstChange(key+".", x, y); changed != "" {
				return changed
			}
		case f.Type.Kind() == reflect.Slice && x.Len() == y.Len(): // both may be empty, left out or written as such
			for j := range x.Len() {
				if mayChange(f.Type.Elem()) {
					if changed := firstChange(fmt.Sprintf("%s[%d].", key, j), x.Index(j), y.Index(j)); changed != "" {
						return changed
					}
				} else if !reflect.DeepEqual(x.Index(j).Interface(), y.Index(j).Interface()) {
					return key
				}
			}
		case !reflect.DeepEqual(x.Interface(), y.Interface()):
			return key
		}
	}
	return ""
}

// mayChange reports whether a section has keys that may change while running.
func mayChange(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	for f := range t.Fields() {
		if f.Tag.Get("reload") != "" || mayChange(f.Type) {
			return true
		}
	}
	return false
}
