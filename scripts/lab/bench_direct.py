"""The data-driven kernels on a GPU: checked against float64, then timed by graph replay beside cuDNN in the same run.

    python scripts/lab/bench_direct.py prepare FOLDER [--top K] [--only TEXT] [--baselines]
    python scripts/lab/bench_direct.py run FOLDER --out results.json [--cudnn] [--only TEXT] [--launches N]

`prepare` needs the compiler wheels and no GPU; `run` needs sparsedeploy, torch and a driver, and no compiler.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sparsedeploy.devices import find
from sparsedeploy.layer import ConvLayer, Geometry, Precision
from sparsedeploy.plugins import direct
from sparsedeploy.plugins.assemble import assemble, compile_cuda
from sparsedeploy.plugins.csr import CSR
from sparsedeploy.plugins.kernel import BuildOptions, Built
from sparsedeploy.plugins.launch import Arg, Launch, Variant, const, var
from sparsedeploy.plugins.node import Image, SparseConv
from sparsedeploy.plugins.packed import PACKED, block_channels

SHAPES = ((64, 56), (128, 28), (256, 14), (512, 7))
TOLERANCE = {"fp32": 1e-6, "fp16": 6e-3}
"""Largest relative L2 error against float64."""


@dataclass(frozen=True)
class Work:
    """One thing to measure."""

    name: str
    node: SparseConv
    n: int
    sparsity: float
    predicted_us: float
    note: str


def pruned(g: Geometry, sparsity: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Magnitude-pruned random weights whose values are fp16 values, so that every kernel computes the same."""
    w = (
        np.random.default_rng(0).standard_normal(g.weight_shape) / np.sqrt(g.ic * g.kh * g.kw * (1 - sparsity))
    ).astype(np.float32)
    cut = round(w.size * sparsity)
    w.ravel()[np.argsort(np.abs(w.ravel()))[:cut]] = 0
    return w.astype(np.float16).astype(np.float32)


def layer_for(g: Geometry) -> ConvLayer:
    """A layer of that geometry."""
    return ConvLayer(name="bench", weight="w", dtype="fp32", shape=g.weight_shape, geometry=g)


def images_of(text: str, precision: Precision, name: str) -> tuple[Image, ...]:
    """The source as a cubin for sm_90."""
    return (Image(90, precision, "cubin", compile_cuda(text, 90, kind="cubin", name=name).data),)


def described(tiling: direct.Tiling, stages: int) -> str:
    """A tiling in one line."""
    t = tiling
    return (
        f"i{t.images} g{t.groups} r{t.rows} c{t.cols} w{t.warps} sets{t.sets} slots{t.slots} k{t.splits} "
        f"st{t.stage}x{stages} b{t.buffers} {t.pairs}"
    )


def parsed(g: Geometry, text: str) -> direct.Tiling:
    """Inverse of `described`."""
    pattern = r"i(\d+) g(\d+) r(\d+) c(\d+) w(\d+) sets(\d+) slots(\d+) k(\d+) st(\d+)\S* b(\d+) (none|images|rows)"
    match = re.fullmatch(pattern, text)
    if match is None:
        raise SystemExit(f"{text}: not a tiling")
    *numbers, buffers = map(int, match.groups()[:10])
    return direct.Tiling(g, *numbers, pairs=match.group(11), buffers=buffers)  # type: ignore[arg-type]


