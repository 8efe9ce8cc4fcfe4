package ccp

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// libccpVersion is of the crate libccp, which has the authors' datapath in C.
const libccpVersion = "1.2.0"

// libccp is that datapath in a process, which runs programs as ours do.
type libccp struct {
	in  *bufio.Writer
	out *bufio.Reader
}

// startLibccp has cargo fetch the crate and a compiler translate its C, and starts it. The
// crate's own binding goes by the real clock; testdata/libccp.c is told the time.
func startLibccp(t testing.TB) *libccp {
	t.Helper()
	need.Programs(t, "cargo", "cc")
	dir := t.TempDir()
	manifest := fmt.Sprintf("[package]\nname = \"fetch\"\nversion = \"0.0.0\"\n[lib]\npath = \"lib.rs\"\n"+
		"[dependencies]\nlibccp = \"=%s\"\n", libccpVersion)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "Cargo.toml"), []byte(manifest), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "lib.rs"), nil, 0o600))
	list := exec.Command("cargo", "metadata", "--format-version", "1")
	list.Dir = dir
	text, err := list.Output()
	if err != nil {
		t.Skipf("cargo does not fetch the crate libccp: %v", err)
	}
	var crates struct {
		Packages []struct {
			Name     string
			Manifest string `json:"manifest_path"`
		}
	}
	require.NoError(t, json.Unmarshal(text, &crates))
	program := filepath.Join(dir, "libccp")
	for _, c := range crates.Packages {
		if c.Name != "libccp" {
			continue
		}
		source := filepath.Join(filepath.Dir(c.Manifest), "libccp")
		args := []string{"-O1", "-std=gnu99", "-fgnu89-inline", "-w", "-I" + source, "-o", program, "testdata/libccp.c"}
		for _, f := range []string{"ccp.c", "ccp_priv.c", "machine.c", "serialize.c"} {
			args = append(args, filepath.Join(source, f))
		}
		out, err := exec.Command("cc", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	cmd := exec.Command(program)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		assert.NoError(t, cmd.Wait())
	})
	return &libccp{bufio.NewWriter(in), bufio.NewReader(out)}
}

// event is what a run starts from: the time in µs, the limits and the primitives.
type event struct {
	now, cwnd, rate uint64
	primitives      [primitives]uint64
}

// ran is what came of it.
type ran struct {
	failed     bool
	cwnd, rate uint64 // that were set; 0: none was
	report     []byte
}

func (l *libccp) run(t testing.TB, messages []byte, events []event) (all []ran) {
	t.Helper()
	put := func(v uint64) { require.NoError(t, binary.Write(l.in, binary.NativeEndian, v)) }
	get := func() (v uint64) {
		require.NoError(t, binary.Read(l.out, binary.NativeEndian, &v))
		return v
	}
	put(uint64(len(messages)))
	_, err := l.in.Write(messages)
	require.NoError(t, err)
	put(uint64(len(events)))
	for _, e := range events {
		for _, v := range append([]uint64{e.now, e.cwnd, e.rate}, e.primitives[:]...) {
			put(v)
		}
	}
	require.NoError(t, l.in.Flush())
	for range events {
		r := ran{failed: get() != 0, cwnd: get(), rate: get()}
		if n := get(); n > 0 {
			r.report = make([]byte, n)
			_, err := io.ReadFull(l.out, r.report)
			require.NoError(t, err)
		}
		all = append(all, r)
	}
	return all
}

// ours runs the program of an Install after the registers of a Change were set.
func ours(t testing.TB, in Install, set Change, events []event) (all []ran) {
	t.Helper()
	p, err := in.Verify()
	require.NoError(t, err)
	var m machine
	m.resetProgram(p, events[0].now)
	for _, u := range set.Updates {
		m.regs[p.control[u.Index]] = u.Value
	}
	for _, e := range events {
		r := m.regs
		copy(r[slotPrimitives:slotNamed], e.primitives[:])
		r[slotPrimitives+primNow] = e.now
		if e.primitives[primRTT] == 0 {
			r[slotPrimitives+primRTT] = noRTT
		}
		r[implicitCwnd], r[implicitRate] = e.cwnd, e.rate
		if !m.runOnce(e.now) {
			all = append(all, ran{failed: true})
			continue
		}
		out := ran{cwnd: uint64(uint32(r[implicitCwnd])), rate: uint64(uint32(r[implicitRate]))}
		if r[implicitReport] != 0 {
			report := Measure{Flow: set.Flow, Program: in.Program}
			for _, slot := range p.reports {
				report.Fields = append(report.Fields, r[slot])
			}
			out.report = report.Append(nil)
			m.renewVolatile()
		}
		all = append(all, out)
	}
	return all
}

// draw makes programs that are valid, and what they run on.
type draw struct{ *rand.Rand }

func of[T any](d draw, list ...T) T { return list[d.IntN(len(list))] }

func (d draw) number() uint32 {
	return of(d, 0, 1, 2, 9, 10, 1000, 1448, 1<<31-1, 1<<31, 1<<32-1, d.Uint32())
}

