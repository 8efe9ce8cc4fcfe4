package ccp

import "math/bits"

// noRTT is the value of the round trip while there is no sample.
const noRTT = 1<<32 - 1

// machine is a flow's registers under a program.
type machine struct {
	program *Program
	regs    []uint64
	zero    uint64 // µs by the flow's clock at which Micros is 0
}

// resetProgram sets the program and the first values of its registers.
func (m *machine) resetProgram(p *Program, now uint64) {
	m.program, m.zero = p, now
	if cap(m.regs) < p.size {
		m.regs = make([]uint64, p.size)
	}
	m.regs = m.regs[:p.size]
	clear(m.regs)
	for _, d := range p.consts {
		m.regs[d.slot] = d.value
	}
	for _, d := range p.presets {
		m.regs[d.slot] = d.value
	}
}

// renewVolatile sets volatile registers to their first values, as after each report.
func (m *machine) renewVolatile() {
	for _, d := range m.program.presets {
		if d.volatile {
			m.regs[d.slot] = d.value
		}
	}
}

// runOnce runs the program for one acknowledgement, loss or timeout. The caller has set the primitives
// and the limits in the registers. Where the arithmetic fails, the rest of the program is skipped, and
// values stored before remain.
func (m *machine) runOnce(now uint64) (ok bool) {
	r := m.regs
	r[implicitFlag], r[implicitContinue], r[implicitReport] = 0, 0, 0
	r[implicitMicros] = now - m.zero
	ok = true
	for _, e := range m.program.events {
		ok = m.runSteps(e[0]) && (r[implicitFlag] == 0 || m.runSteps(e[1]))
		if !ok || r[implicitFlag] != 0 && r[implicitContinue] == 0 {
			break
		}
	}
	m.zero = now - r[implicitMicros] // which may lie ahead of now: both wrap
	return ok
}

// runSteps executes a range of instructions; false: a result does not fit 64 bits, or a division is by 0.
func (m *machine) runSteps(s span) bool {
	r := m.regs
	for _, in := range m.program.steps[s.from:s.to] {
		left, right := r[in.left], r[in.right]
		switch in.op {
		case OpAdd:
			sum, carry := bits.Add64(left, right, 0)
			if carry != 0 {
				return false
			}
			r[in.result] = sum
		case OpBind:
			r[in.result] = right
		case OpDiv:
			if right == 0 {
				return false
			}
			r[in.result] = left / right
		case OpEquiv:
			r[in.result] = boolValue(left == right)
		case OpEwma:
			v, ok := ewmaOf(left, r[in.result], right)
			if !ok {
				return false
			}
			r[in.result] = v
		case OpGt:
			r[in.result] = boolValue(left > right)
		case OpIf:
			if left != 0 {
				r[in.result] = right
			}
		case OpLt:
			r[in.result] = boolValue(left < right)
		case OpMax:
			r[in.result] = max(left, right)
		case OpMaxWrap:
			r[in.result] = maxWrap(left, right)
		case OpMin:
			r[in.result] = min(left, right)
		case OpMul:
			high, low := bits.Mul64(left, right)
			if high != 0 {
				return false
			}
			r[in.result] = low
		case OpNotIf:
			if left == 0 {
				r[in.result] = right
			}
		case OpSub:
			if left < right {
				return false
			}
			r[in.result] = left - right
		}
	}
	return true
}

// boolValue returns 1 for true, as the programs count.
func boolValue(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

// ewmaOf returns an average with a tenths of the old value, or x for the first value.
func ewmaOf(a, old, x uint64) (v uint64, ok bool) {
	switch {
	case old == 0:
		return x, true
	case a > 10:
		return 0, false
	}
	highOld, lowOld := bits.Mul64(a, old)
	highNew, lowNew := bits.Mul64(10-a, x)
	low, carry := bits.Add64(lowOld, lowNew, 0)
	v, _ = bits.Div64(highOld+highNew+carry, low, 10) // an average is no more than either value
	return v, true
}

// maxWrap returns the later of two sequence numbers of 32 bits; 0 counts as not set. If they are 2^31
// apart, it returns the smaller one.
func maxWrap(a, b uint64) uint64 {
	left, right := uint32(a), uint32(b)
	switch {
	case a == 0:
		return b
	case b == 0:
		return a
	case left > right && left-right < 1<<31, left < right && right-left >= 1<<31:
		return uint64(left)
	}
	return uint64(right)
}
