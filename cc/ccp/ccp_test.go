package ccp

import (
	"encoding/hex"
	"math"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const example = `
(def (Report (volatile acked 0) (volatile minrtt +infinity)) (target 1000))
(when true (:= Report.acked (+ Report.acked Ack.bytes_acked))
           (:= Report.minrtt (min Report.minrtt Flow.rtt_sample_us)) (fallthrough))
(when (> Micros target) (report) (:= Micros 0))
`

const exampleInstall = `
0200f40000000000
01000000020000000c000000
0300000001000000040000000500000009000000010000000a00000002000000
02050000000005000000000100000000
020501000000050100000001ffffffff
020000000000000000000001e8030000
01020000000002000000000101000000
00070000000005000000000400000000
01050000000005000000000700000000
0b07000000000501000000040d000000
01050100000005010000000700000000
01020100000002010000000101000000
06020000000002030000000000000000
01020200000002020000000101000000
01020300000002030000000100000000
`

// bytesOf reads hexadecimal with blanks, padded with zeros to a length.
func bytesOf(t testing.TB, s string, length int) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	require.NoError(t, err)
	return append(b, make([]byte, length-len(b))...)
}

func compiled(t testing.TB, text string) *Program {
	t.Helper()
	code, err := Compile(text)
	require.NoError(t, err)
	p, err := code.Install(1).Verify()
	require.NoError(t, err)
	return p
}

// TestGoldenBytes has messages of either direction be what other implementations write.
func TestGoldenBytes(t *testing.T) {
	code, err := Compile(example)
	require.NoError(t, err)
	assert.Equal(t, []string{"acked", "minrtt"}, code.Fields)
	local, remote := netip.MustParseAddrPort("10.0.0.1:4242"), netip.MustParseAddrPort("10.0.0.2:80")
	target := Update{Register{ClassControl, 0}, 2000}
	cwnd := Update{Register{ClassImplicit, implicitCwnd}, 28960}
	for name, row := range map[string]struct {
		want   string
		length int
		got    []byte
		decode func(Message) (any, error)
		value  any
	}{
		"install": {
			exampleInstall, 244, code.Install(1).Append(nil),
			func(m Message) (any, error) { return m.Install() }, code.Install(1),
		},
		"create": {
			"000060000500000090380000a80500000100000a921000000200000a5000000072656e6f", 96,
			Create{5, 14480, 1448, local, remote, "reno"}.Append(nil),
			func(m Message) (any, error) { return m.Create() },
			Create{5, 14480, 1448, local, remote, "reno"},
		},
		"change_prog": {
			"04001d0005000000010000000100000002040000002071000000000000", 29,
			Change{5, 1, []Update{cwnd}}.Append(nil),
			func(m Message) (any, error) { return m.Change() },
			Change{5, 1, []Update{cwnd}},
		},
		"update_fields": {
			"03001900050000000100000000 00000000 d007000000000000", 25,
			Change{5, 0, []Update{target}}.Append(nil),
			func(m Message) (any, error) { return m.Change() },
			Change{5, 0, []Update{target}},
		},
		"measure": {
			"010020000500000001000000020000002071000000000000a861000000000000", 32,
			Measure{5, 1, []uint64{28960, 25000}}.Append(nil),
			func(m Message) (any, error) { return m.Measure() },
			Measure{5, 1, []uint64{28960, 25000}},
		},
		"close": {
			"01001000050000000000000000000000", 16, Measure{Flow: 5}.Append(nil),
			func(m Message) (any, error) { return m.Measure() },
			Measure{5, 0, []uint64{}},
		},
		"ready": {
			"05000c000000000007000000", 12, Ready{7}.Append(nil),
			func(m Message) (any, error) { return m.Ready() },
			Ready{7},
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := bytesOf(t, row.want, row.length)
			if name == "create" { // the addresses' bytes are in network order
				want = bytesOf(t, "000060000500000090380000a80500000100000a921000000200000a5000000072656e6f", 96)
			}
			assert.Equal(t, hex.EncodeToString(want), hex.EncodeToString(row.got))
			m, rest, err := Next(want)
			require.NoError(t, err)
			assert.Empty(t, rest)
			got, err := row.decode(m)
			require.NoError(t, err)
			assert.Equal(t, row.value, got)
		})
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	install := bytesOf(t, exampleInstall, 244)
	tamper := func(at int, v byte) []byte {
		b := append([]byte(nil), install...)
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"no header":                   {1, 2, 3},
		"shorter than its header":     {2, 0, 7, 0, 0, 0, 0, 0},
		"longer than the datagram":    {2, 0, 9, 0, 0, 0, 0, 0},
		"install without counts":      {2, 0, 8, 0, 0, 0, 0, 0},
		"install of too many events":  tamper(13, 0xff),
		"install of fewer events":     tamper(12, 1),
		"install that is cut":         install[:240],
		"change_prog without a count": {4, 0, 12, 0, 1, 0, 0, 0, 1, 0, 0, 0},
		"change_prog to program 0":    {4, 0, 16, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"update of a wrong count":     {3, 0, 12, 0, 1, 0, 0, 0, 1, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := NewAgent("x", "", func([]byte) error { return nil })
			require.NoError(t, err)
			assert.ErrorIs(t, a.Receive(1, b), ErrMalformed)
			assert.EqualValues(t, 1, a.Counters().Refused["malformed"])
		})
	}
}

