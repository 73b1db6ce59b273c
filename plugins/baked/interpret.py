"""Runs PTX on the CPU: every thread of many blocks at once, one numpy array a register.

What is interpreted is the text that ships. Threads that part at a branch go on as separate fragments, lowest program
counter first, and are merged where they meet again. Memory is checked as no device checks it (see memory.py): bounds,
alignment, reads of what nothing wrote, missing barriers and cp.async waits are all errors that name the instruction.
f32 fma and arithmetic round once from float64 results (twice at worst in 2^-29 of the cases); fp16 likewise.
Memory ordering between blocks is not modelled: blocks of a batch move together, batches follow one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NoReturn

import numpy as np

from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins.baked.decode import Decoder, Layout, per_lane, symbol
from sparsedeploy.plugins.baked.memory import AccessError, Array, GlobalMemory, SharedMemory
from sparsedeploy.plugins.baked.parse import (
    Entry,
    Instruction,
    Mem,
    Module,
    Operand,
    Reg,
    Vec,
    parse,
)
from sparsedeploy.plugins.baked.threads import Batch, Control, Do, Fragment, InterpretError, merge
from sparsedeploy.plugins.launch import Launch, Memset, Plan, choose
from sparsedeploy.plugins.node import Image

_LANES_PER_BATCH = 8192


class Program(Layout):
    """One entry, decoded once for every launch."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry)
        self._live = _liveness(entry, self.index)
        decoder = Decoder(self)
        self.steps: list[Do | Control] = [decoder.decode(ins) for ins in entry.instructions]

    def live(self, pc: int) -> Sequence[int]:
        """Registers that may be read from `pc` on before they are written."""
        return self._live.get(pc, ())


@lru_cache(maxsize=16)
def _module(text: bytes) -> dict[str, Program]:
    module: Module = parse(text)
    return {name: Program(entry) for name, entry in module.entries.items()}


def load(ptx: str | bytes) -> dict[str, Program]:
    """The programs of a PTX text by entry name; raises ValueError naming the line for what is not understood."""
    return _module(ptx.encode("ascii") if isinstance(ptx, str) else ptx)


