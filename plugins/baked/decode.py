"""PTX instructions to closures over numpy arrays: one call computes an instruction for every thread of a fragment."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsedeploy.plugins.baked.memory import AccessError, Array
from sparsedeploy.plugins.baked.parse import (
    TYPE_BYTES,
    Entry,
    Imm,
    Instruction,
    Mem,
    Operand,
    Reg,
    Special,
    Sym,
    Vec,
)
from sparsedeploy.plugins.baked.threads import Barrier, Batch, Control, Do, Fragment, Get, InterpretError

_CLUSTER_RANK_SHIFT = 24
"""Address of another block's shared memory: (rank + 1) in the bits above; 0 there is the own block."""

_NUMPY: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.int16, "f16": np.float16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
_STORED: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.uint8, "b16": np.uint16, "u16": np.uint16,
    "s16": np.uint16, "f16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.uint32, "f32": np.float32,
    "f16x2": np.uint32, "b64": np.uint64, "u64": np.uint64, "s64": np.uint64, "f64": np.float64,
}  # fmt: skip
"""What a register of a declared type is kept as; f32 apart, everything is unsigned."""


class Layout:
    """Where an entry's registers, parameters and shared variables lie."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.index = {name: i for i, name in enumerate(entry.registers)}
        self.kinds = entry.registers
        self.param_offset: dict[str, int] = {}
        offset = 0
        for name, size in entry.params.items():
            align = min(size & -size, 8)
            offset = (offset + align - 1) // align * align
            self.param_offset[name] = offset
            offset += size
        self.param_bytes = offset
        self.shared_offset: dict[str, int] = {}
        self.static_bytes = self._lay_out_shared()
        self.granule = min(
            [4]
            + [TYPE_BYTES[kind] for ins in entry.instructions if (kind := _shared_kind(ins)) and TYPE_BYTES[kind] < 4]
        )

    def _lay_out_shared(self) -> int:
        at = 0
        for shared in [one for one in self.entry.shared if one.size is not None]:
            at = (at + shared.align - 1) // shared.align * shared.align
            self.shared_offset[shared.name] = at
            at += shared.size or 0
        start = at
        for shared in [one for one in self.entry.shared if one.size is None]:
            start = (at + shared.align - 1) // shared.align * shared.align
            self.shared_offset[shared.name] = start
        return start


def _shared_kind(ins: Instruction) -> str | None:
    parts = ins.opcode.split(".")
    return parts[-1] if parts[0] in ("ld", "st", "atom", "red") and "shared" in ins.opcode else None


class Decoder:
    """Instructions to closures."""

    def __init__(self, program: Layout) -> None:
        self.program = program
        self.readers: dict[tuple[str, str], Get] = {}

    def decode(self, ins: Instruction) -> Do | Control:
        name = ins.opcode.split(".")[0]
        try:
            control = self.control(ins, name)
            if control is not None:
                return control
            make = getattr(self, f"op_{name}", None)
            if make is None:
                raise KeyError(name)
            done: Do = make(ins, ins.opcode.split(".")[1:])
            return done
        except (KeyError, IndexError, NotImplementedError, AttributeError) as error:
            why = f" ({error})" if str(error) and not isinstance(error, KeyError) else ""
            raise InterpretError(
                f"{self.program.entry.name}: line {ins.line}: `{' '.join(ins.text.split())}` is not in the interpreted "
                f"subset{why}"
            ) from error

    # -- control

    def control(self, ins: Instruction, name: str) -> Control | None:
        guard = self.guard(ins)
        labels = self.program.entry.labels
        if name == "bra":
            (target,) = ins.operands
            return Control("bra", guard, (labels[symbol(target)],), None)
        if name == "brx":
            index, table = ins.operands
            targets = tuple(labels[label] for label in self.program.entry.tables[symbol(table)])
            return Control("brx", guard, targets, self.read(index, "u32"))
        if name in ("ret", "exit"):
            return Control("exit", guard, (), None)
        if name == "bar" and "warp" in ins.opcode:
            return None
        if name == "barrier" and "cluster" in ins.opcode:
            return Control("cluster", guard, (), None) if ".wait" in ins.opcode else None
        if name == "mbarrier" and ".try_wait.parity" in ins.opcode:
            if not _is_zero(ins.operands[2]):
                raise NotImplementedError("only the first phase")
            true = np.bool_(True)
            then = self.write(ins.operands[0], "pred", lambda f: np.full(len(f.lanes), true), ins)
            return Control("mbarrier", guard, (), self.address(ins.operands[1]), then)
        if name in ("bar", "barrier"):
            if ".sync" not in ins.opcode or len(ins.operands) != 1 or not _is_zero(ins.operands[0]):
                raise NotImplementedError("only barrier 0 of the whole block")
            return Control("bar", guard, (), None)
        return None

    def guard(self, ins: Instruction) -> Get | None:
        if ins.guard is None:
            return None
        at, negated = self.program.index[ins.guard[0].name], ins.guard[1]
        if negated:
            return lambda f: ~f.regs[at]  # type: ignore[operator]
        return lambda f: f.regs[at]  # type: ignore[return-value]

    # -- operands

    def read(self, operand: Operand, kind: str) -> Get:
        """The operand as an array (or a numpy scalar, for literals) of `kind`."""
        want = _NUMPY[kind]
        if isinstance(operand, Reg):
            known = self.readers.get((operand.name, kind))
            if known is None:
                at, held = self.program.index[operand.name], self.program.kinds[operand.name]
                known = self.readers[operand.name, kind] = _reader(at, held, kind)
            return known
        if isinstance(operand, Sym):
            value = want(self.program.shared_offset[operand.name])
            return lambda f: value
        if isinstance(operand, Imm):
            literal = _literal(operand, kind)
            return lambda f: literal
        raise NotImplementedError("an operand of this form here")

    def write(self, operand: Operand, kind: str, compute: Get, ins: Instruction) -> Do:
        """Store what `compute` returns (of `kind`) in a register, under the guard."""
        if not isinstance(operand, Reg):
            raise NotImplementedError("a destination that is no register")
        at, held = self.program.index[operand.name], self.program.kinds[operand.name]
        convert = _converter(kind, held)
        guard = self.guard(ins)

        def plain(batch: Batch, f: Fragment) -> None:
            value = compute(f)
            if value.ndim == 0:
                value = np.full(len(f.lanes), value)
            f.regs[at] = value if convert is None else convert(value)

        if guard is None:
            return plain

        def guarded(batch: Batch, f: Fragment) -> None:
            mask = guard(f)
            if not mask.any():
                return
            old = f.regs[at]
            plain(batch, f)
            if not mask.all():
                new = f.regs[at]
                f.regs[at] = np.where(mask, new, np.zeros_like(new) if old is None else old)  # type: ignore[arg-type]

        return guarded

    def simple(self, ins: Instruction, kind: str, function: Callable[..., Array], result: str | None = None) -> Do:
        """Destination = function(sources...), all of one kind."""
        gets = [self.read(operand, kind) for operand in ins.operands[1:]]
        if len(gets) == 1:
            (a,) = gets
            return self.write(ins.operands[0], result or kind, lambda f: function(a(f)), ins)
        if len(gets) == 2:
            a, b = gets
            return self.write(ins.operands[0], result or kind, lambda f: function(a(f), b(f)), ins)
        a, b, c = gets
        return self.write(ins.operands[0], result or kind, lambda f: function(a(f), b(f), c(f)), ins)

    # -- moves

    def op_mov(self, ins: Instruction, mods: list[str]) -> Do:
        (kind,) = mods
        target, source = ins.operands
        if isinstance(target, Vec):
            return self.unpack(ins, kind, target, source)
        if isinstance(source, Vec):
            return self.pack(ins, kind, target, source)
        if isinstance(source, Special):
            return self.special(ins, kind, target, source.name)
        return self.write(target, kind, self.read(source, kind), ins)

    def special(self, ins: Instruction, kind: str, target: Operand, name: str) -> Do:
        if not isinstance(target, Reg) or ins.guard is not None or TYPE_BYTES[kind] != 4:
            raise NotImplementedError("a special register in this form")
        at = self.program.index[target.name]

        def run(batch: Batch, f: Fragment) -> None:
            f.regs[at] = batch.special(name, f)

        return run

    def unpack(self, ins: Instruction, kind: str, target: Vec, source: Operand) -> Do:
        part = _NUMPY[f"u{8 * TYPE_BYTES[kind] // len(target.items)}"]
        name = f"b{8 * TYPE_BYTES[kind] // len(target.items)}"
        get = self.read(source, f"b{8 * TYPE_BYTES[kind]}")
        count = len(target.items)

        def piece(k: int) -> Get:
            return lambda f: np.ascontiguousarray(per_lane(get(f), f)).view(part)[k::count]

        return _sequence([self.write(item, name, piece(k), ins) for k, item in enumerate(target.items)])

    def pack(self, ins: Instruction, kind: str, target: Operand, source: Vec) -> Do:
        count, whole = len(source.items), f"b{8 * TYPE_BYTES[kind]}"
        name = f"b{8 * TYPE_BYTES[kind] // count}"
        gets = [self.read(item, name) for item in source.items]

        def join(f: Fragment) -> Array:
            out = np.empty((len(f.lanes), count), _NUMPY[name])
            for k, get in enumerate(gets):
                out[:, k] = get(f)
            return out.reshape(-1).view(_NUMPY[whole])

        return self.write(target, whole, join, ins)

    def op_cvta(self, ins: Instruction, mods: list[str]) -> Do:
        if "global" not in mods:
            raise NotImplementedError("only addresses of global memory are converted")
        return self.write(ins.operands[0], mods[-1], self.read(ins.operands[1], mods[-1]), ins)

    def op_selp(self, ins: Instruction, mods: list[str]) -> Do:
        (kind,) = mods
        target, first, second, chosen = ins.operands
        a, b, p = self.read(first, kind), self.read(second, kind), self.read(chosen, "pred")
        return self.write(target, kind, lambda f: np.where(p(f), a(f), b(f)), ins)

    def op_prmt(self, ins: Instruction, mods: list[str]) -> Do:
        if mods != ["b32"]:
            raise NotImplementedError("only the default mode")
        return self.simple(ins, "b32", _prmt)

    def op_shfl(self, ins: Instruction, mods: list[str]) -> Do:
        """Butterflies over whole warps; a warp that is not together here is an error."""
        target, source, distance, clamp, mask = ins.operands
        whole = (
            isinstance(clamp, Imm)
            and clamp.value == 31
            and isinstance(mask, Imm)
            and mask.value & 0xFFFFFFFF == 0xFFFFFFFF
        )
        if mods != ["sync", "bfly", "b32"] or not whole or not isinstance(distance, Imm) or not 0 < distance.value < 32:
            raise NotImplementedError("only a butterfly over a whole warp")
        get, step = self.read(source, "b32"), distance.value

        def exchange(f: Fragment) -> Array:
            order = np.argsort(f.lanes, kind="stable")
            lanes = f.lanes[order]
            at = np.minimum(np.searchsorted(lanes, f.lanes ^ step), len(lanes) - 1)
            if (lanes[at] != f.lanes ^ step).any() or (f.lanes % 32 != f.thread % 32).any():
                raise AccessError("shfl.sync where not all threads of a warp are")
            return np.asarray(get(f)[order][at])

        return self.write(target, "b32", exchange, ins)

    # -- arithmetic

    def op_add(self, ins: Instruction, mods: list[str]) -> Do:
        return self.arithmetic(ins, mods, np.add)

    def op_sub(self, ins: Instruction, mods: list[str]) -> Do:
        return self.arithmetic(ins, mods, np.subtract)

    def arithmetic(self, ins: Instruction, mods: list[str], function: Callable[..., Array]) -> Do:
        kind = _only(mods, {"rn"})
        if kind == "f16x2":
            return self.simple(ins, "b32", lambda a, b: _pairs(function, a, b))
        return self.simple(ins, kind, function)

    def op_mul(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        if kind[0] == "f":
            return self.arithmetic(ins, mods, np.multiply)
        if "wide" in mods:
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            big = _NUMPY[wide]
            return self.simple(ins, kind, lambda a, b: np.multiply(a, b, dtype=big), wide)
        if "hi" in mods:
            big, bits = _NUMPY[f"{kind[0]}64"], int(kind[1:])
            if kind == "u64":
                return self.simple(ins, kind, _high_product)
            if bits > 32:
                raise NotImplementedError("signed 64-bit high products")
            return self.simple(ins, kind, lambda a, b: (np.multiply(a, b, dtype=big) >> big(bits)).astype(_NUMPY[kind]))
        return self.simple(ins, kind, np.multiply)

    def op_mad(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        if kind[0] == "f" or "hi" in mods:
            raise NotImplementedError("this form of mad")
        if "wide" not in mods:
            return self.simple(ins, kind, lambda a, b, c: a * b + c)
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        big = _NUMPY[wide]
        a, b, c = self.read(ins.operands[1], kind), self.read(ins.operands[2], kind), self.read(ins.operands[3], wide)
        return self.write(ins.operands[0], wide, lambda f: np.multiply(a(f), b(f), dtype=big) + c(f), ins)

    def op_fma(self, ins: Instruction, mods: list[str]) -> Do:
        kind = _only(mods, {"rn"})
        if kind == "f16x2":
            return self.simple(ins, "b32", lambda a, b, c: _pairs(_fma16, a, b, c))
        if kind == "f16":
            return self.simple(ins, "f16", _fma16)
        if kind == "f64":
            return self.simple(ins, "f64", lambda a, b, c: a * b + c)
        if kind != "f32":
            raise NotImplementedError(kind)
        return self.add_product(ins) or self.simple(ins, "f32", _fma32)

    def add_product(self, ins: Instruction) -> Do | None:
        """The one instruction that baked code is made of, register = register * literal + register, decoded fast."""
        target, source, literal, again = ins.operands
        if ins.guard or not (isinstance(target, Reg) and isinstance(source, Reg) and isinstance(again, Reg)):
            return None
        kinds, index = self.program.kinds, self.program.index
        if not isinstance(literal, Imm) or literal.bits != 32:
            return None
        if not kinds[target.name] == kinds[source.name] == kinds[again.name] == "f32":
            return None
        d, a, c = index[target.name], index[source.name], index[again.name]
        weight = struct.unpack("<f", literal.value.to_bytes(4, "little"))[0]
        multiply, double, single = np.multiply, np.float64, np.float32

        def run(batch: Batch, f: Fragment) -> None:
            regs = f.regs
            total = multiply(regs[a], weight, dtype=double)  # type: ignore[arg-type]
            total += regs[c]
            regs[d] = total.astype(single)

        return run

    def op_div(self, ins: Instruction, mods: list[str]) -> Do:
        kind = _only(mods, {"rn"})
        if kind[0] == "f":
            return self.simple(ins, kind, np.divide)
        return self.simple(ins, kind, _int_div)

    def op_rem(self, ins: Instruction, mods: list[str]) -> Do:
        return self.simple(ins, mods[-1], lambda a, b: a - _int_div(a, b) * b)

    def op_min(self, ins: Instruction, mods: list[str]) -> Do:
        return self.extreme(ins, mods, np.fmin, np.minimum)

    def op_max(self, ins: Instruction, mods: list[str]) -> Do:
        return self.extreme(ins, mods, np.fmax, np.maximum)

    def extreme(
        self, ins: Instruction, mods: list[str], number: Callable[..., Array], keep: Callable[..., Array]
    ) -> Do:
        kind = _only(mods, {"NaN"})
        function = keep if "NaN" in mods or kind[0] != "f" else number
        if kind == "f16x2":
            return self.simple(ins, "b32", lambda a, b: _pairs(function, a, b))
        return self.simple(ins, kind, function)

    def op_neg(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        if kind == "f16x2":
            return self.simple(ins, "b32", lambda a: a ^ np.uint32(0x80008000))
        return self.simple(ins, kind, np.negative)

    def op_abs(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        if kind == "f16x2":
            return self.simple(ins, "b32", lambda a: a & np.uint32(0x7FFF7FFF))
        return self.simple(ins, kind, np.abs)

    # -- bits

    def op_and(self, ins: Instruction, mods: list[str]) -> Do:
        return self.simple(ins, mods[-1], np.bitwise_and)

    def op_or(self, ins: Instruction, mods: list[str]) -> Do:
        return self.simple(ins, mods[-1], np.bitwise_or)

    def op_xor(self, ins: Instruction, mods: list[str]) -> Do:
        return self.simple(ins, mods[-1], np.bitwise_xor)

    def op_not(self, ins: Instruction, mods: list[str]) -> Do:
        return self.simple(ins, mods[-1], np.bitwise_not)

    def op_shl(self, ins: Instruction, mods: list[str]) -> Do:
        return self.shift(ins, mods[-1], np.left_shift)

    def op_shr(self, ins: Instruction, mods: list[str]) -> Do:
        return self.shift(ins, mods[-1], np.right_shift)

    def shift(self, ins: Instruction, kind: str, function: Callable[..., Array]) -> Do:
        a, by = self.read(ins.operands[1], kind), self.read(ins.operands[2], "u32")
        bits, of = 8 * TYPE_BYTES[kind], _NUMPY[kind]

        def run(f: Fragment) -> Array:
            amount = by(f)
            shifted = function(a(f), np.minimum(amount, bits - 1).astype(of))
            if kind[0] == "s" and function is np.right_shift:
                return shifted  # an arithmetic shift by too much is one by all bits but the sign
            return np.where(amount < bits, shifted, of(0))

        return self.write(ins.operands[0], kind, run, ins)

    def op_shf(self, ins: Instruction, mods: list[str]) -> Do:
        if mods[1] != "wrap":
            raise NotImplementedError("only wrapping funnel shifts")
        left = mods[0] == "l"

        def run(low: Array, high: Array, by: Array) -> Array:
            both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
            amount = (by & np.uint32(31)).astype(np.uint64)
            shifted = both >> (np.uint64(32) - amount) if left else both >> amount
            return np.asarray(shifted.astype(np.uint32))

        return self.simple(ins, "b32", run)

    def op_lop3(self, ins: Instruction, mods: list[str]) -> Do:
        table = ins.operands[4]
        if not isinstance(table, Imm):
            raise NotImplementedError("a table that is no literal")
        a, b, c = (self.read(operand, "b32") for operand in ins.operands[1:4])

        def run(f: Fragment) -> Array:
            x, y, z = (per_lane(get(f), f) for get in (a, b, c))
            out = np.zeros(len(f.lanes), np.uint32)
            for k in range(8):
                if table.value >> k & 1:
                    out |= (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
            return out

        return self.write(ins.operands[0], "b32", run, ins)

    def op_bfe(self, ins: Instruction, mods: list[str]) -> Do:
        if mods != ["u32"]:
            raise NotImplementedError("only unsigned bit fields")

        def run(a: Array, at: Array, count: Array) -> Array:
            wide = a.astype(np.uint64) >> (at & np.uint32(255)).astype(np.uint64)
            mask = (np.uint64(1) << np.minimum(count & np.uint32(255), 32).astype(np.uint64)) - np.uint64(1)
            return np.asarray((wide & mask).astype(np.uint32))

        return self.simple(ins, "u32", run)

    def op_bfi(self, ins: Instruction, mods: list[str]) -> Do:
        def run(a: Array, b: Array, at: Array, count: Array) -> Array:
            mask = (np.uint64(1) << np.minimum(count & np.uint32(255), 32).astype(np.uint64)) - np.uint64(1)
            place = np.minimum(at & np.uint32(255), 63).astype(np.uint64)
            kept = b.astype(np.uint64) & ~(mask << place)
            return np.asarray((kept | (a.astype(np.uint64) & mask) << place).astype(np.uint32))

        gets = [self.read(operand, "b32") for operand in ins.operands[1:]]
        return self.write(ins.operands[0], "b32", lambda f: run(*[get(f) for get in gets]), ins)

    # -- predicates

    def op_setp(self, ins: Instruction, mods: list[str]) -> Do:
        compare, kind = mods[0], mods[-1]
        combine = mods[1] if len(mods) == 3 else None
        function = _COMPARE[compare]
        a, b = self.read(ins.operands[1], kind), self.read(ins.operands[2], kind)
        extra = self.read(ins.operands[3], "pred") if combine else None

        def run(f: Fragment, flip: bool = False) -> Array:
            value = np.asarray(function(a(f), b(f)) ^ flip)
            if extra is not None:
                value = _COMBINE[combine](value, extra(f))  # type: ignore[index]
            return value

        target = ins.operands[0]
        if isinstance(target, Vec):
            first = self.write(target.items[0], "pred", run, ins)
            return _sequence([first, self.write(target.items[1], "pred", lambda f: run(f, True), ins)])
        return self.write(target, "pred", run, ins)

    # -- conversions

    def op_cvt(self, ins: Instruction, mods: list[str]) -> Do:
        target, source = mods[-2], mods[-1]
        rounding = [mod for mod in mods[:-2] if mod not in ("sat",)]
        if any(mod not in ("rn", "rz", "rni", "rzi", "rmi", "rpi") for mod in rounding) or "sat" in mods:
            raise NotImplementedError("this rounding")
        if target == "f16x2":
            high, low = (self.read(operand, source) for operand in ins.operands[1:3])
            return self.write(
                ins.operands[0], "b32", lambda f: _pack_halves(per_lane(low(f), f), per_lane(high(f), f)), ins
            )
        get, to = self.read(ins.operands[1], source), _NUMPY[target]
        if source[0] == "f" and target[0] != "f":
            step = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding[0]]
            info = np.iinfo(to)
            return self.write(
                ins.operands[0], target,
                lambda f: np.clip(np.nan_to_num(step(get(f).astype(np.float64))), info.min, info.max).astype(to), ins,
            )  # fmt: skip
        if "rz" in rounding:
            raise NotImplementedError("rounding towards zero")
        return self.write(ins.operands[0], target, lambda f: np.asarray(get(f)).astype(to), ins)

    # -- memory

    def address(self, operand: Operand) -> Get:
        """A byte address as uint64."""
        if not isinstance(operand, Mem):
            raise NotImplementedError("an address of this form")
        offset = np.uint64(operand.offset % 2**64)
        if isinstance(operand.base, Reg):
            at = self.program.index[operand.base.name]
            if TYPE_BYTES[self.program.kinds[operand.base.name]] == 4:
                low = np.uint32(operand.offset % 2**32)
                return lambda f: (f.regs[at] + low).astype(np.uint64)
            return lambda f: f.regs[at] + offset
        base = operand.base.value if isinstance(operand.base, Imm) else self.program.shared_offset[operand.base.name]
        return lambda f: np.full(len(f.lanes), base + operand.offset, np.uint64)

    def op_ld(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        count = next((int(mod[1]) for mod in mods if mod in ("v2", "v4")), 1)
        if any(mod in ("relaxed", "acquire", "volatile") for mod in mods) and "param" in mods:
            raise NotImplementedError("an ordered load of a parameter")
        targets = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
        if len(targets) != count:
            raise NotImplementedError("a vector of another length than the type says")
        if "param" in mods:
            return self.load_param(ins, kind, targets)
        get, guard, size = self.address(ins.operands[1]), self.guard(ins), TYPE_BYTES[kind]
        if not any(mod.startswith(("global", "shared")) for mod in _spaces(mods)):
            raise NotImplementedError("a generic address")
        of_global, remote = "global" in mods, "cluster" in ins.opcode
        stores = [self.loaded(target, kind) for target in targets]

        def run(batch: Batch, f: Fragment) -> None:
            mask = None if guard is None else guard(f)
            if mask is not None and not mask.any():
                return
            which = None if mask is None or mask.all() else np.nonzero(mask)[0]
            address = get(f) if which is None else get(f)[which]
            if of_global:
                values = batch.memory.load(address, size, count)
            else:
                at, past, own = _shared_place(batch, f, which, address, size * count, remote)
                values = batch.shared.load(at, size, count, past, own)
            for store, value in zip(stores, values, strict=True):
                store(f, which, value)

        return run

    def loaded(self, target: Operand, kind: str) -> Callable[[Fragment, Array | None, Array], None]:
        """Put a loaded element in a register, widened to it."""
        if not isinstance(target, Reg):
            raise NotImplementedError("a destination that is no register")
        at, held = self.program.index[target.name], self.program.kinds[target.name]
        raw, stored = _NUMPY[kind], _STORED[held]
        wider = TYPE_BYTES[held] > TYPE_BYTES[kind]
        if wider and held[0] == "f":
            raise NotImplementedError("widening into a float register")
        whole = _NUMPY[f"{'s' if kind[0] == 's' else 'u'}{8 * TYPE_BYTES[held]}"] if held != "pred" else np.bool_

        def put(f: Fragment, which: Array | None, value: Array) -> None:
            typed = value.view(raw).astype(whole).view(stored) if wider else value.view(stored)
            if which is None:
                f.regs[at] = typed
                return
            old = f.regs[at]
            new = np.zeros(len(f.lanes), stored) if old is None else old.copy()
            new[which] = typed
            f.regs[at] = new

        return put

    def load_param(self, ins: Instruction, kind: str, targets: Sequence[Operand]) -> Do:
        source = ins.operands[1]
        if not isinstance(source, Mem) or not isinstance(source.base, Sym) or ins.guard is not None:
            raise NotImplementedError("a parameter in this form")
        start, size = self.program.param_offset[source.base.name] + source.offset, TYPE_BYTES[kind]
        stores, raw = [self.loaded(target, kind) for target in targets], _NUMPY[f"u{8 * size}"]

        def run(batch: Batch, f: Fragment) -> None:
            for k, store in enumerate(stores):
                value = batch.params[start + k * size : start + (k + 1) * size].view(raw)
                store(f, None, np.full(len(f.lanes), value[0], raw))

        return run

    def op_mbarrier(self, ins: Instruction, mods: list[str]) -> Do:
        """Init with a count of arrivals; an arrival that announces bytes."""
        guard = self.guard(ins)
        if mods == ["init", "shared::cta", "b64"]:
            where, number, start = self.address(ins.operands[0]), self.read(ins.operands[1], "u32"), True
        elif mods == ["arrive", "expect_tx", "shared::cta", "b64"] and symbol(ins.operands[0]) == "_":
            where, number, start = self.address(ins.operands[1]), self.read(ins.operands[2], "u32"), False
        else:
            raise NotImplementedError("this form of mbarrier")

        def run(batch: Batch, f: Fragment) -> None:
            which = np.arange(len(f.lanes)) if guard is None else np.nonzero(guard(f))[0]
            address, given = per_lane(where(f), f)[which], per_lane(number(f), f)[which]
            batch.shared.place(f.block[which], address, 8)
            for block, at, value in zip(f.block[which], address, given, strict=True):
                if start:
                    batch.barriers[int(block), int(at)] = Barrier(int(value))
                    continue
                barrier = batch.barrier(int(block), int(at))
                barrier.arrivals -= 1
                barrier.bytes += int(value)

        return run

    def store_async(self, ins: Instruction, mods: list[str], count: int, sources: Sequence[Operand]) -> Do:
        """st.async: unreadable until its mbarrier, in the same block as the data, was waited at."""
        if mods[-1] not in ("b32", "u32", "f32", "s32") or "shared::cluster" not in mods or len(ins.operands) != 3:
            raise NotImplementedError("this form of st.async")
        gets = [self.narrow(source, 4) for source in sources]
        get, where, guard = self.address(ins.operands[0]), self.address(ins.operands[2]), self.guard(ins)

        def run(batch: Batch, f: Fragment) -> None:
            which = np.arange(len(f.lanes)) if guard is None else np.nonzero(guard(f))[0]
            if not len(which):
                return
            values = [per_lane(value(f), f)[which] for value in gets]
            at, past, own = _shared_place(batch, f, which, get(f)[which], 4 * count, True)
            granules = batch.shared.start_copy(at, 4 * count, values, past, own)
            to = per_lane(where(f), f)[which]
            blocks, addresses = _shared_block(batch, f.block[which], to)
            if not np.array_equal(blocks, _shared_block(batch, f.block[which], get(f)[which])[0]):
                raise AccessError("stores to another block than its mbarrier's")
            for one in np.unique(np.stack([blocks, addresses.astype(np.int64)], 1), axis=0):
                mine = (blocks == one[0]) & (addresses.astype(np.int64) == one[1])
                barrier = batch.barrier(int(one[0]), int(one[1]))
                barrier.bytes -= 4 * count * int(mine.sum())
                barrier.granules += [granule[mine] for granule in granules]

        return run

    def op_st(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        count = next((int(mod[1]) for mod in mods if mod in ("v2", "v4")), 1)
        sources = ins.operands[1].items if isinstance(ins.operands[1], Vec) else (ins.operands[1],)
        if len(sources) != count:
            raise NotImplementedError("a vector of another length than the type says")
        if mods[0] == "async":
            return self.store_async(ins, mods, count, sources)
        if not any(mod.startswith(("global", "shared")) for mod in _spaces(mods)):
            raise NotImplementedError("a generic address")
        size = TYPE_BYTES[kind]
        gets = [self.narrow(source, size) for source in sources]
        get, guard = self.address(ins.operands[0]), self.guard(ins)
        of_global, remote = "global" in mods, "cluster" in ins.opcode

        def run(batch: Batch, f: Fragment) -> None:
            mask = None if guard is None else guard(f)
            if mask is not None and not mask.any():
                return
            which = None if mask is None or mask.all() else np.nonzero(mask)[0]
            address = get(f) if which is None else get(f)[which]
            values = [per_lane(value(f), f) for value in gets]
            if which is not None:
                values = [value[which] for value in values]
            if of_global:
                batch.memory.store(address, size, values)
            else:
                at, past, own = _shared_place(batch, f, which, address, size * count, remote)
                batch.shared.store(at, size, values, past, own)

        return run

    def narrow(self, source: Operand, size: int) -> Get:
        """A register's low bytes, or a literal, as unsigned bits."""
        kind = f"u{8 * size}"
        if isinstance(source, Reg) and TYPE_BYTES[self.program.kinds[source.name]] > size:
            wide, of = self.read(source, f"u{8 * TYPE_BYTES[self.program.kinds[source.name]]}"), _NUMPY[kind]
            return lambda f: wide(f).astype(of)
        return self.read(source, kind)

    def op_cp(self, ins: Instruction, mods: list[str]) -> Do:
        if mods[:2] == ["async", "commit_group"]:
            return lambda batch, f: f.copies.append([])
        if mods[:2] == ["async", "wait_group"]:
            (keep,) = ins.operands
            if not isinstance(keep, Imm):
                raise NotImplementedError("a count that is no literal")
            return _wait_group(keep.value)
        if mods[:2] == ["async", "wait_all"]:
            return _wait_group(None)
        if mods[0] != "async" or "bulk" in mods or ins.operands[2:3] == () or not isinstance(ins.operands[2], Imm):
            raise NotImplementedError("this form of cp")
        to, source, size = self.address(ins.operands[0]), self.address(ins.operands[1]), ins.operands[2].value
        if size not in (4, 8, 16) or ("cg" in mods and size != 16):
            raise NotImplementedError(f"copies of {size} bytes")
        filled = ins.operands[3] if len(ins.operands) > 3 else None
        if isinstance(filled, Reg) and self.program.kinds[filled.name] == "pred":
            raise NotImplementedError("the ignore-src predicate")
        return _copy(size, to, source, None if filled is None else self.read(filled, "u32"), self.guard(ins))

    def op_mapa(self, ins: Instruction, mods: list[str]) -> Do:
        kind = mods[-1]
        if "shared::cluster" not in ins.opcode:
            raise NotImplementedError("only shared::cluster addresses")
        a, rank, of = self.read(ins.operands[1], kind), self.read(ins.operands[2], "u32"), _NUMPY[kind]
        return self.write(
            ins.operands[0], kind,
            lambda f: a(f) + ((np.asarray(rank(f)).astype(of) + of(1)) << of(_CLUSTER_RANK_SHIFT)), ins,
        )  # fmt: skip

    def op_atom(self, ins: Instruction, mods: list[str]) -> Do:
        return self.atomic(ins, mods, ins.operands[0], ins.operands[1], ins.operands[2])

    def op_red(self, ins: Instruction, mods: list[str]) -> Do:
        return self.atomic(ins, mods, None, ins.operands[0], ins.operands[1])

    def atomic(self, ins: Instruction, mods: list[str], target: Operand | None, where: Operand, value: Operand) -> Do:
        kind, name = mods[-1], mods[-2]
        if "global" not in mods or name not in _ATOMIC or kind not in ("u32", "s32", "b32", "f32", "u64"):
            raise NotImplementedError("this atomic")
        get, source, guard, of = self.address(where), self.read(value, kind), self.guard(ins), _NUMPY[kind]
        store = None if target is None else self.loaded(target, kind)
        function = _ATOMIC[name]

        def run(batch: Batch, f: Fragment) -> None:
            which = np.arange(len(f.lanes)) if guard is None else np.nonzero(guard(f))[0]
            address, operand = get(f), per_lane(source(f), f)
            old = np.zeros(len(which), _NUMPY[f"u{8 * TYPE_BYTES[kind]}"])
            for k, lane in enumerate(which):
                cell = batch.memory.update(int(address[lane]), TYPE_BYTES[kind])
                old[k] = cell[0]
                cell.view(of)[0] = function(cell.view(of)[0], operand[lane])
            if store is not None and len(which):
                store(f, which, old)

        return run

    # -- what changes no value here

    def op_barrier(self, ins: Instruction, mods: list[str]) -> Do:
        guard = self.guard(ins)

        def run(batch: Batch, f: Fragment) -> None:
            batch.arrived[f.lanes if guard is None else f.lanes[guard(f)]] += 1

        return run

    def op_bar(self, ins: Instruction, mods: list[str]) -> Do:
        return _nothing

    op_membar = op_fence = op_griddepcontrol = op_prefetch = op_prefetchu = op_discard = op_createpolicy = op_bar


