"""The data-driven kernels on a GPU: checked against float64, then timed by graph replay beside cuDNN in the same run.

    python scripts/lab/bench_direct.py prepare FOLDER [--top K] [--only TEXT]
    python scripts/lab/bench_direct.py run FOLDER --out results.json [--cudnn] [--only TEXT] [--launches N]

`prepare` needs the compiler wheels and no GPU; `run` needs sparsedeploy, torch and a driver, and no compiler.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsedeploy.devices import find
from sparsedeploy.layer import ConvLayer, Epilogue, Geometry, Precision
from sparsedeploy.plugins import direct
from sparsedeploy.plugins.assemble import compile_cuda
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
    """The source as PTX for sm_90: the driver assembles it."""
    return (Image(90, precision, "ptx", compile_cuda(text, 90, name=name).data),)


def direct_works(g: Geometry, w: Any, sparsity: float, n: int, precision: Precision, top: int) -> list[Work]:
    """The best tilings by prediction, each of another shape of block."""
    device, options = find("h200"), BuildOptions(precision, n, (90,))
    nnz = int(np.count_nonzero(w))
    guesses = [
        (direct.estimate(t, nnz, n, device, precision), t) for t in direct.candidates(g, device, n, precision, True)
    ]
    guesses.sort(key=lambda item: item[0].us)
    bare = PACKED.build(layer_for(g), w, None, device, {}, replace(options, archs=())).node
    works: list[Work] = []
    seen: set[tuple[int, ...]] = set()
    for guess, tiling in guesses:
        kind = (tiling.rows, tiling.warps, tiling.splits, tiling.sets, tiling.slots, tiling.stages(g.ic))
        if kind in seen:
            continue
        seen.add(kind)
        built = direct.with_code(Built(bare), "packed", PACKED.places(bare), device, options, tiling)
        _, stages, capacity = direct.make_table(tiling, "packed", PACKED.places(bare))
        text = direct.source(tiling, "packed", Epilogue(), precision, stages, capacity)
        node = replace(built.node, images=images_of(text, precision, "direct.cu"))
        shape = f"i{tiling.images} g{tiling.groups} r{tiling.rows} c{tiling.cols} w{tiling.warps} sets{tiling.sets} slots{tiling.slots} k{tiling.splits} st{tiling.stage}x{stages} {tiling.pairs}"
        works.append(Work(f"direct_{precision}", node, n, sparsity, guess.us, shape))
        if len(works) == 1 and sparsity == 0.9:  # the same without overlapping launches, to know what that gives
            (variant,) = node.plan
            alone = replace(variant.ops[0], dependent=False)  # type: ignore[type-var]
            plan = (replace(variant, ops=(alone,)),)
            works.append(
                Work(f"direct_{precision}", replace(node, plan=plan), n, sparsity, guess.us, shape + " no overlap")
            )
        if len(works) > top:
            break
    return works


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


def prepare(folder: Path, top: int, only: str) -> None:
    """Write the work list."""
    folder.mkdir(parents=True, exist_ok=True)
    works: list[Work] = []
    for channels, size in SHAPES:
        g = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
        for sparsity in (0.9, 0.95, 0.98):
            w = pruned(g, sparsity)
            for n in (1, 32):
                label = f"{channels}@{size} N={n} {sparsity}"
                if only and only not in f"{label};":
                    continue
                started = time.perf_counter()
                count = top if sparsity == 0.9 else max(1, top // 3)
                for precision in ("fp32", "fp16"):
                    works += direct_works(g, w, sparsity, n, precision, count)  # type: ignore[arg-type]
                if sparsity == 0.9:
                    works += [paper_work(g, w, sparsity, n), escoin_work(g, w, sparsity, n)]
                print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
    path = folder / "works.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(works)))
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


def measure(work: Work, launches: int) -> dict[str, Any]:
    """Check, then time."""
    import torch
    from torch.nn.functional import conv2d

    from sparsedeploy.plugins.host import Runner

    g, node = work.node.geometry, work.node
    kind = torch.float32 if node.precision == "fp32" else torch.float16
    torch.manual_seed(hash((g.ic, work.n)) % 1000)
    x = torch.randn(work.n, g.ic, g.h, g.w, device="cuda").to(kind)
    kernel = CSR if node.kernel == "csr" else PACKED
    bare = replace(node, plan=(), images=(), constants=node.constants[: 2 if kernel is PACKED else 3])
    weight = torch.from_numpy(kernel.unpack(bare)[0]).cuda().double()
    expected = conv2d(x.double(), weight, padding=g.pads[0], stride=g.stride)
    y = torch.full(expected.shape, float("nan"), device="cuda", dtype=kind)
    runner = Runner(node)
    runner.reserve(work.n, node.precision)
    runner.run(x, out=y)
    torch.cuda.synchronize()
    error = float(((y.double() - expected).norm() / expected.norm()).item())
    again = torch.empty_like(y)
    runner.run(x, out=again)
    torch.cuda.synchronize()
    row = {
        "kernel": work.name, "layer": f"{g.ic}@{g.h}", "n": work.n, "sparsity": work.sparsity, "note": work.note,
        "error": error, "repeats": bool((y == again).all().item()), "predicted_us": work.predicted_us,
    }  # fmt: skip
    if not error < TOLERANCE[node.precision] or not row["repeats"]:
        return {**row, "us": None}
    row["us"], row["spread_us"] = time_us(lambda: runner.run(x, out=y, stream=torch.cuda.current_stream()), launches)
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
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(options.folder, options.top, options.only)
        return 0
    return run(options.folder, options.out, options.cudnn, options.only, options.launches)


if __name__ == "__main__":
    # Pickled works name this module, not __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    from bench_direct import main as entry

    raise SystemExit(entry())
