package config

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
)

// CheckReload finds what differs in next and cannot change while the proxy runs, but for
// what listeners are. What may has the tag reload:"yes". The error is an *Error.
func (c Config) CheckReload(next Config) error {
	var key string
	compare := func() { key = firstChange("", reflect.ValueOf(c), reflect.ValueOf(next)) }
	if mistake := new(reading).runRecovering(nil, compare); mistake != nil {
		return mistake
	}
	return cannotChange(key)
}

// CheckReload is that of Config for listener i of next, which is at the place of l.
func (l Listener) CheckReload(i int, next Listener) error {
	key := ""
	switch {
	case l.Mode.Tunnels():
		key = firstChange("", reflect.ValueOf(l), reflect.ValueOf(next))
	case l.KeepClient != next.KeepClient && l.Mode == next.Mode:
		key = "keep_client" // the privilege for it may be gone
	}
	if key == "" {
		return nil
	}
	return cannotChange(fmt.Sprintf("listeners[%d].%s", i, key))
}

// SamePlace reports whether two listeners are at one socket or device: then what is
// open need not be opened again.
func (l Listener) SamePlace(other Listener) bool {
	if l.Mode.Tunnels() || other.Mode.Tunnels() {
		return l.Mode == other.Mode && l.Address == other.Address && l.Device == other.Device
	}
	return l.Address == other.Address
}

// Excludes reports whether two listeners are tunnels that cannot be open at once, since
// they have one port or one device.
func (l Listener) Excludes(other Listener) bool {
	device := func(l *Listener) string {
		if l.Mode == access.WireGuard && l.WireGuard.Path() != DatapathNetstack {
			return l.Interface()
		}
		return l.Device
	}
	return l.Mode.Tunnels() && other.Mode.Tunnels() && (l.Address != "" && l.Address == other.Address ||
		device(&l) != "" && device(&l) == device(&other))
}

// cannotChange is about a key; nil for none.
func cannotChange(key string) error {
	if key == "" {
		return nil
	}
	return places(nil).locateError(keyErrorf(key, "cannot change while running; put the old value back, or restart the "+
		"proxy"))
}

// firstChange returns the first key of a section that differs, but for those
// that may.
func firstChange(section string, a, b reflect.Value) string {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		key, x, y := section+name, a.Field(i), b.Field(i)
		switch {
		case f.Tag.Get("reload") != "":
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
