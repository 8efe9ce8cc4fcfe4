package ccp

import (
	"errors"
	"fmt"
	"slices"
)

// Op is what an instruction does.
type Op uint8

// The operations. Conditions are numbers, 0 or 1: And is Mul, Or is Add.
const (
	OpAdd Op = iota
	OpBind
	OpDef
	OpDiv
	OpEquiv
	OpEwma
	OpGt
	OpIf
	OpLt
	OpMax
	OpMaxWrap
	OpMin
	OpMul
	OpNotIf
	OpSub
	opEnd
)

// Class is the kind of a register.
type Class uint8

// The classes. Volatile registers return to their first value with each report.
const (
	ClassControl Class = iota
	ClassImmediate
	ClassImplicit
	ClassLocal
	ClassPrimitive
	ClassVolatileReport
	ClassReport
	ClassTemporary
	ClassVolatileControl
	classEnd
)

var classNames = [...]string{
	"control", "immediate", "implicit", "local", "primitive", "volatile report", "report", "temporary",
	"volatile control",
}

// Register is an operand; an immediate's index is its value.
type Register struct {
	Class Class
	Index uint32
}

// Instruction is one step of a program.
type Instruction struct {
	Op                  Op
	Result, Left, Right Register
}

// The implicit registers.
const (
	implicitFlag uint32 = iota
	implicitContinue
	implicitReport
	implicitMicros // since the program's time zero
	implicitCwnd   // bytes
	implicitRate   // bytes/s
	implicits
)

// The primitives, in the order of their indexes.
const (
	primBytesAcked = iota
	primBytesMisordered
	primECNBytes
	primECNPackets
	primLostPackets
	primNow
	primPacketsAcked
	primPacketsMisordered
	primBytesInFlight
	primBytesPending
	primPacketsInFlight
	primRateIncoming
	primRateOutgoing
	primRTT
	primTimeout
	primitives
)

// The bounds of a program: libccp's, but for temporaries: portus makes up to 16.
const (
	maxEvents       = 256
	maxInstructions = 256
	maxNamed        = 110 // control, and report
	maxLocals       = 8
	maxTemporaries  = 16
	maxUpdates      = maxNamed + 2
)

// maxRegisters bounds the registers that a program may use, by class.
var maxRegisters = [classEnd]uint32{
	ClassControl: maxNamed, ClassVolatileControl: maxNamed,
	ClassReport: maxNamed, ClassVolatileReport: maxNamed,
	ClassImplicit: implicits, ClassLocal: maxLocals, ClassPrimitive: primitives, ClassTemporary: maxTemporaries,
}

// ErrProgram is wrapped by every error about a program that cannot run.
var ErrProgram = errors.New("program refused")

// The slots of a flow's registers: implicit ones, primitives, then those that the program names.
const (
	slotPrimitives = int(implicits)
	slotNamed      = slotPrimitives + primitives
)

// step is an instruction. Its operands are slots of a flow's registers.
type step struct {
	op                  Op
	result, left, right uint16
}

// span is a range of steps.
type span struct{ from, to int }

// preset is the first value of a register.
type preset struct {
	slot     uint16
	volatile bool
	value    uint64
}

// Program is a verified program. It is immutable, so flows share it.
type Program struct {
	id      uint32
	steps   []step
	events  [][2]span // flag, body
	presets []preset
	consts  []preset
	reports []uint16          // slots, in the order of their indexes
	control map[uint32]uint16 // slots of control registers by index
	size    int               // number of slots
}

// Fields returns the number of fields of a report.
func (p *Program) Fields() int { return len(p.reports) }