// program has an average of its own, report 0, since libccp averages without regard to
// what 64 bits hold: there it takes small numbers alone.
func (d draw) program() Install {
	in := Install{Program: 1}
	imm := func(v uint32) Register { return Register{ClassImmediate, v} }
	var named []Register
	def := func(r Register) {
		in.Instructions = append(in.Instructions, Instruction{OpDef, r, r, imm(min(d.number(), 1<<30-2))})
		named = append(named, r)
	}
	for i := range uint32(1 + d.IntN(4)) {
		def(Register{of(d, ClassReport, ClassVolatileReport), i})
	}
	for i := range uint32(d.IntN(4)) {
		def(Register{of(d, ClassControl, ClassVolatileControl), i})
	}
	average := named[0]
	other := func() Register {
		switch d.IntN(6) {
		case 0:
			return Register{ClassLocal, uint32(d.IntN(maxLocals))}
		case 1, 2:
			return Register{ClassTemporary, uint32(d.IntN(8))}
		case 3:
			return Register{ClassImplicit, uint32(d.IntN(int(implicits)))}
		}
		if r := of(d, named...); r != average {
			return r
		}
		return Register{ClassTemporary, 0}
	}
	primitive := func() Register { return Register{ClassPrimitive, uint32(d.IntN(primitives))} }
	operand := func() Register {
		switch d.IntN(8) {
		case 0, 1:
			return imm(d.number())
		case 2, 3, 4:
			return primitive()
		case 5:
			return average
		}
		return other()
	}
	instruction := func() Instruction {
		op := Op(d.IntN(int(opEnd)))
		switch op {
		case OpDef: // not in events
			op = OpBind
		case OpEwma:
			return Instruction{op, average, imm(uint32(d.IntN(11))), of(d, imm(d.number()), primitive())}
		}
		return Instruction{op, other(), operand(), operand()}
	}
	for range 1 + d.IntN(5) {
		e := Event{Flag: uint32(len(in.Instructions))}
		for range d.IntN(3) {
			in.Instructions = append(in.Instructions, instruction())
		}
		flag := Instruction{of(d, OpGt, OpLt, OpEquiv), Register{ClassImplicit, implicitFlag}, operand(), operand()}
		if d.IntN(2) == 0 {
			flag.Op, flag.Right = OpBind, imm(1)
		}
		in.Instructions = append(in.Instructions, flag)
		e.Flags, e.Body = uint32(len(in.Instructions))-e.Flag, uint32(len(in.Instructions))
		for range d.IntN(6) {
			in.Instructions = append(in.Instructions, instruction())
		}
		for _, i := range []uint32{implicitContinue, implicitReport} {
			if r := (Register{ClassImplicit, i}); d.IntN(2) == 0 {
				in.Instructions = append(in.Instructions, Instruction{OpBind, r, r, imm(1)})
			}
		}
		e.Bodies = uint32(len(in.Instructions)) - e.Body
		in.Events = append(in.Events, e)
	}
	return in
}

// agree runs a program that a seed makes under both, and compares what came of it.
func (l *libccp) agree(t testing.TB, seed uint64) (runs int) {
	t.Helper()
	d := draw{rand.New(rand.NewPCG(seed, 1))} //nolint:gosec // repeats
	in := d.program()
	set := Change{Flow: 1, Program: 1}
	for _, i := range in.Instructions {
		if c := i.Result.Class; i.Op == OpDef && (c == ClassControl || c == ClassVolatileControl) && d.IntN(2) == 0 {
			set.Updates = append(set.Updates, Update{i.Result, d.Uint64() >> d.IntN(64)})
		}
	}
	events := make([]event, 12)
	for i := range events {
		e := &events[i]
		e.now = 1000
		if i > 0 {
			e.now = events[i-1].now + uint64(d.IntN(3000))
		}
		e.cwnd, e.rate = uint64(d.number()), uint64(d.number())
		for p := range e.primitives {
			e.primitives[p] = uint64(d.number())
		}
		e.primitives[primTimeout] &= 1
	}
	theirs := l.run(t, slices.Concat(in.Append(nil), set.Append(nil)), events)
	multiplies := slices.ContainsFunc(in.Instructions, func(i Instruction) bool { return i.Op == OpMul })
	for i, r := range ours(t, in, set, events) {
		if r.failed && multiplies {
			return i // libccp does not notice every product that 64 bits do not hold, and goes on
		}
		require.Equal(t, theirs[i], r, "seed %d, run %d of %+v", seed, i, in)
	}
	return len(events)
}

// TestProgramsComeOutAsUnderLibccp is of a thousand programs.
func TestProgramsComeOutAsUnderLibccp(t *testing.T) {
	l := startLibccp(t)
	runs := 0
	const programs = 1000
	for seed := range uint64(programs) {
		runs += l.agree(t, seed)
	}
	assert.Greater(t, runs, programs*6, "most are compared to the end")
}

// FuzzAgainstLibccp is the same for ever more.
func FuzzAgainstLibccp(f *testing.F) {
	l := startLibccp(f)
	f.Add(uint64(1))
	f.Fuzz(func(t *testing.T, seed uint64) { l.agree(t, seed) })
}