def direct_works(
    g: Geometry, w: Any, sparsity: float, n: int, precision: Precision, top: int, asked: list[direct.Tiling]
) -> list[Work]:
    """The best tilings by prediction, each of another shape of block, and those asked for."""
    device, options = find("h200"), BuildOptions(precision, n, (90,))
    bare = PACKED.build(layer_for(g), w, None, device, {}, replace(options, archs=())).node
    places = PACKED.places(bare)
    chosen: dict[tuple[int, ...], tuple[direct.Tiling, float]] = {}
    nnz = int(np.count_nonzero(w))
    given = [(tiling, direct.estimate(tiling, nnz, n, device, precision)) for tiling in asked]
    top += len(given)
    for tiling, guess in chain(given, direct.ranked(g, nnz, device, n, precision, True)):
        kind = (tiling.rows, tiling.warps, tiling.splits, tiling.sets, tiling.slots)
        if kind in chosen or tiling.shared_bytes(1, 2) > 1024 * device.shared_kb_per_block:
            continue
        if tiling.shared_bytes(*direct.make_table(tiling, "packed", places)[1:]) > 1024 * device.shared_kb_per_block:
            continue
        chosen[kind] = tiling, guess.us
        if len(chosen) == top:
            break

    def work(item: tuple[direct.Tiling, float]) -> Work:
        tiling, us = item
        scale = 2.0 ** -(*bare.parameters, 0)[1]
        node = direct.with_code(Built(bare), "packed", places, device, options, tiling, scale).node
        cubin = Image(90, precision, "cubin", assemble(node.images[0].data, 90).cubin)
        note = described(tiling, tiling.stages(places.block_ic))
        return Work(f"direct_{precision}", replace(node, images=(cubin,)), n, sparsity, us, note)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(work, chosen.values()))