def run_launch(
    ptx: str | bytes | dict[str, Program],
    launch: Launch,
    sizes: Mapping[str, int],
    memory: GlobalMemory,
    arguments: Sequence[int],
    blocks: Iterable[int] | None = None,
) -> None:
    """Run one launch. `arguments` are addresses from `memory` or sizes, in parameter order.

    `blocks` are linear block numbers (x fastest) to run; a cluster's blocks must be named together. Raises
    InterpretError naming the line.
    """
    programs = ptx if isinstance(ptx, dict) else load(ptx)
    if launch.entry not in programs:
        raise InterpretError(f"the PTX has no entry {launch.entry}; it has {', '.join(programs)}")
    program = programs[launch.entry]
    x, y, z = (size.value(sizes) for size in launch.grid)
    grid = (x, y, z)
    if min(grid) < 1 or x % launch.cluster:
        raise InterpretError(f"{launch.entry}: grid {grid} is empty or no multiple of its clusters of {launch.cluster}")
    chosen = np.arange(x * y * z) if blocks is None else np.array(sorted(set(blocks)), np.int64)
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if not 1 <= threads <= 1024:
        raise InterpretError(f"{launch.entry}: {threads} threads in a block")
    step = max(1, _LANES_PER_BATCH // threads // launch.cluster) * launch.cluster
    with np.errstate(all="ignore"):
        for first in range(0, len(chosen), step):
            _run_batch(program, launch, grid, chosen[first : first + step], memory, arguments)


def _run_batch(
    program: Program,
    launch: Launch,
    grid: tuple[int, int, int],
    blocks: Array,
    memory: GlobalMemory,
    arguments: Sequence[int],
) -> None:
    batch = Batch(grid, launch, blocks, memory)
    batch.shared = SharedMemory(len(blocks), program.static_bytes + launch.shared_bytes, program.granule)
    batch.params = _pack_params(program, arguments)
    lanes = np.arange(len(blocks) * batch.threads)
    start = Fragment(lanes, lanes // batch.threads, lanes % batch.threads, [None] * len(program.index))
    batch.stamp(start)
    runnable: Parts = [start]
    waiting: Parts = []
    while runnable or waiting:
        if not runnable:
            runnable, waiting = _release(batch, program, waiting)
            continue
        pc = min(part.pc for part in runnable)
        here = [part for part in runnable if part.pc == pc]
        runnable = [part for part in runnable if part.pc != pc]
        limit = min((part.pc for part in runnable), default=len(program.steps) + 1)
        more, blocked = _advance(batch, program, merge(here, program.live(pc)), limit)
        runnable += more
        waiting += blocked


def _pack_params(program: Program, arguments: Sequence[int]) -> Array:
    sizes = list(program.entry.params.items())
    if len(sizes) != len(arguments):
        raise InterpretError(f"{program.entry.name} takes {len(sizes)} parameters, the launch gives {len(arguments)}")
    block = np.zeros((program.param_bytes + 7) // 8 * 8 or 8, np.uint8)
    for (name, size), value in zip(sizes, arguments, strict=True):
        raw = (value % (1 << (8 * size))).to_bytes(size, "little")
        block[program.param_offset[name] : program.param_offset[name] + size] = np.frombuffer(raw, np.uint8)
    return block


Parts = list[Fragment]


def _advance(batch: Batch, program: Program, part: Fragment, limit: int) -> tuple[Parts, Parts]:
    """Run a fragment until others must move first: (runnable fragments, waiting ones)."""
    steps, pc, end = program.steps, part.pc, len(program.steps)
    try:
        while pc < limit:
            if pc >= end:
                _exit(batch, part)
                return [], []
            step = steps[pc]
            if not isinstance(step, Control):
                step(batch, part)
                pc += 1
                continue
            part.pc = pc
            next_pc = _control(batch, program, step, part)
            if not isinstance(next_pc, int):
                return next_pc
            pc = next_pc
    except AccessError as error:
        _stop(program, pc, str(error))
    except (TypeError, AttributeError) as error:
        missing = [
            name for name in _read_registers(program.entry.instructions[pc]) if part.regs[program.index[name]] is None
        ]
        if missing:
            _stop(program, pc, f"reads register {missing[0]}, which nothing wrote")
        raise InterpretError(f"{program.entry.name}: line {program.entry.instructions[pc].line}: {error}") from error
    part.pc = pc
    return [part], []


def _take(program: Program, part: Fragment, which: Array, pc: int) -> Fragment:
    return part.take(which, pc, program.live(pc))


def _stop(program: Program, pc: int, why: str) -> NoReturn:
    ins = program.entry.instructions[pc]
    raise InterpretError(f"{program.entry.name}: line {ins.line}: `{' '.join(ins.text.split())}` {why}") from None


def _read_registers(ins: Instruction) -> list[str]:
    names = [] if ins.guard is None else [ins.guard[0].name]
    for operand in ins.operands if _writes_nothing(ins) else ins.operands[1:]:
        names += _names(operand)
    return names


def _writes_nothing(ins: Instruction) -> bool:
    name = ins.opcode.split(".")[0]
    return name in ("st", "red", "cp", "brx", "bra", "bar", "barrier") or ins.opcode.startswith("mbarrier.init")


def _names(operand: Operand) -> list[str]:
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Mem) and isinstance(operand.base, Reg):
        return [operand.base.name]
    if isinstance(operand, Vec):
        return [item.name for item in operand.items if isinstance(item, Reg)]
    return []


def _liveness(entry: Entry, index: Mapping[str, int]) -> dict[int, list[int]]:
    """Registers live at every place where threads may part or meet: around branches, waits and labels."""
    count = len(entry.instructions)
    leaders = {0, count, *entry.labels.values()}
    targets: dict[int, tuple[int, ...]] = {}
    for pc, ins in enumerate(entry.instructions):
        name = ins.opcode.split(".")[0]
        if name in ("bra", "brx", "ret", "exit", *_WAITS):
            leaders |= {pc, pc + 1}
            targets[pc] = _targets(entry, ins, name, pc)
    order = sorted(leaders)
    facts = {start: _block_facts(entry, index, start, end) for start, end in pairwise(order)}
    live = dict.fromkeys(order, 0)
    changed = True
    while changed:
        changed = False
        for start, end in reversed(list(pairwise(order))):
            after = 0
            for target in targets.get(end - 1, (end,)):
                after |= live[target]
            used, written = facts[start]
            now = used | (after & ~written)
            changed |= now != live[start]
            live[start] = now
    return {pc: _bits(value) for pc, value in live.items()}


_WAITS = ("bar", "barrier", "mbarrier")


def _targets(entry: Entry, ins: Instruction, name: str, pc: int) -> tuple[int, ...]:
    goes_on = (pc + 1,) if ins.guard is not None or name in _WAITS else ()
    if name == "bra":
        return (entry.labels.get(symbol(ins.operands[0]), pc + 1), *goes_on)
    if name == "brx":
        return (*[entry.labels[label] for label in entry.tables.get(symbol(ins.operands[1]), ())], *goes_on)
    return goes_on


def _block_facts(entry: Entry, index: Mapping[str, int], start: int, end: int) -> tuple[int, int]:
    """(read before written, written for certain) of a stretch of instructions, as bit sets."""
    used = written = 0
    for ins in entry.instructions[start:end]:
        for name in _read_registers(ins):
            used |= (1 << index[name]) & ~written
        if not _writes_nothing(ins) and ins.operands:
            for name in _names(ins.operands[0]):
                if ins.guard is None:
                    written |= 1 << index[name]
                else:  # where the guard is false the old value stays
                    used |= (1 << index[name]) & ~written
    return used, written


def _bits(value: int) -> list[int]:
    text = bin(value)[:1:-1]
    return [at for at, bit in enumerate(text) if bit == "1"]


def _control(batch: Batch, program: Program, step: Control, part: Fragment) -> int | tuple[Parts, Parts]:
    """The next program counter, or the fragments that go on and those that wait."""
    pc = part.pc
    mask = None
    if step.guard is not None:
        mask = step.guard(part)
        if not mask.any():
            return pc + 1
        if mask.all():
            mask = None
    if step.kind == "bra":
        if mask is None:
            return step.targets[0]
        return [_take(program, part, mask, step.targets[0]), _take(program, part, ~mask, pc + 1)], []
    if step.kind == "brx":
        return _branch_table(program, step, part, mask)
    if mask is not None:  # only some leave or wait: the others are a fragment of their own
        rest, some = _take(program, part, ~mask, pc + 1), _take(program, part, mask, pc)
        outcome = _unguarded(batch, step, some)
        if isinstance(outcome, int):
            some.pc = outcome
            return [rest, some], []
        return [rest, *outcome[0]], outcome[1]
    return _unguarded(batch, step, part)


def _branch_table(program: Program, step: Control, part: Fragment, mask: Array | None) -> int | tuple[Parts, Parts]:
    assert step.index is not None
    index = step.index(part)
    chosen = index if mask is None else index[mask]
    if len(chosen) and int(chosen.max()) >= len(step.targets):
        raise AccessError(f"takes branch {int(chosen.max())} of a table of {len(step.targets)}")
    if mask is None and (index == index[0]).all():
        return step.targets[int(index[0])]
    parts = [] if mask is None else [_take(program, part, ~mask, part.pc + 1)]
    for one in np.unique(chosen):
        which = index == one if mask is None else (index == one) & mask
        parts.append(_take(program, part, which, step.targets[int(one)]))
    return parts, []


def _unguarded(batch: Batch, step: Control, part: Fragment) -> int | tuple[Parts, Parts]:
    if step.kind == "exit":
        _exit(batch, part)
        return [], []
    if step.kind == "bar":
        if _whole(batch, part):
            batch.shared.pass_barrier(np.unique(part.block))
            batch.stamp(part)
            return part.pc + 1
        return [], [part]
    if step.kind == "mbarrier":
        if _arrived(batch, step, part).all():
            _pass_mbarrier(batch, step, part)
            return part.pc + 1
        return [], [part]
    batch.waits[part.lanes] += 1
    if (batch.arrived[part.lanes] < batch.waits[part.lanes]).any():
        raise AccessError("waits at a cluster barrier without having arrived")
    if _cluster_ready(batch, part).all():
        _pass_cluster(batch, part)
        return part.pc + 1
    return [], [part]


def _exit(batch: Batch, part: Fragment) -> None:
    if any(part.copies):
        raise AccessError("ends with cp.async copies that nothing waited for")
    batch.live -= np.bincount(part.block, minlength=len(batch.blocks))
    batch.gone[part.lanes] = True


def _whole(batch: Batch, part: Fragment) -> bool:
    counts = np.bincount(part.block, minlength=len(batch.blocks))
    return bool(((counts == 0) | (counts == batch.live)).all())


def _cluster_ready(batch: Batch, part: Fragment) -> Array:
    """For each thread, whether all living threads of its cluster arrived as often as it waits."""
    per = batch.threads * batch.cluster
    arrived = np.where(batch.gone, np.iinfo(np.int64).max, batch.arrived).reshape(-1, per).min(axis=1)
    return np.asarray(arrived[part.lanes // per] >= batch.waits[part.lanes])


def _pass_cluster(batch: Batch, part: Fragment) -> None:
    first = part.block // batch.cluster * batch.cluster
    for rank in range(batch.cluster):  # the barrier is past for all of them, also for those that are yet to go on
        batch.shared.pass_cluster_barrier(first + rank, batch.waits[part.lanes])
    batch.shared.pass_barrier(np.unique(part.block))
    batch.stamp(part)


def _awaited(step: Control, part: Fragment) -> Array:
    """Rows of (block, address of the mbarrier), one per thread."""
    assert step.index is not None
    return np.stack([part.block, per_lane(step.index(part), part).astype(np.int64)], 1)


def _arrived(batch: Batch, step: Control, part: Fragment) -> Array:
    """For each thread, whether the mbarrier that it waits at is complete."""
    which, back = np.unique(_awaited(step, part), axis=0, return_inverse=True)
    return np.array([batch.barrier(*map(int, one)).complete for one in which])[back.reshape(-1)]


def _pass_mbarrier(batch: Batch, step: Control, part: Fragment) -> None:
    for one in np.unique(_awaited(step, part), axis=0):
        passed = batch.barrier(*map(int, one))
        for granule in passed.granules:  # tag 0 is past for everybody
            batch.shared.finish_copy([granule], np.zeros(len(granule), np.uint64))
        passed.granules = []
    assert step.then is not None
    step.then(batch, part)


def _release(batch: Batch, program: Program, waiting: Parts) -> tuple[Parts, Parts]:
    """Let go what waits for a barrier that all have reached."""
    bars = [part for part in waiting if _kind(program, part) == "bar"]
    counts = np.zeros(len(batch.blocks), np.int64)
    for part in bars:
        counts += np.bincount(part.block, minlength=len(batch.blocks))
    complete = (counts == batch.live) & (counts > 0)
    freed: Parts = []
    if complete.any():
        batch.shared.pass_barrier(np.nonzero(complete)[0])
    kept: Parts = []
    for part in waiting:
        step = program.steps[part.pc]
        assert isinstance(step, Control)
        if step.kind == "bar":
            ready = complete[part.block]
        else:
            ready = _arrived(batch, step, part) if step.kind == "mbarrier" else _cluster_ready(batch, part)
        if not ready.all():
            kept.append(part if not ready.any() else _take(program, part, ~ready, part.pc))
        if ready.any():
            free = part if ready.all() else _take(program, part, ready, part.pc)
            if step.kind == "bar":
                batch.stamp(free)
            elif step.kind == "mbarrier":
                _pass_mbarrier(batch, step, free)
            else:
                _pass_cluster(batch, free)
            free.pc += 1
            freed.append(free)
    if not freed:
        _stop(program, waiting[0].pc, "is waited at for ever: other threads of the block or cluster never come")
    return freed, kept


def _kind(program: Program, part: Fragment) -> str:
    step = program.steps[part.pc]
    return step.kind if isinstance(step, Control) else ""


def run_plan(
    plan: Plan,
    images: Sequence[Image],
    dtype: Precision,
    x: Array,
    residual: Array | None,
    constants: Sequence[Array],
    geometry: Geometry,
    *,
    arch: int | None = None,
    blocks: Mapping[int, Iterable[int]] | None = None,
    unset: int = 0xFFFFFFFF,
) -> Array:
    """Run a plan's variant for x [N, ic, h, w] as the plugin would and return y [N, oc, oh, ow] of `dtype`.

    Output and workspace start as NaN, so what is not written, or read before it is, shows; `unset` is another word for
    the workspace to start with, since a ReLU makes 0 of NaN. The image is the PTX for
    `arch` and dtype, by default the newest architecture among them. `blocks` restricts ops (by number) to some of
    their blocks; elements nothing wrote are NaN. Raises InterpretError; ValueError when no variant or image fits.
    """
    element = np.float32 if dtype == "fp32" else np.float16
    n, _, h, w = x.shape
    if x.shape[1:] != (geometry.ic, geometry.h, geometry.w):
        raise ValueError(f"x is {x.shape}, needed [N, {geometry.ic}, {geometry.h}, {geometry.w}]")
    variant = choose(plan, dtype, n)
    if variant is None:
        raise ValueError(f"no variant of the plan fits {dtype} and N={n}")
    programs = load(_pick(images, dtype, arch).data)
    sizes = {"N": n, "H": h, "W": w, "OH": geometry.oh, "OW": geometry.ow}
    memory = GlobalMemory()
    output = np.full((n, geometry.oc, geometry.oh, geometry.ow), np.nan, element)
    workspace = np.full(-(-max(variant.workspace.value(sizes), 1) // 4), unset, np.uint32).view(np.uint8)
    addresses = {
        "input": memory.alloc("the input", x.astype(element)),
        "output": memory.alloc("the output", output, writable=True),
        "workspace": memory.alloc("the workspace", workspace, writable=True),
    }
    if residual is not None:
        addresses["residual"] = memory.alloc("the residual", residual.astype(element))
    tables = [memory.alloc(f"constant {k}", np.asarray(table)) for k, table in enumerate(constants)]
    for number, op in enumerate(variant.ops):
        if isinstance(op, Memset):
            memory.clear(addresses["workspace"] + op.offset, op.bytes.value(sizes))
            continue
        arguments = []
        for arg in op.args:
            if arg.kind in ("N", "H", "W"):
                arguments.append(sizes[arg.kind])
            elif arg.kind == "constant":
                arguments.append(tables[arg.index])
            elif arg.kind not in addresses:
                raise ValueError("the plan takes a residual and none was given")
            else:
                arguments.append(addresses[arg.kind] + (arg.index if arg.kind == "workspace" else 0))
        run_launch(programs, op, sizes, memory, arguments, None if blocks is None else blocks.get(number))
    return output


def _pick(images: Sequence[Image], dtype: Precision, arch: int | None) -> Image:
    fitting = [image for image in images if image.dtype == dtype and image.kind == "ptx" and arch in (None, image.arch)]
    if not fitting:
        held = ", ".join(f"sm_{image.arch} {image.dtype} {image.kind}" for image in images) or "none"
        raise ValueError(f"no PTX image for {dtype}{f' and sm_{arch}' if arch else ''}; images are: {held}")
    return max(fitting, key=lambda image: image.arch)