// Verify checks a program, so that it can run without further checks.
func (m Install) Verify() (*Program, error) {
	fail := func(format string, args ...any) (*Program, error) {
		return nil, fmt.Errorf("%w: program %d: %s", ErrProgram, m.Program, fmt.Sprintf(format, args...))
	}
	if len(m.Events) > maxEvents || len(m.Instructions) > maxInstructions {
		return fail("%d events and %d instructions; it may have %d of each",
			len(m.Events), len(m.Instructions), maxEvents)
	}
	if m.Program == 0 {
		return fail("0 is no program's number")
	}
	p := &Program{id: m.Program, control: map[uint32]uint16{}, size: slotNamed}
	v := verifier{p: p, slots: map[Register]uint16{}}
	for i, in := range m.Instructions {
		if err := v.addInstruction(in); err != nil {
			return fail("instruction %d: %v", i, err)
		}
	}
	total := uint32(len(m.Instructions))
	steps := uint64(0) // of all events, which may have instructions in common
	for i, e := range m.Events {
		flag, ok := spanWithin(e.Flag, e.Flags, total)
		body, okBody := spanWithin(e.Body, e.Bodies, total)
		if !ok || !okBody {
			return fail("event %d is beyond the %d instructions", i, total)
		}
		if steps += uint64(e.Flags) + uint64(e.Bodies); steps > maxInstructions {
			return fail("its events have more than %d instructions together", maxInstructions)
		}
		for _, s := range [...]span{flag, body} {
			if slices.ContainsFunc(p.steps[s.from:s.to], func(s step) bool { return s.op == OpDef }) {
				return fail("event %d contains a def", i)
			}
		}
		p.events = append(p.events, [2]span{flag, body})
	}
	// The fields of a report are the report registers with a first value. Their indexes begin at 0.
	for i := range v.defined {
		slot, ok := v.slots[namedRegister(ClassReport, uint32(i))]
		if !ok {
			return fail("it defines %d fields of a report, but not field %d", v.defined, i)
		}
		p.reports = append(p.reports, slot)
	}
	if 16+8*len(p.reports) > MaxToAgent {
		return fail("a report of %d fields is longer than %d bytes", len(p.reports), MaxToAgent)
	}
	return p, nil
}

// spanWithin returns the span of n entries from from on; false: it ends beyond total.
func spanWithin(from, n, total uint32) (span, bool) {
	ok := from <= total && n <= total-from
	return span{int(from), int(from) + int(n)}, ok
}

// verifier gives a program's registers their slots.
type verifier struct {
	p       *Program
	slots   map[Register]uint16
	defined int // fields of the report
}

// namedRegister returns a register without the volatility in its class. Volatile and other registers share indexes.
func namedRegister(c Class, i uint32) Register {
	switch c {
	case ClassVolatileControl:
		c = ClassControl
	case ClassVolatileReport:
		c = ClassReport
	}
	return Register{c, i}
}

// slotOf returns a register's slot, and assigns one at the first use.
func (v *verifier) slotOf(r Register) (uint16, error) {
	if r.Class >= classEnd {
		return 0, fmt.Errorf("there is no register of class %d", r.Class)
	}
	if r.Class != ClassImmediate && r.Index >= maxRegisters[r.Class] {
		return 0, fmt.Errorf("there is no %s register %d: there are %d",
			classNames[r.Class], r.Index, maxRegisters[r.Class])
	}
	switch r.Class {
	case ClassImplicit:
		return uint16(r.Index), nil
	case ClassPrimitive:
		return uint16(slotPrimitives) + uint16(r.Index), nil
	}
	key := namedRegister(r.Class, r.Index)
	s, ok := v.slots[key]
	if !ok {
		s = uint16(v.p.size)
		v.slots[key] = s
		v.p.size++
		switch key.Class {
		case ClassImmediate:
			v.p.consts = append(v.p.consts, preset{slot: s, value: uint64(r.Index)})
		case ClassControl:
			v.p.control[r.Index] = s
		}
	}
	return s, nil
}

// addInstruction checks the next instruction and adds its step.
func (v *verifier) addInstruction(in Instruction) error {
	if in.Op >= opEnd {
		return fmt.Errorf("there is no operation %d", in.Op)
	}
	var s step
	var err error
	s.op = in.Op
	for _, o := range [...]struct {
		of  Register
		dst *uint16
	}{{in.Result, &s.result}, {in.Left, &s.left}, {in.Right, &s.right}} {
		if *o.dst, err = v.slotOf(o.of); err != nil {
			return err
		}
	}
	switch in.Result.Class {
	case ClassImmediate, ClassPrimitive:
		return fmt.Errorf("the result goes to a register of class %s", classNames[in.Result.Class])
	}
	if in.Op == OpDef {
		if err := v.defineValue(in, s.result); err != nil {
			return err
		}
	}
	v.p.steps = append(v.p.steps, s)
	return nil
}

// defineValue adds the first value of a register.
func (v *verifier) defineValue(in Instruction, slot uint16) error {
	if in.Right.Class != ClassImmediate {
		return errors.New("a def of something other than a number")
	}
	if slices.ContainsFunc(v.p.presets, func(d preset) bool { return d.slot == slot }) {
		return errors.New("a second def of one register")
	}
	d := preset{slot: slot, value: uint64(in.Right.Index)}
	switch in.Result.Class {
	case ClassVolatileReport, ClassReport:
		v.defined++
		d.volatile = in.Result.Class == ClassVolatileReport
	case ClassControl, ClassVolatileControl:
		d.volatile = in.Result.Class == ClassVolatileControl
	default:
		return fmt.Errorf("a def of a register of class %s", classNames[in.Result.Class])
	}
	v.p.presets = append(v.p.presets, d)
	return nil
}