def _nothing(batch: Batch, f: Fragment) -> None:
    """Ordering and hints: blocks move together here."""


def _sequence(steps: list[Do]) -> Do:
    def run(batch: Batch, f: Fragment) -> None:
        for step in steps:
            step(batch, f)

    return run


def _spaces(mods: list[str]) -> list[str]:
    return [mod for mod in mods if mod.split("::")[0] in ("global", "shared")]


def symbol(operand: Operand) -> str:
    if not isinstance(operand, Sym):
        raise NotImplementedError("a label is needed here")
    return operand.name


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Imm) and operand.value == 0


def _only(mods: list[str], known: set[str]) -> str:
    """The type, provided that no modifier changes the result in a way that is not interpreted."""
    unknown = [mod for mod in mods[:-1] if mod not in known]
    if unknown:
        raise NotImplementedError(f"modifier .{unknown[0]}")
    return mods[-1]


def _literal(operand: Imm, kind: str) -> Any:
    of, size = _NUMPY[kind], TYPE_BYTES[kind]
    if kind == "pred":
        return np.bool_(operand.value != 0)
    if operand.is_float:
        bits = np.array([operand.value], _NUMPY[f"u{operand.bits}"]).view(
            np.float32 if operand.bits == 32 else np.float64
        )
        if kind in ("f32", "f64"):
            return of(bits[0])
        if size * 8 != operand.bits:
            raise NotImplementedError("a float literal of another width")
        return bits.view(of)[0]
    if kind in ("f16", "f32", "f64"):
        raise NotImplementedError("an integer literal where a float is read")
    return np.array([operand.value % (1 << (8 * size))], _NUMPY[f"u{8 * size}"]).view(of)[0]


