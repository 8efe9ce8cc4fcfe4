package config

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestEachTextIsAboutAKey(t *testing.T) {
	var keys []string
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(of reflect.Type) {
		switch of.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			visit(of.Elem())
		case reflect.Struct:
			if _, scalar := scalars[of]; scalar || seen[of] {
				return
			}
			seen[of] = true
			for f := range of.Fields() {
				if name := f.Tag.Get("yaml"); name != ",inline" {
					keys = append(keys, of.PkgPath()+"."+of.Name()+"."+name)
				}
				visit(f.Type)
			}
		}
	}
	visit(reflect.TypeFor[Config]())
	assert.ElementsMatch(t, keys, slices.Collect(maps.Keys(keyComments())))
}
