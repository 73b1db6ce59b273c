"""Launch plans: how a plugin that knows no kernel runs one. The contract between kernels, host runner and C++ plugin.

A plan is a tuple of variants, tried in order; the first whose dtype, format and range of N fit is run: its ops in
order on one stream. Sizes are integer expressions over N, H, W, OH, OW, so that one plan serves every batch. The wire
form is one vector of INT32 (`encode`), which is all that the TensorRT plugin reads (plugins/trt).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, Union

from sparsedeploy.layer import Precision

VARIABLES = ("N", "H", "W", "OH", "OW")
_VAR_CODES = tuple((code,) for code in range(len(VARIABLES)))
_CONST, _VAR, _ADD, _SUB, _MUL, _DIV, _CEIL_DIV, _MIN, _MAX = range(9)
_BINARY: dict[int, Callable[[int, int], int]] = {
    _ADD: lambda a, b: a + b,
    _SUB: lambda a, b: a - b,
    _MUL: lambda a, b: a * b,
    _DIV: lambda a, b: a // b,
    _CEIL_DIV: lambda a, b: -(-a // b),
    _MIN: min,
    _MAX: max,
}

ExprLike = Union["Expr", int]


@dataclass(frozen=True)
class Expr:
    """An integer expression in postfix code; built with Python's operators from `const` and `var`.

    Whoever evaluates one uses 64-bit integers, rounds quotients down (not towards zero) and refuses a zero divisor.
    """

    code: tuple[int, ...]

    def __add__(self, other: ExprLike) -> Expr:
        return _join(self, other, _ADD)

    def __sub__(self, other: ExprLike) -> Expr:
        return _join(self, other, _SUB)

    def __mul__(self, other: ExprLike) -> Expr:
        return _join(self, other, _MUL)

    def __floordiv__(self, other: ExprLike) -> Expr:
        return _join(self, other, _DIV)

    def ceil_div(self, other: ExprLike) -> Expr:
        """Quotient rounded up."""
        return _join(self, other, _CEIL_DIV)

    def at_least(self, other: ExprLike) -> Expr:
        """The larger of both."""
        return _join(self, other, _MAX)

    def at_most(self, other: ExprLike) -> Expr:
        """The smaller of both."""
        return _join(self, other, _MIN)

    def value(self, sizes: Mapping[str, int]) -> int:
        """Evaluate over `sizes`, which names every variable that the expression uses; ValueError for a zero divisor."""
        stack: list[int] = []
        code = iter(self.code)
        for op in code:
            if op == _CONST:
                stack.append(next(code))
            elif op == _VAR:
                stack.append(sizes[VARIABLES[next(code)]])
            else:
                right = stack.pop()
                if right == 0 and op in (_DIV, _CEIL_DIV):
                    raise ValueError(f"the launch plan divides by zero at {dict(sizes)}")
                stack.append(_BINARY[op](stack.pop(), right))
        (result,) = stack
        return result


def const(value: int) -> Expr:
    """A constant that fits INT32."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{value} does not fit INT32")
    return Expr((_CONST, value))


def var(name: str) -> Expr:
    """One of VARIABLES."""
    return Expr((_VAR, VARIABLES.index(name)))


def _join(left: Expr, right: ExprLike, op: int) -> Expr:
    return Expr(left.code + as_expr(right).code + (op,))


def as_expr(value: ExprLike) -> Expr:
    """An integer as a constant expression; expressions pass through."""
    return value if isinstance(value, Expr) else const(value)


ArgKind = Literal["input", "output", "residual", "constant", "workspace", "N", "H", "W"]
_ARG_KINDS: tuple[ArgKind, ...] = ("input", "output", "residual", "constant", "workspace", "N", "H", "W")


@dataclass(frozen=True)
class Arg:
    """One kernel parameter: a device pointer (64 bits) or a size (32 bits).

    `index` is the constant's number for "constant", the byte offset for "workspace", else 0.
    """

    kind: ArgKind
    index: int = 0


@dataclass(frozen=True)
class Launch:
    """Launch `entry` of the variant's image. Blocks and clusters are fixed, the grid follows the sizes."""

    entry: str
    grid: tuple[Expr, Expr, Expr]
    block: tuple[int, int, int]
    args: tuple[Arg, ...]
    shared_bytes: int = 0
    cluster: int = 1
    """Thread blocks per cluster along x (sm_90 and later); 1 is no cluster."""
    dependent: bool = False
    """Programmatic dependent launch: may start before the op ahead of it ends (sm_90 and later)."""


@dataclass(frozen=True)
class Memset:
    """Write `bytes` zero bytes at byte `offset` of the workspace."""

    offset: int
    bytes: Expr


Op = Launch | Memset