def _reader(at: int, held: str, kind: str) -> Get:
    """Read register `at`, declared `held`, as `kind`: the same bits, or the low ones of a wider register."""
    stored, want = _STORED[held], _NUMPY[kind]
    if (held == "pred") != (kind == "pred"):
        raise NotImplementedError("a predicate mixed with numbers")
    if stored is want:
        return lambda f: f.regs[at]  # type: ignore[return-value]
    if TYPE_BYTES[held] == TYPE_BYTES[kind]:
        return lambda f: f.regs[at].view(want)  # type: ignore[union-attr]
    if TYPE_BYTES[held] > TYPE_BYTES[kind]:
        low, bits = _NUMPY[f"u{8 * TYPE_BYTES[kind]}"], _NUMPY[f"u{8 * TYPE_BYTES[held]}"]
        return lambda f: f.regs[at].view(bits).astype(low).view(want)  # type: ignore[union-attr]
    raise NotImplementedError("a register narrower than the instruction's type")


def _converter(kind: str, held: str) -> Callable[[Array], Array] | None:
    """From a computed value of `kind` to what a register declared `held` keeps."""
    stored = _STORED[held]
    if (held == "pred") != (kind == "pred"):
        raise NotImplementedError("a predicate mixed with numbers")
    if _NUMPY[kind] is stored:
        return None
    if TYPE_BYTES[held] == TYPE_BYTES[kind]:
        return lambda value: value.view(stored)
    if TYPE_BYTES[held] > TYPE_BYTES[kind] and held[0] != "f" and kind[0] != "f":  # cvt to a narrow type: extended
        wide = _NUMPY[f"{'s' if kind[0] == 's' else 'u'}{8 * TYPE_BYTES[held]}"]
        return lambda value: value.astype(wide).view(stored)
    raise NotImplementedError("a register narrower than the result")


