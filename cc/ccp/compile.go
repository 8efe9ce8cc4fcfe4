package ccp

import (
	"fmt"
	"slices"
	"strings"
)

// typ is the type of a value in a program's text.
type typ uint8

const (
	unknownType typ = iota
	numType
	boolType
)

// primitiveNames are in the order of their indexes.
var primitiveNames = [primitives]string{
	"Ack.bytes_acked", "Ack.bytes_misordered", "Ack.ecn_bytes", "Ack.ecn_packets", "Ack.lost_pkts_sample", "Ack.now",
	"Ack.packets_acked", "Ack.packets_misordered", "Flow.bytes_in_flight", "Flow.bytes_pending",
	"Flow.packets_in_flight", "Flow.rate_incoming", "Flow.rate_outgoing", "Flow.rtt_sample_us", "Flow.was_timeout",
}

// implicitNames are the names of implicit registers that a text may use, in the order of their indexes.
var implicitNames = [implicits]string{implicitMicros: "Micros", implicitCwnd: "Cwnd", implicitRate: "Rate"}

// Code is a compiled program.
type Code struct {
	Events       []Event
	Instructions []Instruction
	Fields       []string            // of a report, in order, without "Report."
	Registers    map[string]Register // those that an agent may set, by name: Cwnd, Rate, and control variables
}

// Install returns the message that installs the program under a number above 0.
func (c *Code) Install(program uint32) Install {
	return Install{Program: program, Events: c.Events, Instructions: c.Instructions}
}

// variable is a name of the text.
type variable struct {
	reg Register
	typ typ
}

// compiler translates one program. It numbers the registers of a class in the order of their appearance.
type compiler struct {
	code  Code
	names map[string]*variable
	local uint32
	temp  uint32
}

// Compile translates a program's text. Errors wrap ErrProgram and name the line, or the
// variable.
func Compile(text string) (*Code, error) {
	report, plain, events, err := (&parser{text: text}).parseProgram()
	if err != nil {
		return nil, err
	}
	c := &compiler{names: map[string]*variable{}}
	for i, name := range primitiveNames {
		c.names[name] = &variable{Register{ClassPrimitive, uint32(i)}, numType}
	}
	c.names[primitiveNames[primTimeout]].typ = boolType
	c.code.Registers = map[string]Register{}
	for i, name := range implicitNames {
		if name != "" {
			c.names[name] = &variable{Register{ClassImplicit, uint32(i)}, numType}
		}
		if uint32(i) == implicitCwnd || uint32(i) == implicitRate {
			c.code.Registers[name] = Register{ClassImplicit, uint32(i)}
		}
	}
	if err := c.declareVariables(report, ClassReport, ClassVolatileReport); err != nil {
		return nil, err
	}
	if err := c.declareVariables(plain, ClassControl, ClassVolatileControl); err != nil {
		return nil, err
	}
	c.emitDefinitions(slices.Concat(report, plain))
	for i, e := range events {
		if err := c.compileEvent(e); err != nil {
			return nil, fmt.Errorf("%w: (when …) number %d: %w", ErrProgram, i+1, err)
		}
	}
	if _, err := c.code.Install(1).Verify(); err != nil {
		return nil, err
	}
	return &c.code, nil
}

// declareVariables gives variables their registers.
func (c *compiler) declareVariables(list []decl, kept, volatile Class) error {
	for i, d := range list {
		if c.names[d.name] != nil {
			return fmt.Errorf("%w: %s is declared twice, or is a name of the language", ErrProgram, d.name)
		}
		v := &variable{Register{kept, uint32(i)}, d.first.kind}
		if d.volatile {
			v.reg.Class = volatile
		}
		if v.typ == unknownType {
			v.typ = numType
		}
		c.names[d.name] = v
		if field, is := strings.CutPrefix(d.name, "Report."); is {
			c.code.Fields = append(c.code.Fields, field)
		} else {
			c.code.Registers[d.name] = v.reg
		}
	}
	return nil
}

// emitDefinitions emits the definitions of first values, in the order of names.
func (c *compiler) emitDefinitions(list []decl) {
	slices.SortFunc(list, func(a, b decl) int { return strings.Compare(a.name, b.name) })
	for _, d := range list {
		if d.first.atom == "" {
			reg := c.names[d.name].reg
			c.emitInstruction(OpDef, reg, reg, Register{ClassImmediate, d.first.num})
		}
	}
}

// emitInstruction appends an instruction to the code.
func (c *compiler) emitInstruction(op Op, result, left, right Register) {
	c.code.Instructions = append(c.code.Instructions, Instruction{op, result, left, right})
}

// nextIndex returns the index of the next instruction.
func (c *compiler) nextIndex() uint32 { return uint32(len(c.code.Instructions)) }