func TestProgramsThatCannotRunAreRefused(t *testing.T) {
	imm := Register{ClassImmediate, 1}
	add := func(result Register) Instruction { return Instruction{OpAdd, result, imm, imm} }
	def := func(result Register) Instruction { return Instruction{OpDef, result, result, imm} }
	for name, m := range map[string]Install{
		"number 0":              {Program: 0},
		"unknown operation":     {Program: 1, Instructions: []Instruction{{Op: opEnd, Left: imm, Right: imm}}},
		"unknown class":         {Program: 1, Instructions: []Instruction{add(Register{classEnd, 0})}},
		"register out of range": {Program: 1, Instructions: []Instruction{add(Register{ClassReport, 110})}},
		"writes an immediate":   {Program: 1, Instructions: []Instruction{add(imm)}},
		"writes a primitive":    {Program: 1, Instructions: []Instruction{add(Register{ClassPrimitive, 0})}},
		"event out of range":    {Program: 1, Events: []Event{{0, 1, 1, 0}}},
		"event that wraps":      {Program: 1, Events: []Event{{1, math.MaxUint32, 0, 0}}},
		"def of a temporary":    {Program: 1, Instructions: []Instruction{def(Register{ClassTemporary, 0})}},
		"def within an event": {
			Program: 1, Events: []Event{{0, 1, 0, 0}}, Instructions: []Instruction{def(Register{ClassControl, 0})},
		},
		"two defs of one field": {
			Program:      1,
			Instructions: []Instruction{def(Register{ClassReport, 0}), def(Register{ClassVolatileReport, 0})},
		},
		"a field without a def": {Program: 1, Instructions: []Instruction{def(Register{ClassReport, 1})}},
		"too many instructions": {Program: 1, Instructions: make([]Instruction, 257)},
		"events that share too many instructions": {
			Program: 1, Events: []Event{{0, 100, 0, 100}, {0, 100, 0, 1}},
			Instructions: slices.Repeat([]Instruction{add(Register{ClassTemporary, 0})}, 100),
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := m.Verify()
			assert.ErrorIs(t, err, ErrProgram)
		})
	}
}

// run compiles a program and runs it once, on an acknowledgement of 100 bytes at 5 ms.
func run(t *testing.T, text string) (*machine, bool) {
	t.Helper()
	m := &machine{}
	m.resetProgram(compiled(t, text), 0)
	m.regs[slotPrimitives+primBytesAcked] = 100
	m.regs[slotPrimitives+primRTT] = 25_000
	m.regs[implicitCwnd] = 14480
	return m, m.runOnce(5000)
}

func (m *machine) field(i int) uint64 { return m.regs[m.program.reports[i]] }

