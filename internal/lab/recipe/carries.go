package recipe

import (
	"compress/gzip"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/linktrace"
)

func (b *builder) trace(l Link) (*sim.Trace, error) {
	if strings.HasPrefix(l.Trace, recorded) {
		_, t, err := b.load.carries(l.Trace, b.seed)
		return t, err
	}
	_, noModel := sim.Model(l.Trace)
	if noModel == nil {
		name := generate + l.Trace
		if l.TraceSeed != nil {
			name += fmt.Sprintf(":%d", *l.TraceSeed)
		}
		_, t, err := b.load.carries(name, b.seed)
		return t, err
	}
	if b.load.Trace == nil {
		return nil, noModel
	}
	t, err := b.load.Trace(l.Trace)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w; %w", err, noModel)
	}
	return t, err
}

// What stands before the name of a model, and of a trace of the library.
const (
	generate = "generate:"
	recorded = "recorded:"
)

//go:embed traces
var traces embed.FS

// readRecorded reads a trace of the library.
func readRecorded(name string) (*sim.Trace, error) {
	f, err := traces.Open("traces/" + name + ".gz")
	if err != nil {
		var names []string
		all, _ := fs.Glob(traces, "traces/*.gz") // fails of a bad pattern alone
		for _, n := range all {
			names = append(names, strings.TrimSuffix(path.Base(n), ".gz"))
		}
		return nil, fmt.Errorf("there is no recorded trace %q; there are %s", name, strings.Join(names, ", "))
	}
	text, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	return sim.ReadTrace(recorded+name, text)
}

// Carries reads what a link carries in one word: a rate (12mbit), a trace drawn from a built-in
// model (generate:lte, with the seed that is given; generate:lte:7), one of the library
// (recorded:campus-walk), or the name of a file, as linktrace.Read has it.
func Carries(spec string, seed uint64) (cc.Rate, *sim.Trace, error) {
	read := func(name string) (*sim.Trace, error) { return linktrace.OpenTrace(name, linktrace.Read) }
	return loader{Trace: read}.carries(spec, seed)
}

func (load loader) carries(spec string, seed uint64) (cc.Rate, *sim.Trace, error) {
	if rest, ok := strings.CutPrefix(spec, generate); ok {
		model, text, seeded := strings.Cut(rest, ":")
		if seeded {
			var err error
			if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
				return 0, nil, fmt.Errorf("%q: the seed after the second colon must be a whole number, such as %s%s:7", spec,
					generate, model)
			}
		}
		t, err := drawTrace(model, seed, spec)
		if err != nil {
			err = fmt.Errorf("%q: %w", spec, err)
		}
		return 0, t, err
	}
	if name, ok := strings.CutPrefix(spec, recorded); ok {
		t, err := readRecorded(name)
		return 0, t, err
	}
	rate, err := cc.ParseRate(spec)
	switch {
	case err == nil && rate <= 0:
		return 0, nil, fmt.Errorf("%q carries nothing", spec)
	case err == nil:
		return rate, nil, nil
	case load.Trace == nil:
		return 0, nil, fmt.Errorf("%q is neither a rate such as 12mbit, nor %sNAME: %w", spec, generate, err)
	}
	t, err := load.Trace(spec)
	if err != nil {
		err = fmt.Errorf("%q is neither a rate such as 12mbit, nor %sNAME or %sNAME, nor a trace file: %w", spec,
			generate, recorded, err)
	}
	return 0, t, err
}
