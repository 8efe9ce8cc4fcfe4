"""Congestion control agents: subclass Flow, and run an Agent with it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from typing import Dict, List, Optional, Tuple, Type

from .program import Program, ProgramError, Register, compile_program

__all__ = ["DEFAULT_SOCKET", "Agent", "Flow", "Program", "ProgramError", "Report", "compile_program"]

DEFAULT_SOCKET = "/tmp/ccp/portus"
CREATE, MEASURE, UPDATE, CHANGE, READY = 0, 1, 3, 4, 5
_HEADER = struct.Struct("<HHI")
_MOST = (1 << 64) - 1
_MOST_PROGRAMS = 256  # that a datapath takes
_ROOM_WITHIN = 0.1  # seconds


class Report:
    """What a program has folded: its fields are attributes."""

    def __init__(self, program: str, names: List[str], values: Tuple[int, ...]) -> None:
        self.program = program
        self.__dict__.update(zip(names, values))

    def __getattr__(self, name: str) -> int:
        raise AttributeError(f"the program {self.program!r} reports no {name!r}")


class Flow:
    """A flow of a datapath. Subclasses name their programs, and say what to do."""

    programs: Dict[str, str] = {}  # texts, by name

    def __init__(self, agent: "Agent", address: str, sid: int, cwnd: int, mss: int, algorithm: str) -> None:
        self._agent, self._address, self._sid = agent, address, sid
        self.initial_cwnd, self.mss = cwnd, mss  # bytes
        self.algorithm = algorithm  # what the datapath has asked for; may be empty
        self.program = ""

    def on_create(self) -> None:
        """The flow is new: set a program."""
        raise NotImplementedError

    def on_report(self, report: Report) -> None:
        """The program has reported."""
        raise NotImplementedError

    def on_close(self) -> None:
        """The flow is over: the datapath has closed it, announces it anew, or has started anew."""

    def run(self, program: str, /, **registers: int) -> None:
        """Has the datapath run a program from now on, with registers set."""
        self.program = program
        self._decide(CHANGE, struct.pack("<I", self._agent.numbers[program]), registers)

    def update(self, /, **registers: int) -> None:
        """Sets Cwnd (bytes), Rate (bytes/s) or variables of the program."""
        self._decide(UPDATE, b"", registers)

    def _decide(self, kind: int, body: bytes, values: Dict[str, int]) -> None:
        known: Dict[str, Register] = self._agent.compiled[self.program].registers
        body += struct.pack("<I", len(values))
        for name, value in values.items():
            if name not in known:
                raise KeyError(f"the program {self.program!r} has no variable {name!r}")
            body += struct.pack("<BIQ", *known[name], min(max(int(value), 0), _MOST))
        self._agent.send(self._address, kind, self._sid, body)


class Agent:
    """An agent at a Unix datagram socket."""

    def __init__(self, flow: Type[Flow], path: str = DEFAULT_SOCKET) -> None:
        if len(flow.programs) > _MOST_PROGRAMS:
            raise ProgramError(f"a datapath takes {_MOST_PROGRAMS} programs; these are {len(flow.programs)}")
        self.flow, self.path = flow, path
        self.compiled: Dict[str, Program] = {name: compile_program(text) for name, text in flow.programs.items()}
        self.numbers: Dict[str, int] = {name: i + 1 for i, name in enumerate(self.compiled)}
        self.flows: Dict[Tuple[str, int], Flow] = {}
        self._known: set[str] = set()  # datapaths that have the programs
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if os.path.exists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)  # an earlier process left it
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)

    def serve(self) -> None:
        """Serves datapaths until the process ends."""
        while True:
            message, address = self._socket.recvfrom(2048)
            if address:
                self.receive(message, address)

    def receive(self, message: bytes, address: str) -> None:
        """Takes one datagram of a datapath; what is malformed is left alone."""
        if len(message) < _HEADER.size:
            return
        kind, length, sid = _HEADER.unpack_from(message)
        if length != len(message):
            return
        body = message[_HEADER.size:]
        if kind == READY and len(body) == 4:
            for key in [key for key in self.flows if key[0] == address]:
                self._forget(key)
            self._install(address)
        elif kind == CREATE and len(body) == 88:
            if address not in self._known:
                self._install(address)
            cwnd, mss = struct.unpack_from("<II", body)
            name = body[24:].split(b"\0", 1)[0].decode("utf-8", "replace")
            self._forget((address, sid))
            flow = self.flows[address, sid] = self.flow(self, address, sid, cwnd, mss, name)
            flow.on_create()
        elif kind == MEASURE and len(body) >= 8:
            self._measure(address, sid, body)

    def _measure(self, address: str, sid: int, body: bytes) -> None:
        uid, count = struct.unpack_from("<II", body)
        flow: Optional[Flow] = self.flows.get((address, sid))
        if flow is None or len(body) != 8 + 8 * count:
            return
        if uid == 0 and count == 0:
            self._forget((address, sid))
        elif uid == self.numbers.get(flow.program):  # a report of the program before is late
            names = self.compiled[flow.program].fields
            if count == len(names):
                flow.on_report(Report(flow.program, names, struct.unpack_from(f"<{count}Q", body, 8)))

    def _forget(self, key: Tuple[str, int]) -> None:
        flow = self.flows.pop(key, None)
        if flow is not None:
            flow.on_close()

    def _install(self, address: str) -> None:
        self._known.add(address)
        for name, program in self.compiled.items():
            self._transmit(address, program.install(self.numbers[name]))

    def send(self, address: str, kind: int, sid: int, body: bytes) -> None:
        """Sends a message about a flow."""
        self._transmit(address, _HEADER.pack(kind, _HEADER.size + len(body), sid) + body)

    def _transmit(self, address: str, message: bytes) -> None:
        # A message is lost if the socket of a datapath stays full, as that of one that is stopped; others wait.
        until = time.monotonic() + _ROOM_WITHIN
        try:
            while True:
                try:
                    self._socket.sendto(message, socket.MSG_DONTWAIT, address)
                    return
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.001)
        except OSError:  # the datapath has gone, or has lost what may have been a program
            self._known.discard(address)
