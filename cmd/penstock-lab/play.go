package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/report"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/config"
)

// ofRuns are the flags that are about how experiments are played, and go with files of them.
var ofRuns = []string{
	"seeds", "runs", agents.Flag, "retry-noisy", "json", "report", "plot", "resume", "trace-out",
	"trace-every", "help", proxyFlag, "mdi-model",
}

// only refuses other flags than those that go with something.
func only(flags *pflag.FlagSet, those []string, with string) (err error) {
	flags.Visit(func(flag *pflag.Flag) {
		if !slices.Contains(those, flag.Name) && err == nil {
			err = fmt.Errorf("--%s does not go with %s", flag.Name, with)
		}
	})
	return err
}

// interruptible is a command's context until the user ends it.
func interruptible(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
}

// outputs is where records go beside the tables.
type outputs struct {
	json, plot, report string
	traceOut           string // of sim
	resume, replace    bool
}

func (o *outputs) register(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&o.json, "json", "", "append one JSON line for each run to this file")
	flags.StringVar(&o.report, "report", "",
		"make a page of the runs, with tables and figures, as the command report does")
	flags.StringVar(&o.plot, "plot", "", "draw the course of the runs into this .png, .pdf or .svg file, or files "+
		"named after it")
	flags.BoolVar(&o.resume, "resume", false,
		"leave out the runs that the file of --json has of this build, and go on with "+
			"what it says of them")
}

// check finds mistakes that would otherwise show after a long run, or would cost one of the files
// that are read.
func (o *outputs) check(read ...string) error {
	if o.plot != "" && !slices.Contains(figures.Formats, filepath.Ext(o.plot)) {
		return fmt.Errorf("--plot %s: the name must end in one of %s", o.plot, strings.Join(figures.Formats, ", "))
	}
	if o.resume && o.json == "" {
		return errors.New("--resume needs --json, the file that says what is there")
	}
	if o.replace && o.json == "" {
		return errors.New("--replace needs --json, the file that it is about")
	}
	if info, err := os.Stat(o.json); (o.resume || o.replace) && err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("--resume and --replace read the file of --json, and %s is no file", o.json)
	}
	if o.resume && o.traceOut != "" {
		return errors.New("--resume does not go with --trace-out: the file of --json has no such trace")
	}
	return output.Apart([]string{o.json, o.report, o.plot, o.traceOut}, read...)
}

// drop takes out of the file of --json, with --replace, what other builds say of the experiments that
// were played, and what was there of stopped ones that were played again.
func (s *session) drop() error {
	stale := func(old record.Run) bool {
		return old.Find(s.again) >= 0 || s.replace && old.Find(s.all) < 0 &&
			slices.ContainsFunc(s.all, func(r record.Run) bool { return r.Supersedes(old) })
	}
	if !slices.ContainsFunc(s.there, stale) {
		return nil
	}
	there := s.there
	return output.Filter(s.json, func(line []byte) bool {
		if len(bytes.TrimSpace(line)) == 0 || len(there) == 0 { // what was not there is of this session
			return true
		}
		old := there[0]
		there = there[1:]
		return !stale(old)
	})
}

// session plays experiments for a command, and has what its flags say.
type session struct {
	outputs
	cmd     *cobra.Command
	command string // as it was typed, for the records
	scale   recipe.Scale
	virtual bool     // all of it
	seeds   []uint64 // of each experiment
	retry   int      // as recipe.Retry has it
	within  time.Duration
	env     stage.Env
	quiet   bool                // no progress
	change  func(*sim.Scenario) // alters what is played in virtual time; nil: nothing
	proxy   string              // build of the proxy where that is another than this program's
	models  string              // digest of the models of --mdi-model; empty: there are none

	began time.Time
	file  io.Writer
	there []record.Run
	real  recipe.Player
	all   []record.Run // of all experiments
	again []record.Run // made again though they were there, since their experiment had been stopped

	traced []course // for --trace-out
}

