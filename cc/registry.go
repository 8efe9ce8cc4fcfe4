package cc

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Params are an algorithm's settings by name. A setting with Choices holds the
// index of the choice.
type Params map[string]float64

// Param describes one setting.
type Param struct {
	Name     string
	About    string
	Unit     string // "packets", "ms", "1/packet", …; empty: a plain number
	Default  float64
	Min, Max float64  // inclusive; ignored where there are Choices
	Choices  []string // the named values; the number is an index into them
}

// Profile is a named set of settings that belong together.
type Profile struct {
	Name, About string
	Params      Params
}

// Internal describes one value that an algorithm shows in traces.
type Internal struct {
	Name  string // as in a trace, its unit last: "velocity", "target_packets"
	About string
}

// Signal is an input that an algorithm needs, or an action that it needs the caller to perform.
type Signal string

// The signals there are.
const (
	NeedsRTT    Signal = "rtt"           // a sample of the round trip with most acknowledgements
	NeedsRate   Signal = "delivery_rate" // over the flight of each
	NeedsLoss   Signal = "loss"          // and timeouts
	NeedsSent   Signal = "sent"          // the window in force when the newest acknowledged byte left
	NeedsTicks  Signal = "ticks"         // calls of OnTick
	NeedsPacing Signal = "pacing"        // enforcement of its rate, not only of its window
	// hints of the network about the path; without them another algorithm's rules apply
	NeedsHints Signal = "hints"
)

// Spec is one registered algorithm.
type Spec struct {
	Name     string
	About    string // one sentence
	Source   string // paper or RFC with section
	Params   []Param
	Profiles []Profile
	// Check says whether the values of a complete set, each in range, go together; nil: they always do.
	Check func(Params) error
	New   func(Config) Algorithm

	Needs     []Signal   // beyond acknowledged bytes
	Internals []Internal // what its Inspect shows; empty: it is no Inspector
	Marks     Marks      // how ECN marks are answered
	L4S       bool       // it is made for packets that say ECT(1) (RFC 9331)
	Fixed     bool       // it has constant limits, which are its settings
}

// Scales reports whether the algorithm answers marks on ECT(1) packets in proportion, which
// RFC 9331 §4.3 demands of a sender of such packets.
func (s Spec) Scales() bool { return s.L4S || s.Marks == MarksLowerCeiling }

// Default is the algorithm where the configuration names none (docs/decisions/0004-own-algorithm.md).
const Default = "penstock"

// CheckReceives returns an error if the algorithm cannot decide the window that a receiver advertises,
// because it needs signals that a receiver does not have.
func (s Spec) CheckReceives() error {
	if s.canReceive() {
		return nil
	}
	var can []string
	for _, other := range Specs() {
		if other.canReceive() {
			can = append(can, other.Name)
		}
	}
	return fmt.Errorf("%s does not go as the algorithm of a receive window, since nobody paces there, and hints "+
		"are about the other way; there are %s", s.Name, strings.Join(can, ", "))
}

func (s Spec) canReceive() bool {
	return !slices.Contains(s.Needs, NeedsPacing) && !slices.Contains(s.Needs, NeedsHints)
}

var registry = map[string]Spec{}

// Register adds an algorithm. It is called from init and panics on a name that is taken.
func Register(s Spec) {
	if _, taken := registry[s.Name]; taken || s.Name == "" || s.New == nil {
		panic("cc: cannot register algorithm " + strconv.Quote(s.Name))
	}
	registry[s.Name] = s.Answering()
}

// families make the algorithms with names of the form word:member.
var families = map[string]func(member string) (Spec, error){}

// RegisterFamily adds algorithms with names of the form word:member, such as ccp:NAME for the agent of
// that name. spec returns the one of a member. It is called from init and panics on a word that is taken.
func RegisterFamily(word string, spec func(member string) (Spec, error)) {
	_, taken := registry[word]
	if families[word] != nil || taken || spec == nil {
		panic("cc: cannot register algorithms " + strconv.Quote(word+":"))
	}
	families[word] = spec
}

// Specs returns every algorithm, sorted by name, but none of a family.
func Specs() []Spec {
	return slices.SortedFunc(maps.Values(registry), func(a, b Spec) int { return strings.Compare(a.Name, b.Name) })
}

// Lookup returns the algorithm with that name; the error lists the names there are.
func Lookup(name string) (Spec, error) {
	if s, ok := registry[name]; ok {
		return s, nil
	}
	if word, member, named := strings.Cut(name, ":"); named && families[word] != nil {
		return families[word](member)
	}
	names := slices.Sorted(maps.Keys(registry))
	if n := Nearest(name, names); n != "" {
		return Spec{}, fmt.Errorf("no algorithm %q; did you mean %s? There are %s", name, n, strings.Join(names, ", "))
	}
	return Spec{}, fmt.Errorf("no algorithm %q; there are %s", name, strings.Join(names, ", "))
}

// New builds an algorithm. Params may be partial; MSS and InitialCwnd default
// to DefaultMSS and ten segments of it (RFC 6928).
func New(name string, cfg Config) (Algorithm, error) {
	s, err := Lookup(name)
	if err != nil {
		return nil, err
	}
	if cfg, err = s.completeConfig(cfg); err != nil {
		return nil, err
	}
	return s.New(cfg), nil
}

