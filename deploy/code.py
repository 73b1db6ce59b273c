"""Proof that the code of a node computes its layer: the shipped PTX is interpreted on the CPU and compared with float64.

Not a copy of the code, not its source: the text that the driver will assemble, or that was assembled already: a cubin
counts as verified when ptxas makes exactly its bytes of the text beside it. The reference is the dense convolution by
the weights read back from the node, which verify compares with the model's. Some thread blocks are run, the first and
the last among them, so that image borders, the last partial tile and the epilogue are part of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.assemble import AssembleError, reproduces, tool_version
from sparsedeploy.plugins.baked.interpret import run_plan
from sparsedeploy.plugins.baked.threads import InterpretError
from sparsedeploy.plugins.epilogue import apply
from sparsedeploy.plugins.kernel import Floats
from sparsedeploy.plugins.launch import Launch, Variant, choose
from sparsedeploy.plugins.node import Image, SparseConv
from sparsedeploy.plugins.reference import conv2d
from sparsedeploy.record import Record

BLOCKS = 4
"""Thread blocks (or clusters) of a layer that are interpreted; a layer with no more is run whole."""
SUMMED = 8
"""Consecutive blocks that are taken together where a later launch adds up what they leave in the workspace: the blocks
of one tile lie side by side, and there are at most so many."""
_HUGE = (0x7C007C00, 0xFC00FC00)
"""As fp32 about 2.7e36 and -2.7e36, as two fp16 infinities: no sum with one of them is what it is with the other."""
_UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11}


class CodeCheck(Record):
    """One layer's code at batch 1."""

    layer: str
    arch: int
    pixels: int
    """Output elements computed by the interpreted blocks."""
    of: int
    """Output elements of the layer."""
    worst: float
    """Largest error as a share of what rounding may cost that element; above 1 fails."""
    passed: bool
    problem: str = ""


class CubinCheck(Record):
    """One cubin against the PTX that lies beside it in its node."""

    layer: str
    arch: int
    dtype: Precision
    compiler: str
    """The ptxas that was asked, as in `ptxas V12.9.86`; "" where there is none."""
    passed: bool
    """Whether it made exactly these bytes."""
    checked: bool = True
    """False where no ptxas was there to ask: nothing is known then, good or bad."""
    problem: str = ""


def check_cubins(node: SparseConv, again: bool = True) -> tuple[CubinCheck, ...]:
    """Assemble the PTX beside each cubin of a node and compare bytes; with `again` past the cache."""
    return tuple(_check_cubin(node, image, again) for image in node.images if image.kind == "cubin")


def _check_cubin(node: SparseConv, cubin: Image, again: bool) -> CubinCheck:
    base = CubinCheck(layer=node.layer, arch=cubin.arch, dtype=cubin.dtype, compiler="", passed=False)
    texts = [i for i in node.images if (i.kind, i.arch, i.dtype) == ("ptx", cubin.arch, cubin.dtype)]
    if len(texts) != 1:
        return base.model_copy(update={"problem": f"{len(texts)} PTX images lie beside it, needed one"})
    try:
        compiler = tool_version()
        same = reproduces(texts[0].data, cubin.arch, cubin.data, again=again)
    except AssembleError as error:
        return base.model_copy(update={"problem": " ".join(str(error).split())})
    except MachineError as error:
        return base.model_copy(update={"problem": str(error), "checked": False})
    problem = "" if same else f"{compiler} makes other bytes of the PTX beside it"
    return base.model_copy(update={"compiler": compiler, "passed": same, "problem": problem})