// open opens the file of --json, reads what is there, and finds out whether the others can be made.
func (s *session) open() (done func() error, err error) {
	for flag, path := range map[string]string{"plot": s.plot, "report": s.report, "trace-out": s.traceOut} {
		if path == "" {
			continue
		}
		if err := output.CheckPath(path); err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
	}
	if s.json == "" {
		s.file = io.Discard
		return func() error { return nil }, nil
	}
	f, err := output.Append(s.json) // which takes away what a run that was stopped has left of a record
	if err == nil && (s.resume || s.replace) {
		if s.there, err = record.Open(s.json); err != nil {
			err = errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return nil, fmt.Errorf("--json: %w", err)
	}
	s.file = f
	return f.Close, nil
}

// unit is an experiment with one seed.
type unit struct {
	recipe.Recipe
	seed   uint64
	stages []stage.Stage
	known  []int       // of session.there, by stage; -1: the run is to be made
	ahead  []chan made // what virtual time makes before its turn, by stage; nil: it is made in its turn
}

// made is what came of a run.
type made struct {
	record stage.Record
	err    error
}

// isKnown reports whether all runs are there.
func (u unit) isKnown() bool { return !slices.Contains(u.known, -1) }

// play plays experiments, one after the other, and tells of each when it is over, or was stopped, with the records
// of its runs. Nothing is played before all of it can be, and before its outputs are open.
func (s *session) play(experiments []recipe.Recipe, tell func(recipe.Recipe, []record.Run) error) (err error) {
	s.command = commandLine(os.Args)
	units, err := s.prepare(experiments)
	if err != nil {
		return err
	}
	if s.models, err = modelsOf(s.cmd); err != nil {
		return cli.BadInput(err)
	}
	done, err := s.open()
	if err != nil {
		return cli.BadInput(err)
	}
	defer func() {
		if err == nil {
			err = s.drop()
		}
		err = errors.Join(err, done())
	}()
	s.began = time.Now()
	s.doubt()
	for i := range units {
		s.findKnown(&units[i])
	}
	ctx, stop := interruptible(s.cmd)
	defer s.playAhead(ctx, units)()
	defer stop()
	defer func() { err = errors.Join(err, s.writePage()) }()
	for n := len(s.seeds); len(units) > 0; units = units[n:] {
		s.tellRest(units)
		var runs []record.Run
		var failed error
		for _, u := range units[:n] {
			if failed == nil {
				var made []record.Run
				made, failed = s.one(ctx, u)
				runs = append(runs, made...)
			}
		}
		s.all = append(s.all, runs...)
		if failed == nil || len(runs) > 0 {
			failed = errors.Join(failed, tell(units[0].Recipe, runs))
		}
		if failed != nil {
			return failed
		}
	}
	return nil
}

// aheadMost is how many runs in virtual time are made, or wait for their turn, for each processor.
const aheadMost = 2

// playAhead makes the runs in virtual time on all processors, in their order, unless there are others that this would
// disturb. An agent that was started elsewhere serves one run at a time, so that its runs wait for their turn. It
// returns what waits for the end of all, which comes soon after ctx ends.
func (s *session) playAhead(ctx context.Context, units []unit) (wait func()) {
	for i, u := range units {
		units[i].ahead = make([]chan made, len(u.stages))
		for k, one := range u.stages {
			if s.real == nil && u.known[k] < 0 && !one.Agents.AreElsewhere() {
				units[i].ahead[k] = make(chan made)
			}
		}
	}
	room := make(chan struct{}, aheadMost*runtime.GOMAXPROCS(0))
	var over sync.WaitGroup
	playOne := func(one stage.Stage, ahead chan<- made) {
		rec, err := stage.PlayVirtual(ctx, one, s.change)
		select {
		case ahead <- made{rec, err}:
		case <-ctx.Done():
		}
		<-room
	}
	over.Go(func() {
		for _, u := range units {
			for k, ahead := range u.ahead {
				if ahead == nil {
					continue
				}
				select {
				case room <- struct{}{}:
					over.Go(func() { playOne(u.stages[k], ahead) })
				case <-ctx.Done():
					return
				}
			}
		}
	})
	return over.Wait
}

// tellRest tells how long experiments over real sockets will take, where there are several.
func (s *session) tellRest(rest []unit) {
	var all time.Duration
	for _, u := range rest {
		all += recipe.TimeOf(u.stages)
	}
	if n := len(rest) / len(s.seeds); n > 1 && all > 0 && !s.virtual && !s.quiet {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "%d experiments are left, of %s\n", n, all.Round(time.Second))
	}
}