def per_lane(value: Array, f: Fragment) -> Array:
    """A literal as one value per lane."""
    return np.full(len(f.lanes), value) if value.ndim == 0 else value


def _shared_place(
    batch: Batch, f: Fragment, which: Array | None, address: Array, size: int, remote: bool
) -> tuple[Array, Array, Array]:
    """Byte position, valid-before tag and own tag of each access to shared memory."""
    block, past, own = f.block, f.past, f.own
    if which is not None:
        block, past, own = block[which], past[which], own[which]
    if remote and (address >> np.uint64(_CLUSTER_RANK_SHIFT)).any():
        there, address = _shared_block(batch, block, address)
        far = there != block
        lanes = own & np.uint64((1 << 24) - 1)
        past = np.where(far, batch.shared.cluster_stamp(there), past)
        own = np.where(far, batch.shared.remote_tag(there) | lanes, own)
        block = there
    return batch.shared.place(block, address, size), past, own


def _shared_block(batch: Batch, block: Array, address: Array) -> tuple[Array, Array]:
    """Block of the batch and address in its own shared memory, of addresses in the cluster's."""
    rank = address >> np.uint64(_CLUSTER_RANK_SHIFT)
    if int(rank.max()) > batch.cluster:
        raise AccessError(f"names block {int(rank.max()) - 1} of a cluster of {batch.cluster}")
    there = np.where(rank > 0, block // batch.cluster * batch.cluster + rank.astype(np.int64) - 1, block)
    return there, address & np.uint64((1 << _CLUSTER_RANK_SHIFT) - 1)


def _wait_group(keep: int | None) -> Do:
    def run(batch: Batch, f: Fragment) -> None:
        closed = f.copies[:-1]
        # wait_all covers the open group too; wait_group leaves it and the newest `keep` closed ones.
        done = f.copies if keep is None else closed[: max(0, len(closed) - keep)]
        if any(done):
            own_of = np.zeros(int(f.lanes.max()) + 1, np.uint64)
            own_of[f.lanes] = f.own
            for owners, granules in (copy for group in done for copy in group):
                batch.shared.finish_copy(granules, own_of[owners])
        f.copies = [[]] if keep is None else [*closed[len(done) :], f.copies[-1]]

    return run


def _copy(size: int, to: Get, source: Get, filled: Get | None, guard: Get | None) -> Do:
    """cp.async: the data is taken at once and is unreadable until waited for."""

    def run(batch: Batch, f: Fragment) -> None:
        mask = None if guard is None else guard(f)
        which = np.arange(len(f.lanes)) if mask is None else np.nonzero(mask)[0]
        if len(which) == 0:
            return
        address, place = source(f)[which], to(f)[which]
        given = np.full(len(which), size, np.uint32) if filled is None else per_lane(filled(f), f)[which]
        if int(given.max()) > size:
            raise AccessError(f"copies {int(given.max())} of {size} bytes")
        words = [np.zeros(len(which), np.uint32) for _ in range(size // 4)]
        for amount in np.unique(given[given > 0]):
            lanes = np.nonzero(given == amount)[0]
            if amount % 4 or (address[lanes] & np.uint64(size - 1)).any():
                raise AccessError("copies from a misaligned address or a part of a word")
            for word, value in zip(words, batch.memory.load(address[lanes], 4, int(amount) // 4), strict=False):
                word[lanes] = value
        at, past, own = _shared_place(batch, f, which, place, size, False)
        granules = batch.shared.start_copy(at, size, words, past, own)
        f.copies[-1].append((f.lanes[which], granules))

    return run


def _fma32(a: Array, b: Array, c: Array) -> Array:
    total = np.multiply(a, b, dtype=np.float64)
    total = total + c
    return np.asarray(total.astype(np.float32))


def _fma16(a: Array, b: Array, c: Array) -> Array:
    total = np.multiply(a, b, dtype=np.float64) + c
    return np.asarray(total.astype(np.float16))


def _pairs(function: Callable[..., Array], *values: Array) -> Array:
    """Apply to both halves of 32-bit registers."""
    shape = next((value.shape for value in values if value.ndim), (1,))
    halves = [np.ascontiguousarray(np.broadcast_to(value, shape)).view(np.float16) for value in values]
    return np.ascontiguousarray(function(*halves)).view(np.uint32)


def _pack_halves(low: Array, high: Array) -> Array:
    out = np.empty((len(low), 2), np.float16)
    out[:, 0], out[:, 1] = low, high
    return out.reshape(-1).view(np.uint32)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7) != 0, np.uint64(255), np.uint64(0))
        chosen = np.where(nibble & np.uint32(8) != 0, sign, byte).astype(np.uint32)
        out |= chosen << np.uint32(8 * k)
    return out


def _high_product(a: Array, b: Array) -> Array:
    """Upper half of the 128-bit products of uint64."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + ((a0 * b0) >> half)
    return np.asarray(a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half))


def _int_div(a: Array, b: Array) -> Array:
    """Quotient truncated towards zero, as the device's."""
    if a.dtype.kind == "u":
        return np.asarray(a // b)
    quotient = np.abs(a) // np.abs(b)
    return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype))


def _unordered(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": lambda a, b: (a < b) | (a > b) if np.asarray(a).dtype.kind == "f" else np.not_equal(a, b),
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": _unordered(np.equal), "neu": np.not_equal, "ltu": _unordered(np.less), "leu": _unordered(np.less_equal),
    "gtu": _unordered(np.greater), "geu": _unordered(np.greater_equal),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}
_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, new: old + new, "min": min, "max": max, "exch": lambda old, new: new,
    "inc": lambda old, new: 0 if old >= new else old + 1,
}  # fmt: skip
