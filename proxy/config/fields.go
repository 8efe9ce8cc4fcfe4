package config

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// fieldsOf returns the fields of a struct by key, those of inlined structs among them.
func fieldsOf(t reflect.Type) map[string]reflect.StructField {
	fields := map[string]reflect.StructField{}
	for f := range t.Fields() {
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if opts == "inline" {
			maps.Copy(fields, fieldsOf(f.Type))
			continue
		}
		if name != "" && name != "-" { // other fields have no key
			fields[name] = f
		}
	}
	return fields
}

// fieldIn is a field with its value in a configuration.
type fieldIn struct {
	reflect.StructField
	value reflect.Value
}

// fieldsIn yields the fields of v and of all structs in it, with their keys; key is v's.
func fieldsIn(key string, v reflect.Value) iter.Seq2[string, fieldIn] {
	return func(yield func(string, fieldIn) bool) { eachField(key, v, yield) }
}

// eachField yields the fields of v, outer before inner ones, and reports whether yield wants more.
func eachField(key string, v reflect.Value, yield func(string, fieldIn) bool) bool {
	switch v.Kind() {
	case reflect.Slice:
		for i := range v.Len() {
			if !eachField(fmt.Sprintf("%s[%d]", key, i), v.Index(i), yield) {
				return false
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			at := strings.TrimPrefix(key+"."+name, ".")
			if opts == "inline" {
				at = key
			}
			if !yield(at, fieldIn{f, v.Field(i)}) || !eachField(at, v.Field(i), yield) {
				return false
			}
		}
	}
	return true
}

// checkTags refuses numbers outside the bounds in their fields' tags, and secrets that are given both in the
// configuration and in a file. A number of 0 counts as left out.
func checkTags(key string, v reflect.Value) error {
	var errs []error
	given := map[string]bool{} // secrets, by key
	for at, f := range fieldsIn(key, v) {
		if n := reflect.Indirect(f.value); n.Kind() == reflect.Int && !n.IsZero() {
			if wrong := outsideBounds(f.StructField, int(n.Int())); wrong != "" {
				errs = append(errs, check.Errorf(at, "%s", wrong))
			}
		}
		if f.Tag.Get("secret") == "true" {
			if given[at] = !f.value.IsZero(); given[at] {
				errs = append(errs, checkSecret(at, f.value))
			}
		} else if secret, ok := strings.CutSuffix(at, "_file"); ok && given[secret] && !f.value.IsZero() {
			name := secret[strings.LastIndexByte(secret, '.')+1:]
			errs = append(errs, check.Errorf(at, "give %s or %s_file, not both", name, name))
		}
	}
	return errors.Join(errs...)
}

// checkSecret calls the value's Validate, if it has one.
func checkSecret(key string, v reflect.Value) error {
	if s, ok := v.Interface().(interface{ Validate() error }); ok {
		if err := s.Validate(); err != nil {
			return check.Errorf(key, "%v", err)
		}
	}
	return nil
}

// numberBounds returns the bounds in the tags of a field; nil: there is none.
func numberBounds(f reflect.StructField) (least, most *int) {
	read := func(tag string) *int {
		if v, err := strconv.Atoi(f.Tag.Get(tag)); err == nil {
			return &v
		}
		return nil
	}
	return read("min"), read("max")
}

// outsideBounds says what is wrong with a number in the field; empty: nothing.
func outsideBounds(f reflect.StructField, v int) string {
	least, most := numberBounds(f)
	switch {
	case least != nil && v < *least && most == nil:
		return fmt.Sprintf("%d is less than %d", v, *least)
	case least != nil && v < *least, most != nil && v > *most:
		return fmt.Sprintf("%d is outside %d to %d", v, *least, *most)
	}
	return ""
}

// A field with the tag secret:"true" holds what no other may see: its value
// is kept out of messages. A field with secret:"pem" holds that or the name of a file.

// inlineSecret returns the key of a secret that stands in the configuration
// itself; empty: there is none.
func inlineSecret(key string, v reflect.Value) string {
	for at, f := range fieldsIn(key, v) {
		switch f.Tag.Get("secret") {
		case "true":
			if !f.value.IsZero() {
				return at
			}
		case "pem":
			if strings.Contains(f.value.String(), check.PEMBegin) {
				return at
			}
		}
	}
	return ""
}

// hasSecrets reports whether values of the type are, or directly hold, secrets;
// deep: or hold them anywhere. Then a misplaced value may be a secret, and messages do not show it.
func hasSecrets(t reflect.Type, deep bool) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return false
	}
	for f := range t.Fields() {
		if f.Tag.Get("secret") != "" || deep && hasSecrets(f.Type, deep) {
			return true
		}
	}
	return false
}