// doubt tells where --resume may take runs of other code for those of this build.
func (s *session) doubt() {
	build := cli.ReadBuild().String()
	i := slices.IndexFunc(s.there, func(r record.Run) bool {
		return strings.HasPrefix(r.Version, build) && !cli.Exact(r.Version)
	})
	if s.resume && i >= 0 {
		fmt.Fprintf(s.cmd.ErrOrStderr(), "note: %s has runs of this build, %s, which does not tell its source: they may "+
			"be of other code\n", s.json, s.there[i].Version)
	}
}

// prepare finds what cannot be played before anything is.
func (s *session) prepare(experiments []recipe.Recipe) (units []unit, err error) {
	overSockets := false
	for _, r := range experiments {
		for _, seed := range s.seeds {
			stages, err := r.Stages(s.scale, seed)
			if err != nil {
				return nil, cli.BadInput(err)
			}
			units = append(units, unit{Recipe: r, seed: seed, stages: stages})
			for _, one := range stages {
				if err = r.Place(one.CheckEdge()); err != nil {
				} else if s.virtual || one.Virtual {
					_, _, err = stage.Scenario(one)
					err = r.Place(err)
				} else {
					overSockets = true
					err = one.Realisable()
				}
				if err == nil {
					err = r.Place(one.CheckAgents())
				}
				if err != nil {
					return nil, cli.BadInput(err)
				}
			}
		}
	}
	if !overSockets {
		return units, nil
	}
	// Without the rights this runs the whole program again inside a user
	// namespace; that run has printed everything by then.
	const offer = "%w; virtual time needs neither: penstock-lab sim, bench recipe --virtual, bench --sender NAME@sim"
	code, ran, err := netlab.Enter()
	if err != nil {
		return nil, fmt.Errorf(offer, err)
	}
	if ran {
		os.Exit(code)
	}
	if err := s.findProxy(); err != nil {
		return nil, err
	}
	s.real = recipe.Retry(func(ctx context.Context, one stage.Stage, tell func(time.Duration)) (stage.Record, error) {
		rec, err := stage.Play(ctx, s.env, one, tell)
		if errors.Is(err, netlab.ErrNoTUN) {
			err = fmt.Errorf(offer, err)
		}
		return rec, err
	}, s.retry)
	return units, nil
}

// modelsOf is a digest of the models that runs are made with; empty: there are none.
func modelsOf(cmd *cobra.Command) (string, error) {
	models := cli.Models(cmd)
	if len(models) == 0 {
		return "", nil
	}
	digest := fnv.New64a()
	for _, model := range models {
		name, file, _ := strings.Cut(model, "=")
		text, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(digest, "%s %d %s", name, len(text), text)
	}
	return "-" + strconv.FormatUint(digest.Sum64(), 16), nil
}

// record is that of one run.
func (s *session) record(r recipe.Recipe, one stage.Stage, rec stage.Record, seed uint64) record.Run {
	run := record.Of(one, rec)
	run.Experiment, run.Source, run.Command, run.Seed = r.Name, r.Source, s.command, seed
	run.Version = cli.ReadBuild().String()
	run.Setup += s.models
	if run.Virtual = s.virtual || one.Virtual; !run.Virtual && s.proxy != "" && one.Edge != "" && !one.Native {
		run.Version += ", proxy " + s.proxy
	}
	if s.scale != recipe.Full {
		run.Scale = string(s.scale)
	}
	return run
}

// findKnown finds the runs of a unit that are there. What must hold is about all of them, so that one which is
// missing has all be made, and so has another bound.
func (s *session) findKnown(u *unit) {
	u.known = slices.Repeat([]int{-1}, len(u.stages))
	if !s.resume {
		return
	}
	for i, one := range u.stages {
		u.known[i] = s.record(u.Recipe, one, stage.Record{}, u.seed).Find(s.there)
	}
	if u.Asserts() && (!u.isKnown() || s.there[u.known[len(u.known)-1]].Must != u.DigestMusts()) {
		u.known = slices.Repeat([]int{-1}, len(u.stages))
	}
}