func TestArithmetic(t *testing.T) {
	for name, row := range map[string]struct {
		expr  string
		want  uint64
		fails bool
	}{
		"add":                     {expr: "(+ 1 2)", want: 3},
		"subtract":                {expr: "(- 5 2)", want: 3},
		"below zero":              {expr: "(- 2 5)", fails: true},
		"divide":                  {expr: "(/ 7 2)", want: 3},
		"divide by zero":          {expr: "(/ 7 0)", fails: true},
		"infinity is 32 bits":     {expr: "(+ +infinity 0)", want: math.MaxUint32},
		"multiply":                {expr: "(* +infinity +infinity)", want: math.MaxUint32 * math.MaxUint32},
		"beyond 64 bits":          {expr: "(* (* +infinity +infinity) 2)", fails: true},
		"sum beyond 64 bits":      {expr: "(+ (* +infinity +infinity) (* +infinity +infinity))", fails: true},
		"later of sequence":       {expr: "(wrapped_max +infinity 5)", want: 5},
		"half of all apart":       {expr: "(wrapped_max 2147483647 +infinity)", want: math.MaxInt32},
		"later without the first": {expr: "(wrapped_max 0 5)", want: 5},
		"min and max":             {expr: "(max 3 (min 9 7))", want: 7},
		"time":                    {expr: "(+ Micros 0)", want: 5000},
		"round trip":              {expr: "(+ Flow.rtt_sample_us 0)", want: 25_000},
	} {
		t.Run(name, func(t *testing.T) {
			m, ok := run(t, "(def (Report (x 0))) (when true (:= Report.x "+row.expr+"))")
			require.Equal(t, !row.fails, ok)
			if ok {
				assert.Equal(t, row.want, m.field(0))
			}
		})
	}
}

func TestAverage(t *testing.T) {
	text := "(def (Report (x OLD))) (when true (:= Report.x (ewma 2 NEW)))"
	for _, row := range []struct {
		old, x string
		want   uint64
	}{{"0", "100", 100}, {"100", "200", 180}, {"200", "100", 120}} {
		m, ok := run(t, strings.NewReplacer("OLD", row.old, "NEW", row.x).Replace(text))
		require.True(t, ok)
		assert.Equal(t, row.want, m.field(0))
	}
	v, ok := ewmaOf(10, math.MaxUint64, 1)
	assert.True(t, ok)
	assert.EqualValues(t, uint64(math.MaxUint64), v, "no product overflows")
}

func TestConditionals(t *testing.T) {
	m, ok := run(t, `(def (Report (a 1) (b 1) (c 1) (d 1)))
		(when true
			(:= Report.a (if (> 2 1) 7)) (:= Report.b (if (> 1 2) 7))
			(:= Report.c (!if (> 2 1) 7)) (:= Report.d (!if (> 1 2) 7)))`)
	require.True(t, ok)
	assert.Equal(t, []uint64{7, 1, 1, 7}, []uint64{m.field(0), m.field(1), m.field(2), m.field(3)})
}

func TestFallingThroughLasts(t *testing.T) {
	m, _ := run(t, `(def (Report (a 0) (b 0) (c 0)))
		(when true (:= Report.a 1) (fallthrough))
		(when true (:= Report.b 1))
		(when true (:= Report.c 1))`)
	assert.EqualValues(t, 1, m.field(1))
	assert.EqualValues(t, 1, m.field(2), "an event after one that fell through runs as well")
	m, _ = run(t, `(def (Report (a 0) (b 0))) (when true (:= Report.a 1)) (when true (:= Report.b 1))`)
	assert.EqualValues(t, 0, m.field(1), "the first that holds is the last")
}

func TestAnAbortedRunGoesNoFurther(t *testing.T) {
	m, ok := run(t, `(def (Report (a 0)))
		(when true (:= Cwnd 1) (:= Report.a (- 1 2)) (fallthrough))
		(when true (:= Report.a 9))`)
	assert.False(t, ok)
	assert.EqualValues(t, 0, m.field(0))
}

func TestTimeIsSetByARunThatIsAbortedAsWell(t *testing.T) {
	m := &machine{}
	m.resetProgram(compiled(t, `(def (Report (at 0) (zero 0)))
		(when true (:= Report.at Micros) (:= Micros 7) (:= Report.zero (- Report.zero 1)))`), 0)
	require.False(t, m.runOnce(5000))
	require.False(t, m.runOnce(5001))
	assert.EqualValues(t, 8, m.field(0))
}

func TestABodyThatTakesItsFlagBackIsFollowedByTheNextEvent(t *testing.T) {
	flag, one := Register{ClassImplicit, implicitFlag}, Register{ClassImmediate, 1}
	first, second := Register{ClassReport, 0}, Register{ClassReport, 1}
	p, err := Install{
		Program: 1, Events: []Event{{2, 1, 3, 1}, {4, 1, 5, 1}},
		Instructions: []Instruction{
			{OpDef, first, first, one},
			{OpDef, second, second, one},
			{OpBind, flag, flag, one},
			{OpBind, flag, flag, Register{ClassImmediate, 0}},
			{OpBind, flag, flag, one},
			{OpBind, second, second, Register{ClassImmediate, 9}},
		},
	}.Verify()
	require.NoError(t, err)
	m := &machine{}
	m.resetProgram(p, 0)
	require.True(t, m.runOnce(1))
	assert.EqualValues(t, 9, m.field(1))
}

