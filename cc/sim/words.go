package sim

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// arguments are the words of a line after the first.
type arguments struct {
	directive string
	words     []string
}

// next reads a word that stands in its place.
func (a *arguments) next(take func(string) error) error {
	if len(a.words) == 0 {
		return fmt.Errorf("%s lacks a word", a.directive)
	}
	word := a.words[0]
	a.words = a.words[1:]
	return take(word)
}

// each reads the rest: pairs of a key and its value.
func (a *arguments) each(keys map[string]func(string) error) error {
	seen := map[string]bool{}
	for len(a.words) > 0 {
		key := a.words[0]
		take := keys[key]
		switch {
		case take == nil:
			return fmt.Errorf("%s has no %q; it has %s", a.directive, key, sortedKeys(keys))
		case seen[key]:
			return fmt.Errorf("%s has %q twice", a.directive, key)
		case len(a.words) == 1:
			return fmt.Errorf("%s: %s lacks its value", a.directive, key)
		}
		seen[key] = true
		if err := take(a.words[1]); err != nil {
			return fmt.Errorf("%s: %s: %w", a.directive, key, err)
		}
		a.words = a.words[2:]
	}
	return nil
}

// flag takes out a word that stands alone, in the place of a key, and reports
// whether it was there.
func (a *arguments) flag(word string) bool {
	for i := 0; i < len(a.words); i += 2 {
		if a.words[i] == word {
			a.words = slices.Delete(slices.Clone(a.words), i, i+1)
			return true
		}
	}
	return false
}

func (a *arguments) end() error {
	if len(a.words) > 0 {
		return fmt.Errorf("%s: %q is too much", a.directive, strings.Join(a.words, " "))
	}
	return nil
}

// set returns a function that parses a word into v.
func set[T any](v *T, parse func(string) (T, error)) func(string) error {
	return func(s string) (err error) {
		*v, err = parse(s)
		return err
	}
}

func parseWord(s string) (string, error) { return s, nil }

func parseSpan(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 || d > 24*time.Hour {
		return 0, fmt.Errorf("%q is not a time such as 40ms or 30s", s)
	}
	return d, nil
}

// parseAckDelay may be none, which AckDelay has another word for.
func parseAckDelay(s string) (time.Duration, error) {
	d, err := parseSpan(s)
	if d == 0 {
		d = AckAtOnce
	}
	return d, err
}

// parseTick may be none.
func parseTick(s string) (time.Duration, error) {
	if s == "off" {
		return NoTimestamps, nil
	}
	d, err := parseSpan(s)
	if err == nil && d == 0 {
		err = fmt.Errorf("a clock needs a tick such as 1ms; off: no clock")
	}
	return d, err
}

func parseSkew(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(math.Abs(v) <= maxClockSkew) {
		return 0, fmt.Errorf("%q is not a number of millionths from -%v to %v", s, maxClockSkew, maxClockSkew)
	}
	return v, nil
}

func parseSeed(s string) (uint64, error) {
	v, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a seed: a whole number, 0 or above", s)
	}
	return v, nil
}

func parseCount(s string) (int, error) {
	v, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is not a whole number from 0 to 65535", s)
	}
	return int(v), nil
}

func parseFraction(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(v) || v < 0 || v >= 1 {
		return 0, fmt.Errorf("%q is not a fraction from 0 to less than 1", s)
	}
	return v, nil
}

// parsePart may be all, unlike a fraction that would leave nothing.
func parsePart(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= 0 && v <= 1) {
		return 0, fmt.Errorf("%q is not a part from 0 to 1", s)
	}
	return v, nil
}

func parseShare(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v > 0 && v <= 1) {
		return 0, fmt.Errorf("%q is not a share above 0, up to 1", s)
	}
	return v, nil
}

// ParseQueue reads the limit of a queue: packets ("100pkt") or bytes ("2MB").
func ParseQueue(s string) (bytes cc.Bytes, packets int, err error) {
	if n, ok := strings.CutSuffix(s, "pkt"); ok {
		v, err := strconv.ParseUint(n, 10, 31)
		if err != nil {
			return 0, 0, fmt.Errorf("%q is not a number of packets such as 100pkt", s)
		}
		return 0, int(v), nil
	}
	bytes, err = cc.ParseBytes(s)
	if err != nil {
		return 0, 0, fmt.Errorf("%w or 100pkt", err)
	}
	return bytes, 0, nil
}
