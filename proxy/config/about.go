package config

import (
	_ "embed" // of the texts
	"reflect"
	"strings"
	"sync"
)

//go:embed about.txt
var aboutFile string

// abouts says what keys are for, by the type of this package and the key: "Listener.allow".
var abouts = sync.OnceValue(func() map[string]string {
	texts := map[string]string{}
	key := ""
	for line := range strings.Lines(aboutFile) {
		switch text := strings.TrimSpace(line); {
		case text == "" || line[0] == '#':
		case line[0] != ' ':
			key = text
		case texts[key] == "":
			texts[key] = text
		default:
			texts[key] += " " + text
		}
	}
	return texts
})

// aboutKey says what a key of a struct, or of one that is inlined there, is for; empty:
// nothing does.
func aboutKey(t reflect.Type, key string) string {
	if text := abouts()[t.Name()+"."+key]; text != "" {
		return text
	}
	for f := range t.Fields() {
		if _, opts, _ := strings.Cut(f.Tag.Get("yaml"), ","); opts == "inline" {
			if text := aboutKey(f.Type, key); text != "" {
				return text
			}
		}
	}
	return ""
}