// The number of updates may be cut to its low eight bits, as portus does.
func TestUpdatesAreAsManyAsTheLengthSays(t *testing.T) {
	b := Change{5, 0, make([]Update, 3)}.Append(nil)
	for count, ok := range map[byte]bool{3: true, 2: false} {
		b[8], b[9] = count, 1
		m, _, err := Next(b)
		require.NoError(t, err)
		c, err := m.Change()
		if assert.Equal(t, ok, err == nil) && ok {
			assert.Len(t, c.Updates, 3)
		}
	}
}

func TestVolatileRegistersGoBackToTheirFirstValues(t *testing.T) {
	m, ok := run(t, `(def (Report (volatile acked 0) (volatile minrtt +infinity) (kept 0)) (volatile turns 3) (all 0))
		(when true
			(:= Report.acked (+ Report.acked Ack.bytes_acked)) (:= Report.minrtt (min Report.minrtt Flow.rtt_sample_us))
			(:= Report.kept (+ Report.kept 1)) (:= turns (+ turns 1)) (:= all (+ all 1)))`)
	require.True(t, ok)
	turns, all := m.program.control[0], m.program.control[1]
	assert.Equal(t, []uint64{100, 25_000, 1, 4, 1},
		[]uint64{m.field(0), m.field(1), m.field(2), m.regs[turns], m.regs[all]})
	m.renewVolatile()
	assert.Equal(t, []uint64{0, math.MaxUint32, 1, 3, 1},
		[]uint64{m.field(0), m.field(1), m.field(2), m.regs[turns], m.regs[all]})
}

func TestMicrosCountFromWhereTheyAreSet(t *testing.T) {
	m := &machine{}
	m.resetProgram(compiled(t, `(def (Report (at 0)))
		(when (> Micros 100) (:= Report.at Micros) (:= Micros 10))`), 1000)
	require.True(t, m.runOnce(1100))
	assert.EqualValues(t, 0, m.field(0), "100 are not more than 100")
	require.True(t, m.runOnce(1200))
	assert.EqualValues(t, 200, m.field(0))
	require.True(t, m.runOnce(1290))
	assert.EqualValues(t, 200, m.field(0), "10 + 90")
	require.True(t, m.runOnce(1291))
	assert.EqualValues(t, 101, m.field(0))
}

func TestTextsThatAreNoPrograms(t *testing.T) {
	for name, text := range map[string]string{
		"no events":                  "(def (Report (x 0)))",
		"a blank before def":         "( def (x 0)) (when true (report))",
		"a number that is too large": "(def (x 2147483648)) (when true (report))",
		"true as a prefix":           "(def (x 0)) (when true (:= x (+ 1 trueish)))",
		"reset is gone":              "(def (x 0)) (when true (reset))",
		"a bare name as a flag":      "(def (x 0)) (when Flow.was_timeout (report))",
		"a number as a flag":         "(def (x 0)) (when (+ x 1) (report))",
		"a condition as a number":    "(def (x 0)) (when (== Flow.was_timeout 1) (report))",
		"an unbound local":           "(def (x 0)) (when true (:= x (+ y 1)))",
		"a primitive that is set":    "(def (x 0)) (when true (:= Ack.now 1))",
		"if in an operand":           "(def (x 0)) (when true (:= x (+ (if true 1) 1)))",
		"ewma into a window":         "(def (x 0)) (when true (:= Cwnd (ewma 2 x)))",
		"three operands":             "(def (x 0)) (when true (:= x (+ 1 2 3)))",
		"a name twice":               "(def (x 0) (x 1)) (when true (report))",
		"something behind the end":   "(def (x 0)) (when true (report)) x",
		"too deep":                   "(def (x 0)) (when true (:= x " + strings.Repeat("(+ 1 ", 99),
		"nothing to do":              "(def (x 0)) (when true )",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Compile(text)
			assert.ErrorIs(t, err, ErrProgram)
		})
	}
}

func TestOldTextsDeclareFieldsByTheirNames(t *testing.T) {
	code, err := Compile("(def (Report.foo 0) (bar 1)) # what follows\n" +
		"(when (|| Flow.was_timeout false) # a flag\n (report))")
	require.NoError(t, err)
	assert.Equal(t, []string{"foo"}, code.Fields)
	assert.Equal(t, Register{ClassControl, 0}, code.Registers["bar"])
}