def paper_work(g: Geometry, w: Any, sparsity: float, n: int) -> Work:
    """Algorithm 1 of the paper."""
    bare = PACKED.build(layer_for(g), w, None, find("h200"), {}, BuildOptions("fp32")).node
    # A chunk may not reach across a block of the format.
    chunk = next(size for size in range(16, 0, -1) if block_channels(g) % size == 0)
    ocs = 32
    text = "".join(
        f"#define {name} {value}\n"
        for name, value in dict(  # noqa: C408
            IC=g.ic, OC=g.oc, KH=g.kh, KW=g.kw, PT=g.pads[0], PL=g.pads[1], PB=g.pads[2], PR=g.pads[3],
                                CHUNK=chunk, OCS=ocs, BLOCK_IC=block_channels(g)).items()
    )  # fmt: skip
    text += Path(__file__).with_name("paper_packed.cu").read_text(encoding="utf-8")
    grid = (const(-(-g.oh // 8) * -(-g.ow // 16)), const(-(-g.oc // ocs)), var("N"))
    args = (Arg("input"), Arg("output"), Arg("constant", 0), Arg("constant", 1), Arg("N"), Arg("H"), Arg("W"))
    plan = (Variant("fp32", (Launch("paper", grid, (256, 1, 1), args),)),)
    return Work(
        "paper", replace(bare, plan=plan, images=images_of(text, "fp32", "paper_packed.cu")), n, sparsity, 0.0, ""
    )


def escoin_work(g: Geometry, w: Any, sparsity: float, n: int) -> Work:
    """Escoin, its copy of the input included."""
    bare = CSR.build(layer_for(g), w, None, find("h200"), {}, BuildOptions("fp32")).node
    text = "".join(
        f"#define {name} {value}\n"
        for name, value in dict(  # noqa: C408
            IC=g.ic, OC=g.oc, KH=g.kh, KW=g.kw, SH=g.stride[0], SW=g.stride[1], PT=g.pads[0], PL=g.pads[1],
                                PB=g.pads[2], PR=g.pads[3], H=g.h, W=g.w).items()
    )  # fmt: skip
    text += Path(__file__).with_name("escoin.cu").read_text(encoding="utf-8")
    padded = g.ic * (g.h + g.pads[0] + g.pads[2]) * (g.w + g.pads[1] + g.pads[3])
    pad = Launch("pad", ((var("N") * padded).ceil_div(1024), const(1), const(1)), (256, 1, 1),
                 (Arg("input"), Arg("workspace", 0), Arg("N")))  # fmt: skip
    grid = (const(-(-g.oh // 16) * -(-g.ow // 16)), const(g.oc), var("N"))
    main = Launch(
        "escoin", grid, (256, 1, 1), (Arg("workspace", 0), Arg("output"), *(Arg("constant", k) for k in range(3)))
    )
    plan = (Variant("fp32", (pad, main), var("N") * (4 * padded)),)
    return Work("escoin", replace(bare, plan=plan, images=images_of(text, "fp32", "escoin.cu")), n, sparsity, 0.0, "")


def deduplicated(work: Work, known: dict[bytes, Any]) -> Work:
    """The work with arrays that others have already replaced by theirs: pickle then writes them once."""
    constants = tuple(known.setdefault(array.tobytes(), array) for array in work.node.constants)
    return replace(work, node=replace(work.node, constants=constants))


def real_works(filters: Path, top: int) -> list[Work]:
    """Real 3x3 filters at N=1: arrays [oc, ic, 3, 3] at the size of map that ResNet-50 has for their channels."""
    works = []
    with np.load(filters) as arrays:
        for name in arrays:
            w = np.ascontiguousarray(arrays[name], np.float32)
            size = dict(SHAPES)[len(w)]
            g = Geometry(oc=len(w), ic=w.shape[1], kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
            zeros = round(1 - np.count_nonzero(w) / w.size, 3)
            for precision in ("fp32", "fp16"):
                made = direct_works(g, w, zeros, 1, precision, top, [])  # type: ignore[arg-type]
                works += [replace(work, note=f"real {name}: {work.note}") for work in made]
    return works


def prepare(folder: Path, top: int, only: str, baselines: bool, tilings: str, filters: Path | None) -> None:
    """Write the work list, most important first. `tilings` has lines as `64@56 N=32 fp16: i1 g2 ...`, for 90 %."""
    folder.mkdir(parents=True, exist_ok=True)
    works: list[Work] = real_works(filters, top) if filters else []
    kinds = [(sparsity, n) for batches in ((1, 32), (8,)) for sparsity in (0.9, 0.95, 0.98) for n in batches]
    for sparsity, n in kinds:
        for channels, size in SHAPES:
            g = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
            label = f"{channels}@{size} N={n} {sparsity}"
            if only and only not in f"{label};":
                continue
            w, started = pruned(g, sparsity), time.perf_counter()
            count = top if sparsity == 0.9 and n != 8 else max(1, top // 4)
            for precision in ("fp32", "fp16"):
                head = f"{channels}@{size} N={n} {precision}: "
                lines = [line[len(head) :] for line in tilings.splitlines() if line.startswith(head)]
                asked = [parsed(g, line.strip()) for line in lines] if sparsity == 0.9 else []
                works += direct_works(g, w, sparsity, n, precision, count, asked)  # type: ignore[arg-type]
            if sparsity == 0.9 and baselines:
                works += [paper_work(g, w, sparsity, n), escoin_work(g, w, sparsity, n)]
            print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
    path = folder / "works.pickle.gz"
    known: dict[bytes, Any] = {}
    path.write_bytes(gzip.compress(pickle.dumps([deduplicated(work, known) for work in works])))
    print(f"{len(works)} works, {path.stat().st_size / 1e6:.1f} MB")


def time_us(call: Callable[[], object], launches: int, repeats: int = 7) -> tuple[float, float]:
    """Median and spread in microseconds of one call in a replayed graph."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / launches)
    return float(np.median(times)), float(max(times) - min(times))


def dense_us(g: Geometry, n: int) -> dict[str, float]:
    """What cuDNN takes with full search, best of NCHW and NHWC, layouts converted outside of the timing."""
    import torch
    from torch.nn.functional import conv2d

    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    x, w = torch.randn(n, g.ic, g.h, g.w, device="cuda"), torch.randn(*g.weight_shape, device="cuda")
    result = {}
    for name, tf32, kind in (
        ("fp32", False, torch.float32),
        ("tf32", True, torch.float32),
        ("fp16", True, torch.float16),
    ):
        torch.backends.cudnn.allow_tf32 = tf32
        times = []
        for layout in (torch.contiguous_format, torch.channels_last):
            a, b = x.to(kind).contiguous(memory_format=layout), w.to(kind).contiguous(memory_format=layout)
            times.append(time_us(lambda a=a, b=b: conv2d(a, b, padding=g.pads[0], stride=g.stride), 20)[0])  # type: ignore[misc]
        result[name] = min(times)
    torch.backends.cudnn.allow_tf32 = False
    return result


_REFERENCES: dict[tuple[object, ...], tuple[Any, Any]] = {}


def reference(work: Work) -> tuple[Any, Any]:
    """Input and float64 output, with the weights that the node carries."""
    import torch
    from torch.nn.functional import conv2d

    g, node = work.node.geometry, work.node
    key = (g, work.n, node.precision, work.sparsity, node.constants[0].tobytes()[:4096])
    if key not in _REFERENCES:
        torch.manual_seed(g.ic + work.n)
        kind = torch.float32 if node.precision == "fp32" else torch.float16
        x = torch.randn(work.n, g.ic, g.h, g.w, device="cuda").to(kind)
        kernel, arrays = (CSR, 3) if node.kernel == "csr" else (PACKED, 2)
        bare = replace(node, plan=(), images=(), constants=node.constants[:arrays])
        weight = torch.from_numpy(kernel.unpack(bare)[0]).cuda().double()
        _REFERENCES.clear()
        _REFERENCES[key] = x, conv2d(x.double(), weight, padding=g.pads[0], stride=g.stride)
    return _REFERENCES[key]


def measure(work: Work, launches: int) -> dict[str, Any]:
    """Check, then time."""
    import torch

    from sparsedeploy.plugins.host import Runner

    g, node = work.node.geometry, work.node
    x, expected = reference(work)
    y = torch.full(expected.shape, float("nan"), device="cuda", dtype=x.dtype)
    runner = Runner(node)
    runner.reserve(work.n, node.precision)
    runner.run(x, out=y)
    torch.cuda.synchronize()
    error = float(((y.double() - expected).norm() / expected.norm()).item())
    again = torch.full_like(y, float("nan"))
    runner.run(x, out=again)
    torch.cuda.synchronize()
    row = {
        "kernel": work.name, "layer": f"{g.ic}@{g.h}", "n": work.n, "sparsity": work.sparsity, "note": work.note,
        "error": error, "repeats": bool((y == again).all().item()), "predicted_us": work.predicted_us,
    }  # fmt: skip
    if error < TOLERANCE[node.precision] and row["repeats"]:
        stream = torch.cuda.current_stream
        row["us"], row["spread_us"] = time_us(lambda: runner.run(x, out=y, stream=stream()), launches)
        if not (y == again).all().item():
            row |= {"us": None, "repeats": False}
    else:
        row["us"] = None
    runner.close()
    return row


def run(folder: Path, out: Path, cudnn: bool, only: str, launches: int) -> int:
    """Measure the work list; the exit code is 1 when a result is wrong."""
    works: list[Work] = pickle.loads(gzip.decompress((folder / "works.pickle.gz").read_bytes()))
    rows: list[dict[str, Any]] = []
    dense: dict[str, dict[str, float]] = {}
    for work in works:
        g = work.node.geometry
        label = f"{g.ic}@{g.h} N={work.n}"
        if only and only not in f"{label} {work.sparsity} {work.name}":
            continue
        if cudnn and label not in dense:
            dense[label] = dense_us(g, work.n)
            print(label, {name: round(value, 1) for name, value in dense[label].items()}, flush=True)
        try:
            row = measure(work, launches)
        except Exception as error:
            row = {"kernel": work.name, "layer": label, "note": work.note, "us": None, "error": repr(error)[:300]}
        rows.append(row)
        shown = "WRONG" if row["us"] is None else f"{row['us']:.2f}"
        print(
            label,
            work.sparsity,
            work.name,
            shown,
            f"(predicted {work.predicted_us:.1f})",
            row["error"],
            work.note,
            flush=True,
        )
        out.write_text(json.dumps({"rows": rows, "dense": dense}, indent=1))
    return int(any(row["us"] is None for row in rows))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--top", type=int, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--cudnn", action="store_true")
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--tilings", type=Path, help="file of tilings to prepare besides")
    parser.add_argument("--filters", type=Path, help="npz of real filters to prepare first, at N=1")
    parser.add_argument("--baselines", action="store_true", help="prepare the paper's kernel and Escoin too")
    options = parser.parse_args()
    if options.action == "prepare":
        tilings = options.tilings.read_text(encoding="utf-8") if options.tilings else ""
        prepare(options.folder, options.top, options.only, options.baselines, tilings, options.filters)
        return 0
    return run(options.folder, options.out, options.cudnn, options.only, options.launches)


if __name__ == "__main__":
    # Pickled works name this module, not __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    from bench_direct import main as entry

    raise SystemExit(entry())
