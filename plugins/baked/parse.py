"""PTX text to instructions: what the interpreter and the reader of weights share.

Covers what kernels here are made of (the emitter's subset and what NVRTC writes for the .cu kernels): entries with
parameters, registers, shared memory, labels, branch tables, nested scopes. Anything else raises ValueError with its
line.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; `name` is unique in its entry (registers of inner scopes are renamed)."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: an integer as written, or the bits of a 0f/0d literal."""

    value: int
    is_float: bool = False
    bits: int = 0
    """32 or 64 for float literals."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """A name that is no register: a label, a parameter, a shared array, a branch table."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset]."""

    base: Reg | Sym | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}."""

    items: tuple[Reg | Imm, ...]


Operand = Reg | Imm | Special | Sym | Mem | Vec


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `guard` is (predicate, negated)."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None = None


@dataclass(frozen=True)
class Shared:
    """A shared array; size None is the launch's dynamic part."""

    name: str
    align: int
    size: int | None


@dataclass
class Entry:
    """One kernel of a module."""

    name: str
    params: dict[str, int]
    """Name to bytes, in order."""
    registers: dict[str, str] = field(default_factory=dict)
    """Name to declared type (b32, f32, pred ...)."""
    shared: list[Shared] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Name to index of the instruction after it."""
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """`.branchtargets`: name to labels."""


@dataclass(frozen=True)
class Module:
    """A parsed PTX text."""

    version: str
    target: str
    entries: dict[str, Entry]


TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
    "f32": 4, "f16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip

_SPECIALS = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(laneid|warpid|cluster_ctarank|cluster_nctarank)$"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file|loc)\b([^\n;]*)")
_LABEL = re.compile(r"([\w$]+)[ \t]*:(?!:)")
_HEADER = re.compile(r"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_STATEMENT = re.compile(r"([^;]*);")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?$"
)
_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?$")
_REG_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>$")
_TABLE = re.compile(r"\.branchtargets\s+(.*)$", re.S)
_INSTRUCTION = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+(?:\|[^,\s]+)?")
_MEM = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$")


def _fail(line: int, text: str, why: str) -> NoReturn:
    raise ValueError(f"PTX line {line}: {why}: {' '.join(text.split())[:160]}")


def parse(text: str | bytes) -> Module:
    """Parse a module; raises ValueError naming the line for what is outside the subset."""
    if isinstance(text, bytes):
        text = text.decode("ascii")
    return _Parser(text.rstrip("\0")).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.newlines = [m.start() for m in re.finditer(r"\n", text)]
        self.at = 0
        self.version = self.target = ""
        self.entries: dict[str, Entry] = {}
        self.module_shared: list[Shared] = []
        self.entry: Entry | None = None
        self.scopes: list[dict[str, Reg]] = []
        self.scope_count = 0
        self.operands: dict[str, Operand] = {}

    def line(self, at: int) -> int:
        return bisect_right(self.newlines, at - 1) + 1

    def run(self) -> Module:
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at >= len(self.text):
                break
            self.step()
        if self.entry is not None:
            _fail(self.line(self.at), self.entry.name, "the entry is not closed")
        if not self.entries:
            raise ValueError("PTX has no entry")
        return Module(self.version, self.target, self.entries)

    def step(self) -> None:
        start, char = self.at, self.text[self.at]
        if char == "{":
            self.push_scope()
            self.at += 1
        elif char == "}":
            self.at += 1
            self.pop_scope(start)
        elif match := _LINE_DIRECTIVE.match(self.text, start):
            self.at = match.end()
            if match.group(1) == "version":
                self.version = match.group(2).strip()
            elif match.group(1) == "target":
                self.target = match.group(2).strip()
        elif match := _HEADER.match(self.text, start):
            self.at = match.end()
            self.open_entry(match, start)
        elif self.entry is not None and (match := _LABEL.match(self.text, start)):
            self.at = match.end()
            self.label(match.group(1), start)
        elif match := _STATEMENT.match(self.text, start):
            self.at = match.end()
            self.statement(match.group(1).strip(), start)
        else:
            _fail(self.line(start), self.text[start : start + 80], "a statement without an end")

    def push_scope(self) -> None:
        self.scopes.append({})
        self.scope_count += 1
        self.operands.clear()

    def pop_scope(self, start: int) -> None:
        if not self.scopes:
            _fail(self.line(start), "}", "a brace that closes nothing")
        self.scopes.pop()
        self.operands.clear()
        if not self.scopes:
            self.entry = None

    def open_entry(self, match: re.Match[str], start: int) -> None:
        name, params = match.group(1), {}
        for part in (match.group(2) or "").split(","):
            if part.strip():
                found = _PARAM.match(" ".join(part.split()))
                if not found or found.group(1) not in TYPE_BYTES:
                    _fail(self.line(start), part, "a parameter that is not understood")
                params[found.group(2)] = TYPE_BYTES[found.group(1)] * int(found.group(3) or 1)
        self.entry = Entry(name, params, shared=list(self.module_shared))
        self.entries[name] = self.entry
        self.scope_count = 0
        self.push_scope()

    def label(self, name: str, start: int) -> None:
        assert self.entry is not None
        rest = _STATEMENT.match(self.text, self.at)
        table = _TABLE.match(rest.group(1).strip()) if rest else None
        if rest and table:
            self.at = rest.end()
            self.entry.tables[name] = tuple(part.strip() for part in table.group(1).split(","))
        elif name in self.entry.labels:
            _fail(self.line(start), name, "a label defined twice")
        else:
            self.entry.labels[name] = len(self.entry.instructions)

    def statement(self, text: str, start: int) -> None:
        if text.startswith("."):
            self.directive(text, start)
        elif self.entry is None:
            _fail(self.line(start), text, "an instruction outside of an entry")
        elif text:
            self.instruction(text, start)

    def directive(self, text: str, start: int) -> None:
        flat = " ".join(text.split())
        if flat.startswith(".pragma"):
            return
        if match := _SHARED.match(flat):
            align, kind, name, count = match.groups()
            if kind not in TYPE_BYTES:
                _fail(self.line(start), text, "a shared array of unknown type")
            size = None if count == "" else TYPE_BYTES[kind] * int(count or 1)
            shared = Shared(name, int(align or TYPE_BYTES[kind]), size)
            (self.entry.shared if self.entry else self.module_shared).append(shared)
        elif flat.startswith(".reg ") and self.entry is not None:
            self.declare(flat, start)
        else:
            _fail(self.line(start), text, "a directive outside of the subset")

    def declare(self, flat: str, start: int) -> None:
        assert self.entry is not None
        _, kind, names = flat.split(" ", 2)
        if kind[1:] not in TYPE_BYTES:
            _fail(self.line(start), flat, "registers of unknown type")
        for name in (part.strip() for part in names.split(",")):
            match = _REG_RANGE.match(name)
            for one in [f"{match.group(1)}{i}" for i in range(int(match.group(2)))] if match else [name]:
                unique = one if len(self.scopes) == 1 else f"{one}@{self.scope_count}"
                self.scopes[-1][one] = Reg(unique)
                self.entry.registers[unique] = kind[1:]

    def instruction(self, text: str, start: int) -> None:
        assert self.entry is not None
        match = _INSTRUCTION.match(text)
        if not match:
            _fail(self.line(start), text, "a statement that is not understood")
        negated, guard, opcode, rest = match.groups()
        where = self.line(start)
        predicate = None
        if guard:
            register = self.operand(guard, where, text)
            if not isinstance(register, Reg):
                _fail(where, text, "a guard that is no register")
            predicate = (register, bool(negated))
        operands = tuple([self.operand(part, where, text) for part in _OPERANDS.findall(rest)])
        self.entry.instructions.append(Instruction(where, text, opcode, operands, predicate))

    def operand(self, text: str, line: int, statement: str) -> Operand:
        found = self.operands.get(text)
        if found is None:
            found = self.operands[text] = self.make_operand(text, line, statement)
        return found

    def make_operand(self, text: str, line: int, statement: str) -> Operand:
        first = text[0]
        if first == "{" or "|" in text:
            items = [self.operand(part.strip(), line, statement) for part in re.split(r"[,|]", text.strip("{}"))]
            if not all(isinstance(item, Reg | Imm) for item in items):
                _fail(line, statement, f"a vector of something else than registers ({text})")
            return Vec(tuple(items))  # type: ignore[arg-type]
        if first == "[":
            match = _MEM.match(text)
            if not match:
                _fail(line, statement, f"an address that is not understood ({text})")
            base = self.operand(match.group(1), line, statement)
            if not isinstance(base, Reg | Sym | Imm):
                _fail(line, statement, f"an address of a special register ({text})")
            return Mem(base, int(match.group(2) or "0", 0))
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if _SPECIALS.match(text):
            return Special(text)
        if first.isdigit() or first == "-":
            return _literal(text, line, statement)
        if first == "%":
            _fail(line, statement, f"register {text} is not declared")
        return Sym(text)


def _literal(text: str, line: int, statement: str) -> Imm:
    try:
        if text[:2] in ("0f", "0F"):
            return Imm(int(text[2:], 16), True, 32)
        if text[:2] in ("0d", "0D"):
            return Imm(int(text[2:], 16), True, 64)
        if "." in text:
            return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], True, 64)
        return Imm(int(text.rstrip("uU"), 0))
    except ValueError:
        _fail(line, statement, f"a literal that is not understood ({text})")