def check_code(node: SparseConv, blocks: int = BLOCKS, seed: int = 0) -> CodeCheck:
    """Interpret a node's PTX for its newest architecture and compare every element that it writes.

    Allowed per element: (nonzeros of the channel + 8) roundings of the sum of magnitudes with fp32 sums; 8 plus their
    square root with sums in half. Raises ValueError when the node carries no code.
    """
    if not node.executable:
        raise ValueError(f"{node.layer}: carries no code")
    g, rng = node.geometry, np.random.default_rng(seed)
    element = np.float32 if node.precision == "fp32" else np.float16
    x = rng.random((1, g.ic, g.h, g.w)).astype(element)
    residual = rng.random((1, g.oc, g.oh, g.ow)).astype(element) if node.has_residual else None
    arch = max(image.arch for image in node.images)
    some = sample_blocks(node, blocks, rng)
    try:
        # Sums over blocks that were not run must show as such, also behind an epilogue that makes 0 of NaN.
        starts = _HUGE if some and _adds_up(node) else (0xFFFFFFFF,)
        runs = [
            run_plan(
                node.plan, node.images, node.precision, x, residual, node.constants, g, arch=arch, blocks=some, unset=start
            )
            for start in starts
        ]  # fmt: skip
    except (InterpretError, ValueError) as refusal:
        return CodeCheck(
            layer=node.layer, arch=arch, pixels=0, of=g.oc * g.oh * g.ow, worst=float("inf"), passed=False,
            problem=" ".join(str(refusal).split()),
        )  # fmt: skip
    weight, bias = kernel_named(node.kernel).unpack(node)
    wide = None if residual is None else residual.astype(np.float64)
    expected = apply(node.epilogue, conv2d(x.astype(np.float64), weight, bias, g), wide)
    got = runs[0]
    written = np.isfinite(got) & (got == runs[-1])
    error = np.abs(got.astype(np.float64) - expected) / _allowed(node, weight, bias)
    worst = float(error[written].max(initial=0.0))
    missing = got.size - int(written.sum())
    unwritten = missing == got.size or (missing > 0 and not some)
    return CodeCheck(
        layer=node.layer, arch=arch, pixels=got.size - missing, of=got.size, worst=worst,
        passed=worst <= 1.0 and not unwritten, problem=f"{missing} outputs are not written" if unwritten else "",
    )  # fmt: skip


def sample_blocks(node: SparseConv, count: int, rng: np.random.Generator) -> dict[int, list[int]]:
    """Blocks to run of every launch that reads the input: whole clusters, the first and the last and some between.

    A launch that is not named runs whole; {} is all. Several launches share `count`, at least one of each.
    """
    g = node.geometry
    variant = choose(node.plan, node.precision, 1)
    sizes = {"N": 1, "H": g.h, "W": g.w, "OH": g.oh, "OW": g.ow}
    gathered = _gathers(variant)
    reading = [
        (number, op) for number, op in enumerate(variant.ops if variant else ())
        if isinstance(op, Launch) and (number > 0 if gathered else any(arg.kind == "input" for arg in op.args))
    ]  # fmt: skip
    share = max(1, count // max(1, len(reading)))
    chosen: dict[int, list[int]] = {}
    for i, (number, op) in enumerate(reading):
        total = int(np.prod([size.value(sizes) for size in op.grid]))
        width = max(op.cluster, SUMMED) if _adds_up(node) else op.cluster
        groups = -(-total // width)
        if groups <= share or total % op.cluster:
            continue
        ends = [0, groups - 1] if share > 1 else [0] if i == 0 else [groups - 1] if i == len(reading) - 1 else []
        inner = np.setdiff1d(np.arange(groups), ends)
        some = sorted({*ends, *(int(group) for group in rng.choice(inner, share - len(ends), replace=False))})
        chosen[number] = [block for group in some for block in range(group * width, min((group + 1) * width, total))]
    return chosen


def _adds_up(node: SparseConv) -> bool:
    """Whether a launch at batch 1 reads what others left in the workspace, and not the input."""
    variant = choose(node.plan, node.precision, 1)
    launches = [op for op in variant.ops if isinstance(op, Launch)] if variant else []
    return not _gathers(variant) and any(all(arg.kind != "input" for arg in op.args) for op in launches)


def _gathers(variant: Variant | None) -> bool:
    """Whether the first launch copies the input to the workspace, whence the others read it: it is run whole."""
    first = variant.ops[0] if variant and variant.ops else None
    return isinstance(first, Launch) and first.entry.endswith("_gather")


def _allowed(node: SparseConv, weight: Floats, bias: Floats | None) -> NDArray[np.float64]:
    """[1, oc, 1, 1]: what rounding may cost one element of each channel, inputs being at most 1."""
    rows = weight.reshape(weight.shape[0], -1).astype(np.float64)
    magnitude = (
        np.abs(rows).sum(axis=1) + (0.0 if bias is None else np.abs(bias.astype(np.float64))) + node.has_residual
    )
    nnz = np.count_nonzero(rows, axis=1)
    steps = nnz + 8.0 if node.precision == "fp32" else np.sqrt(nnz) + 8.0
    allowed: NDArray[np.float64] = (_UNIT[node.precision] * steps * np.maximum(magnitude, 1e-30))[None, :, None, None]
    return allowed