@dataclass(frozen=True)
class Variant:
    """What to run for activations of `dtype` (linear NCHW) and min_n <= N <= max_n (max_n 0: no limit)."""

    dtype: Precision
    ops: tuple[Op, ...]
    workspace: Expr = Expr((_CONST, 0))
    """Bytes of workspace, never assumed zeroed."""
    min_n: int = 1
    max_n: int = 0

    def fits(self, dtype: str, n: int) -> bool:
        """Whether this variant runs that dtype and batch."""
        return self.dtype == dtype and self.min_n <= n and (self.max_n == 0 or n <= self.max_n)


Plan = tuple[Variant, ...]
_DTYPES: tuple[Precision, ...] = ("fp32", "fp16")


def choose(plan: Plan, dtype: str, n: int) -> Variant | None:
    """The first variant that fits, as the plugin chooses it."""
    return next((variant for variant in plan if variant.fits(dtype, n)), None)


def encode(plan: Plan) -> tuple[int, ...]:
    """The plan as one vector of INT32: [variants, then per variant dtype, min_n, max_n, workspace, ops...].

    Raises ValueError when a number does not fit INT32.
    """
    out = [len(plan)]
    for variant in plan:
        out += [_DTYPES.index(variant.dtype), variant.min_n, variant.max_n, *_sized(variant.workspace.code)]
        out.append(len(variant.ops))
        for op in variant.ops:
            out += _encode_op(op)
    for word in out:
        const(word)
    return tuple(out)


def _sized(code: tuple[int, ...]) -> list[int]:
    return [len(code), *code]


def _encode_op(op: Op) -> list[int]:
    if isinstance(op, Memset):
        return [1, op.offset, *_sized(op.bytes.code)]
    out = [0, *_sized(tuple(op.entry.encode("ascii")))]
    for size in op.grid:
        out += _sized(size.code)
    out += [*op.block, op.shared_bytes, op.cluster, int(op.dependent), len(op.args)]
    for arg in op.args:
        out += [_ARG_KINDS.index(arg.kind), arg.index]
    return out


def decode(words: tuple[int, ...]) -> Plan:
    """Inverse of `encode`; raises ValueError when words are missing, left over or mean nothing."""
    reader = iter(words)
    try:
        plan = _repeat(reader, _decode_variant)
    except StopIteration as error:
        raise ValueError("the launch plan ends early") from error
    if next(reader, None) is not None:
        raise ValueError("the launch plan has words left over")
    return plan


_T = TypeVar("_T")


def _repeat(reader: Iterator[int], read: Callable[[Iterator[int]], _T]) -> tuple[_T, ...]:
    """A counted list. Not a generator: a StopIteration inside one would surface as RuntimeError."""
    count = next(reader)
    if count < 0:
        raise ValueError(f"the launch plan holds a list of {count} elements")
    return tuple([read(reader) for _ in range(count)])


def _pick(reader: Iterator[int], choices: tuple[_T, ...], what: str) -> _T:
    code = next(reader)
    if not 0 <= code < len(choices):
        raise ValueError(f"the launch plan holds {what} {code}, known are 0..{len(choices) - 1}")
    return choices[code]


def _decode_expr(reader: Iterator[int]) -> Expr:
    """An expression that leaves exactly one value, so that evaluating it cannot run off the stack."""
    code = _repeat(reader, next)
    depth, at = 0, 0
    while at < len(code):
        op = code[at]
        operand = op in (_CONST, _VAR)
        depth += 1 if operand else -1
        known = (
            op in _BINARY
            or (op == _VAR and code[at + 1 : at + 2] in _VAR_CODES)
            or (op == _CONST and at + 1 < len(code))
        )
        if not known or depth < 1:
            raise ValueError(f"the launch plan holds the malformed expression {code}")
        at += 2 if operand else 1
    if depth != 1:
        raise ValueError(f"the launch plan holds the malformed expression {code}")
    return Expr(code)


def _decode_variant(reader: Iterator[int]) -> Variant:
    dtype, min_n, max_n = _pick(reader, _DTYPES, "dtype"), next(reader), next(reader)
    workspace = _decode_expr(reader)
    return Variant(dtype, _repeat(reader, _decode_op), workspace, min_n, max_n)


def _decode_op(reader: Iterator[int]) -> Op:
    if _pick(reader, (Launch, Memset), "op") is Memset:
        return Memset(next(reader), _decode_expr(reader))
    letters = _repeat(reader, next)
    if not all(0 < letter < 128 for letter in letters):
        raise ValueError("the launch plan holds an entry name that is not ASCII")
    x, y, z = _decode_expr(reader), _decode_expr(reader), _decode_expr(reader)
    bx, by, bz, shared_bytes, cluster, dependent = [next(reader) for _ in range(6)]
    args = _repeat(reader, _decode_arg)
    return Launch(bytes(letters).decode("ascii"), (x, y, z), (bx, by, bz), args, shared_bytes, cluster, bool(dependent))


def _decode_arg(reader: Iterator[int]) -> Arg:
    return Arg(_pick(reader, _ARG_KINDS, "argument"), next(reader))