// completeConfig sets the values that New's caller has left out.
func (s Spec) completeConfig(cfg Config) (Config, error) {
	var err error
	if cfg.Params, err = s.Resolve(cfg.Params); err != nil {
		return cfg, err
	}
	if cfg.MSS <= 0 {
		cfg.MSS = DefaultMSS
	}
	if cfg.InitialCwnd <= 0 {
		cfg.InitialCwnd = InitialCwndPackets * cfg.MSS
	}
	return cfg, nil
}

// Resolve returns a complete set of settings: the defaults, overridden by
// over. A name the algorithm lacks, a value out of range and values that do not
// go together are errors.
func (s Spec) Resolve(over Params) (Params, error) {
	p := make(Params, len(s.Params))
	for _, d := range s.Params {
		p[d.Name] = d.Default
	}
	for _, name := range slices.Sorted(maps.Keys(over)) {
		d, err := s.findParam(name)
		if err != nil {
			return nil, err
		}
		if err := d.checkValue(over[name]); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		p[name] = over[name]
	}
	if s.Check != nil {
		if err := s.Check(p); err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return p, nil
}

func (s Spec) findParam(name string) (Param, error) {
	i := slices.IndexFunc(s.Params, func(d Param) bool { return d.Name == name })
	if i >= 0 {
		return s.Params[i], nil
	}
	if len(s.Params) == 0 {
		return Param{}, fmt.Errorf("%s has no parameter %q: it takes none", s.Name, name)
	}
	var names []string
	for _, d := range s.Params {
		names = append(names, d.Name)
	}
	return Param{}, fmt.Errorf("%s has no parameter %q; it takes %s%s", s.Name, name, strings.Join(names, ", "),
		orNearest(name, names))
}

func (d Param) checkValue(v float64) error {
	lo, hi := d.Min, d.Max
	if len(d.Choices) > 0 {
		lo, hi = 0, float64(len(d.Choices)-1)
		if v != math.Trunc(v) {
			return fmt.Errorf("parameter %s is one of %s", d.Name, strings.Join(d.Choices, ", "))
		}
	}
	if math.IsNaN(v) || v < lo || v > hi {
		return fmt.Errorf("parameter %s is %v, but must be between %v and %v", d.Name, v, lo, hi)
	}
	return nil
}

// ParseParam reads one setting: a number, or the name of a choice.
func (s Spec) ParseParam(name, value string) (float64, error) {
	d, err := s.findParam(name)
	if err != nil {
		return 0, err
	}
	if i := slices.Index(d.Choices, value); i >= 0 {
		return float64(i), nil
	}
	if len(d.Choices) > 0 {
		return 0, fmt.Errorf("%s: parameter %s is %q, but must be one of %s%s", s.Name, name, value,
			strings.Join(d.Choices, ", "), orNearest(value, d.Choices))
	}
	v, err := strconv.ParseFloat(value, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: parameter %s is %q, but must be a number", s.Name, name, value)
	}
	if err := d.checkValue(v); err != nil {
		return 0, fmt.Errorf("%s: %w", s.Name, err)
	}
	return v, nil
}

// Parse reads an algorithm with settings as one writes it on a command line or
// in a rule: "copa", "copa:delta=0.1,mode=auto", "copa:alcc" (a profile), or a
// profile with settings on top. A family's member is part of the name: "ccp:reno",
// "ccp:reno,fallback=cubic". The returned Params hold only what was named.
func Parse(ref string) (name string, p Params, err error) {
	name, rest, has := strings.Cut(ref, ":")
	if families[name] != nil {
		name, rest, has = strings.Cut(ref, ",")
	}
	s, err := Lookup(name)
	if err != nil {
		return "", nil, err
	}
	p = Params{}
	if !has {
		return name, p, nil
	}
	for item := range strings.SplitSeq(rest, ",") {
		key, value, isParam := strings.Cut(item, "=")
		if isParam {
			if p[key], err = s.ParseParam(key, value); err != nil {
				return "", nil, err
			}
			continue
		}
		i := slices.IndexFunc(s.Profiles, func(f Profile) bool { return f.Name == item })
		if i < 0 {
			return "", nil, fmt.Errorf("%s has no profile %q; write settings as %s:name=value", name, item, name)
		}
		maps.Copy(p, s.Profiles[i].Params)
	}
	if _, err := s.Resolve(p); err != nil {
		return "", nil, err
	}
	return name, p, nil
}

// Format returns an algorithm with settings as Parse reads it. Settings that s does not have are left out.
func (s Spec) Format(p Params) string {
	var items []string
	for _, d := range s.Params {
		if v, ok := p[d.Name]; ok {
			items = append(items, d.Name+"="+d.FormatValue(v))
		}
	}
	if len(items) == 0 {
		return s.Name
	}
	return s.Name + ":" + strings.Join(items, ",")
}

// FormatValue returns a value of the setting as ParseParam reads it.
func (d Param) FormatValue(v float64) string {
	if i := int(v); len(d.Choices) > 0 && i >= 0 && i < len(d.Choices) {
		return d.Choices[i]
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
