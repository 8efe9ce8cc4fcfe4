"""Translates a datapath program's text into the instructions that a datapath runs."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple, Union

Register = Tuple[int, int]  # class, index
Node = Union[str, List["Node"]]

CONTROL, IMMEDIATE, IMPLICIT, LOCAL, PRIMITIVE, VOLATILE_REPORT, REPORT, TEMPORARY, VOLATILE_CONTROL = range(9)
BIND, DEF = 1, 2
OPERATIONS: Dict[str, int] = {
    "+": 0, "add": 0, "||": 0, "or": 0, ":=": 1, "bind": 1, "/": 3, "div": 3, "==": 4, "eq": 4, "ewma": 5, ">": 6,
    "gt": 6, "if": 7, "<": 8, "lt": 8, "max": 9, "wrapped_max": 10, "min": 11, "*": 12, "mul": 12, "&&": 12, "and": 12,
    "!if": 13, "-": 14, "sub": 14,
}
INTO_TARGET = {"ewma", "if", "!if"}  # which stand at the right of a := alone
PRIMITIVES = (
    "Ack.bytes_acked Ack.bytes_misordered Ack.ecn_bytes Ack.ecn_packets Ack.lost_pkts_sample Ack.now "
    "Ack.packets_acked Ack.packets_misordered Flow.bytes_in_flight Flow.bytes_pending Flow.packets_in_flight "
    "Flow.rate_incoming Flow.rate_outgoing Flow.rtt_sample_us Flow.was_timeout"
).split()
CWND, RATE = (IMPLICIT, 4), (IMPLICIT, 5)


class ProgramError(ValueError):
    """A text that is no program."""


@dataclass
class Program:
    """A compiled program: what it reports, and which registers an agent may set, by name."""

    fields: List[str] = field(default_factory=list)
    registers: Dict[str, Register] = field(default_factory=lambda: {"Cwnd": CWND, "Rate": RATE})
    events: List[Tuple[int, int, int, int]] = field(default_factory=list)
    instructions: List[Tuple[int, Register, Register, Register]] = field(default_factory=list)

    def install(self, uid: int) -> bytes:
        """The message that installs the program under a number above 0."""
        body = struct.pack("<III", uid, len(self.events), len(self.instructions))
        body += b"".join(struct.pack("<IIII", *e) for e in self.events)
        for op, *registers in self.instructions:
            body += struct.pack("<B", op) + b"".join(struct.pack("<BI", *r) for r in registers)
        return struct.pack("<HHI", 2, 8 + len(body), 0) + body


def compile_program(text: str) -> Program:
    """Translates a text; raises ProgramError."""
    return _Compiler(text).program


class _Compiler:
    def __init__(self, text: str) -> None:
        self.program = Program()
        self.names: Dict[str, Register] = {n: (PRIMITIVE, i) for i, n in enumerate(PRIMITIVES)}
        self.names.update({"Micros": (IMPLICIT, 3), "Cwnd": CWND, "Rate": RATE})
        self.locals = self.temporaries = 0
        self.tokens: List[str] = re.findall(r"[()]|[^\s()]+", re.sub(r"#[^\n]*", "", text))
        forms: List[Node] = []
        while self.tokens:
            forms.append(self._read())
        if len(forms) < 2 or not isinstance(forms[0], list) or forms[0][:1] != ["def"]:
            raise ProgramError("a program is a (def …) and at least one (when …)")
        self._declare(forms[0][1:])
        for form in forms[1:]:
            self._event(form)
        self._count()

    def _count(self) -> None:
        p = self.program
        deepest = max((r[1] + 1 for i in p.instructions for r in i[1:] if r[0] == TEMPORARY), default=0)
        for count, most, what in (
            (len(p.events), 256, "events"), (len(p.instructions), 256, "instructions"),
            (len(p.fields), 110, "fields of a Report"), (len(p.registers) - 2, 110, "variables"),
            (self.locals, 8, "local variables"), (deepest, 16, "operations in one expression"),
        ):
            if count > most:
                raise ProgramError(f"a datapath takes {most} {what}; these are {count}")

    def _read(self) -> Node:
        token = self.tokens.pop(0)
        if token == ")":
            raise ProgramError("a ) too many")
        if token != "(":
            return token
        items: List[Node] = []
        while self.tokens and self.tokens[0] != ")":
            items.append(self._read())
        if not self.tokens:
            raise ProgramError("a ) is missing")
        self.tokens.pop(0)
        return items

    def _declare(self, items: List[Node]) -> None:
        first: List[Tuple[str, Register, Node]] = []
        counts = {True: 0, False: 0}

        def add(item: Node, in_report: bool) -> None:
            words = list(item) if isinstance(item, list) else []
            volatile = words[:1] == ["volatile"] and len(words) == 3
            if len(words) != 2 + volatile or not isinstance(words[-2], str):
                raise ProgramError(f"{item} declares nothing")
            name = ("Report." if in_report else "") + words[-2]
            reports = name.startswith("Report.")
            if name in self.names:
                raise ProgramError(f"{name} is declared twice, or a name of the language")
            kinds = (VOLATILE_REPORT, REPORT) if reports else (VOLATILE_CONTROL, CONTROL)
            register = (kinds[0] if volatile else kinds[1], counts[reports])
            counts[reports] += 1
            self.names[name] = register
            if reports:
                self.program.fields.append(name[len("Report."):])
            else:
                self.program.registers[name] = register
            first.append((name, register, words[-1]))

        for item in items:
            if isinstance(item, list) and item[:1] == ["Report"]:
                for inner in item[1:]:
                    add(inner, True)
        for item in items:
            if not (isinstance(item, list) and item[:1] == ["Report"]):
                add(item, False)
        for name, register, value in sorted(first):
            number = self._immediate(value)
            if number is not None:
                self.program.instructions.append((DEF, register, register, number))
            elif register[0] in (VOLATILE_REPORT, REPORT):  # a datapath would not report it
                raise ProgramError(f"{name} needs a number as its first value")

    def _event(self, form: Node) -> None:
        if not isinstance(form, list) or form[:1] != ["when"] or len(form) < 3:
            raise ProgramError(f"{form} is no (when CONDITION WHAT …)")
        code, flag = self.program.instructions, (IMPLICIT, 0)
        start = len(code)
        self.temporaries = 0
        result = self._expression(form[1])
        if len(code) > start and code[-1][1] == result and result[0] == TEMPORARY:
            code[-1] = (code[-1][0], flag, *code[-1][2:])
        elif result[0] == IMMEDIATE:
            code.append((BIND, flag, flag, result))
        else:
            raise ProgramError(f"{form[1]} is no condition; write (|| {form[1]} false)")
        body = len(code)
        for item in form[2:]:
            self.temporaries = 0
            self._expression(item)
        self.program.events.append((start, body - start, body, len(code) - body))

    @staticmethod
    def _immediate(node: Node) -> Optional[Register]:
        constants = {"true": 1, "false": 0, "+infinity": 0xFFFFFFFF}
        if isinstance(node, str) and node in constants:
            return IMMEDIATE, constants[node]
        if isinstance(node, str) and node.isdigit():
            if int(node) >= 1 << 31:
                raise ProgramError(f"{node} is not below {1 << 31}")
            return IMMEDIATE, int(node)
        return None

    def _operand(self, node: Node) -> Register:
        if isinstance(node, str) and node not in self.names and self._immediate(node) is None:
            raise ProgramError(f"{node} is declared nowhere, and not set before")
        return self._expression(node)

    def _expression(self, node: Node) -> Register:
        code = self.program.instructions
        if isinstance(node, str):
            number = self._immediate(node)
            if number is not None:
                return number
            if node not in self.names:
                self.names[node] = (LOCAL, self.locals)
                self.locals += 1
            return self.names[node]
        if node in (["fallthrough"], ["report"]):
            register = (IMPLICIT, 1 if node == ["fallthrough"] else 2)
            code.append((BIND, register, register, (IMMEDIATE, 1)))
            return register
        if len(node) != 3 or not isinstance(node[0], str) or node[0] not in OPERATIONS:
            raise ProgramError(f"{node} is no operation with two operands")
        name, left, right = node
        operation = OPERATIONS[str(name)]
        if operation != BIND:
            if name in INTO_TARGET:
                raise ProgramError(f"{name} stands at the right of a := alone")
            operands = self._operand(left), self._operand(right)
            result = (TEMPORARY, self.temporaries)
            self.temporaries += 1
            code.append((operation, result, *operands))
            return result
        target = self._expression(left)
        if target[0] in (IMMEDIATE, PRIMITIVE, TEMPORARY):
            raise ProgramError(f"{left} cannot be set")
        if isinstance(right, list) and right and right[0] in INTO_TARGET and len(right) == 3:
            if target[0] in (LOCAL, IMPLICIT):
                raise ProgramError(f"{right[0]} sets control and report variables alone, not {left}")
            value = self._operand if right[0] == "ewma" else self._expression
            operands = self._operand(right[1]), value(right[2])
            code.append((OPERATIONS[str(right[0])], target, *operands))
        else:
            code.append((BIND, target, target, self._expression(right)))
        return target