// one makes the runs of a unit, but for those that are there, and returns the records of all: of none where there is
// no time for them.
func (s *session) one(ctx context.Context, u unit) (runs []record.Run, err error) {
	if u.isKnown() {
		for _, k := range u.known {
			runs = append(runs, s.there[k])
		}
		return runs, nil
	}
	if s.within > 0 {
		over := time.Since(s.began)
		if !s.virtual {
			over += recipe.TimeOf(u.stages)
		}
		if over > s.within {
			return nil, nil
		}
	}
	printer := bench.NewPrinter(s.cmd.ErrOrStderr())
	defer printer.Break()
	next := 0
	player := func(ctx context.Context, one stage.Stage, tell func(time.Duration)) (rec stage.Record, err error) {
		k := next
		next++
		switch {
		case u.known[k] >= 0:
			runs = append(runs, s.there[u.known[k]])
			return rec, nil
		case u.ahead[k] != nil:
			select {
			case m := <-u.ahead[k]:
				rec, err = m.record, m.err
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
		case s.virtual || one.Virtual:
			rec, err = stage.PlayVirtual(ctx, one, s.change)
		default:
			rec, err = s.real(ctx, one, tell)
		}
		if err == nil {
			run := s.record(u.Recipe, one, rec, u.seed)
			runs = append(runs, run)
			if s.traceOut != "" {
				s.traced = append(s.traced, course{run, rec.Virtual.Flows})
			}
			if !u.Asserts() || next < len(u.stages) { // the last takes the findings along
				err = record.Write(s.file, run)
			}
		}
		return rec, err
	}
	result, err := u.Play(ctx, s.scale, u.seed, player, func(p recipe.Progress) {
		if !s.quiet && (!p.Over || u.known[p.Number-1] < 0) {
			printer.Line(p.String(), p.Over)
		}
	})
	if mistake := (*config.Error)(nil); errors.As(err, &mistake) { // in what must hold
		err = cli.BadInput(err)
	}
	if u.Asserts() && len(runs) == len(u.stages) {
		s.again = append(s.again, runs...)
		last := &runs[len(runs)-1]
		last.Findings, last.Must = result.Findings, u.DigestMusts()
		err = errors.Join(err, record.Write(s.file, *last))
	}
	return runs, err
}

// tables prints the tables, and draws the plots, of what was finished.
func (s *session) tables() error {
	if len(s.all) == 0 {
		return nil
	}
	if err := writeResults(s.cmd.OutOrStdout(), s.all); err != nil {
		return err
	}
	return s.draw()
}

// writeResults writes tables of runs, and what was found.
func writeResults(w io.Writer, runs []record.Run) error {
	if err := report.WriteTables(w, runs); err != nil {
		return err
	}
	return recipe.WriteFindings(w, runs)
}

// draw makes the pictures of --plot.
func (s *session) draw() error {
	if s.plot == "" {
		return nil
	}
	names, err := report.WritePlots(s.plot, s.all)
	tellDrawn(s.cmd, names)
	return err
}

// writePage makes the page of --report.
func (s *session) writePage() error {
	if len(s.all) == 0 || s.report == "" {
		return nil
	}
	name := filepath.Base(s.report)
	files := []report.File{{Name: strings.TrimSuffix(name, filepath.Ext(name)), Runs: s.all}}
	if err := writeReport(s.cmd, s.report, files, ""); err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	return nil
}

func tellDrawn(cmd *cobra.Command, names []string) {
	for _, name := range names {
		fmt.Fprintf(cmd.ErrOrStderr(), "drawn: %s\n", name)
	}
}

// plainWord is what a shell reads as it stands.
var plainWord = regexp.MustCompile(`^[\w@%+=:,./-]+$`)

// commandLine is a command as a shell reads it, the program by its name alone.
func commandLine(args []string) string {
	words := []string{filepath.Base(args[0])}
	for _, arg := range args[1:] {
		if !plainWord.MatchString(arg) {
			arg = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
		}
		words = append(words, arg)
	}
	return strings.Join(words, " ")
}