// compileEvent translates one (when flag body …): first the flag, then each expression of the body. The numbers of
// temporaries begin anew with each expression, because no other one uses them.
func (c *compiler) compileEvent(e clause) error {
	at := Event{Flag: c.nextIndex()}
	if err := c.compileFlag(e.flag); err != nil {
		return err
	}
	at.Flags, at.Body = c.nextIndex()-at.Flag, c.nextIndex()
	for _, n := range e.body {
		c.temp = 0
		if _, _, err := c.compileExpr(n); err != nil {
			return err
		}
	}
	at.Bodies = c.nextIndex() - at.Body
	c.code.Events = append(c.code.Events, at)
	return nil
}

// compileFlag emits a condition. Its result is the event's flag.
func (c *compiler) compileFlag(n node) error {
	flag := Register{ClassImplicit, implicitFlag}
	c.temp = 0
	from := c.nextIndex()
	reg, kind, err := c.compileExpr(n)
	switch {
	case err != nil:
		return err
	case kind != boolType:
		return fmt.Errorf("the condition is a number")
	case c.nextIndex() > from && reg.Class == ClassTemporary:
		c.code.Instructions[c.nextIndex()-1].Result = flag
	case n.op == "" && n.atom == "":
		c.emitInstruction(OpBind, flag, flag, reg)
	default:
		return fmt.Errorf("the condition is a name; write (|| %s false)", n.atom)
	}
	return nil
}

// compileExpr emits an expression, and returns the register and the type of its value.
func (c *compiler) compileExpr(n node) (Register, typ, error) {
	switch {
	case n.op == "" && n.atom == "":
		return Register{ClassImmediate, n.num}, n.kind, nil
	case n.op == "":
		v := c.lookUpName(n.atom)
		return v.reg, v.typ, nil
	case n.op == "fallthrough", n.op == "report":
		reg := Register{ClassImplicit, implicitContinue}
		if n.op == "report" {
			reg.Index = implicitReport
		}
		c.emitInstruction(OpBind, reg, reg, Register{ClassImmediate, 1})
		return reg, unknownType, nil
	}
	switch op := operators[n.op]; op {
	case OpBind:
		return c.compileBind(n.args[0], n.args[1])
	case OpIf, OpNotIf, OpEwma:
		return Register{}, 0, fmt.Errorf("%s stands only at the right of a := to a control or a report variable", n.op)
	default:
		return c.compileArithmetic(n, op)
	}
}

// lookUpName returns the variable of a name. An unknown name becomes a local variable.
func (c *compiler) lookUpName(name string) *variable {
	v := c.names[name]
	if v == nil {
		v = &variable{reg: Register{ClassLocal, c.local}}
		c.local++
		c.names[name] = v
	}
	return v
}

// compileBind emits an assignment.
func (c *compiler) compileBind(left, right node) (Register, typ, error) {
	if left.atom == "" {
		return Register{}, 0, fmt.Errorf("a := has no variable at its left")
	}
	v := c.lookUpName(left.atom)
	if v.reg.Class == ClassPrimitive {
		return Register{}, 0, fmt.Errorf("%s cannot be set", left.atom)
	}
	if op := operators[right.op]; right.op != "" && (op == OpIf || op == OpNotIf || op == OpEwma) {
		if v.reg.Class == ClassLocal || v.reg.Class == ClassImplicit {
			return Register{}, 0, fmt.Errorf("%s sets control and report variables alone, not %s", right.op, left.atom)
		}
		a, b, err := c.compileOperands(right, op)
		if err != nil {
			return Register{}, 0, err
		}
		c.emitInstruction(op, v.reg, a, b)
		return v.reg, v.typ, nil
	}
	value, kind, err := c.compileExpr(right)
	if err != nil {
		return Register{}, 0, err
	}
	if v.typ == unknownType {
		v.typ = kind
	}
	c.emitInstruction(OpBind, v.reg, v.reg, value)
	return v.reg, v.typ, nil
}

// compileOperands emits the operands of an operation, and checks their types.
func (c *compiler) compileOperands(n node, op Op) (a, b Register, err error) {
	want := [2]typ{numType, numType}
	switch {
	case op == OpIf || op == OpNotIf:
		want = [2]typ{boolType, unknownType}
	case n.op == "&&" || n.op == "and" || n.op == "||" || n.op == "or":
		want = [2]typ{boolType, boolType}
	}
	var regs [2]Register
	for i, arg := range n.args {
		var kind typ
		if regs[i], kind, err = c.compileExpr(arg); err != nil {
			return a, b, err
		}
		if want[i] != unknownType && kind != want[i] {
			return a, b, fmt.Errorf("%s takes %s: operand %d is none", n.op, [...]string{
				numType: "numbers", boolType: "conditions",
			}[want[i]], i+1)
		}
	}
	return regs[0], regs[1], nil
}

// compileArithmetic emits an operation. Its result is a temporary.
func (c *compiler) compileArithmetic(n node, op Op) (Register, typ, error) {
	a, b, err := c.compileOperands(n, op)
	if err != nil {
		return Register{}, 0, err
	}
	result, kind := Register{ClassTemporary, c.temp}, numType
	c.temp++
	switch n.op {
	case "&&", "and", "||", "or", ">", "gt", "<", "lt", "==", "eq":
		kind = boolType
	}
	c.emitInstruction(op, result, a, b)
	return result, kind, nil
}
