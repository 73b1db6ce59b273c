"""Every kernel under compute-sanitizer: memcheck, racecheck, initcheck, synccheck, on layers small enough for its pace.

    python scripts/sanitize.py prepare FOLDER [--kernels ...]   builds the nodes (compiler wheels, no GPU)
    python scripts/sanitize.py run FOLDER [--tools ...]         runs them under each tool (GPU, compute-sanitizer, no compiler)
    python scripts/sanitize.py both FOLDER                      one after the other

Exit code 1 when a tool reports an error or a result is wrong, 3 when compute-sanitizer is missing.
"""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparsedeploy.devices import find
from sparsedeploy.errors import SparseDeployError
from sparsedeploy.layer import ConvLayer, Epilogue, Geometry, Precision, Zeros
from sparsedeploy.plugins import KERNELS, direct, epilogue, kernel_named
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.csr import CSR
from sparsedeploy.plugins.direct import Tiling
from sparsedeploy.plugins.kernel import BuildOptions, Config
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.reference import conv2d

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-2}
"""Largest relative L2 error; a sanitizer run checks memory, the tests check numbers."""

FUSED = Epilogue(bias=True, activation="clip", low=0.0, high=6.0, residual="before_activation")
LAYERS = (
    (Geometry(oc=32, ic=24, kh=3, kw=3, h=14, w=14, pads=(1, 1, 1, 1)), Epilogue(bias=True, activation="relu")),
    (Geometry(oc=24, ic=32, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1)), FUSED),
    (Geometry(oc=16, ic=3, kh=7, kw=7, h=21, w=19, stride=(2, 2), pads=(3, 3, 2, 3)), Epilogue()),
    (Geometry(oc=12, ic=20, kh=1, kw=1, h=9, w=5), FUSED),
    (Geometry(oc=8, ic=8, kh=3, kw=3, h=10, w=12, pads=(2, 2, 2, 2), dilation=(2, 2), group=4), Epilogue()),
)
BAKED_KINDS: dict[str, Config] = {
    "whole": {"channels": 4, "pixels": 32, "stage_channels": 2},
    "rows": {"channels": 4, "pixels": 32, "stage_channels": 2, "rows": 2},
    "cluster": {"channels": 4, "pixels": 32, "splits": 2, "combine": 1, "stage_channels": 2, "dependent": 1},
    "mates": {
        "channels": 4,
        "pixels": 32,
        "splits": 2,
        "combine": 1,
        "stage_channels": 2,
        "mates": 2,
        "pieces_first": 1,
    },
    "planes": {"channels": 4, "pixels": 32, "splits": 2, "combine": 2, "stage_channels": 2},
    "parts": {"channels": 4, "pixels": 32, "stage_channels": 2, "parts": 2, "dependent": 1},
}
WOVEN_KINDS: dict[str, Config] = {
    "woven by twos": {"channels": 4, "pixels": 32, "stage_channels": 4, "ring": 2, "interleave": 2, "dependent": 1},
    "woven whole images": {"channels": 4, "pixels": 48, "stage_channels": 4, "ring": 2, "interleave": 4},
    "woven in clusters": {
        "channels": 4, "pixels": 48, "splits": 2, "combine": 1, "stage_channels": 4, "ring": 2, "interleave": 4, "dependent": 1,
    },
    "streaming": {"channels": 4, "pixels": 32, "stage_channels": 2, "stream": 1, "dependent": 1},
}  # fmt: skip
"""Schedules of fp32 alone."""
STRIDED_KINDS: dict[str, Config] = {
    "picked": {"channels": 4, "pixels": 32, "stage_channels": 4, "dependent": 1},
    "gathered": {"channels": 4, "pixels": 32, "stage_channels": 4, "gather": 1, "dependent": 1},
    "gathered and woven": {"channels": 4, "pixels": 24, "stage_channels": 4, "ring": 2, "gather": 1, "interleave": 4},
}
BAKED_MODES: tuple[tuple[Precision, Config], ...] = (
    ("fp32", {}), ("fp16", {"sums": 32}), ("fp16", {}), ("fp16", {"pair_rows": 1}),
)  # fmt: skip
SMALL = Geometry(oc=8, ic=8, kh=3, kw=3, h=6, w=8, pads=(1, 1, 1, 1))
SHORTCUT = Geometry(oc=8, ic=8, kh=1, kw=1, h=6, w=8, stride=(2, 2))
CLUSTERED = Geometry(oc=16, ic=16, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))


def make_layer(g: Geometry, e: Epilogue, weight: np.ndarray[Any, np.dtype[np.float32]]) -> ConvLayer:
    """The layer as scan would describe it."""
    per_channel = np.count_nonzero(weight.reshape(len(weight), -1), axis=1)
    nnz = int(per_channel.sum())
    spread = (int(per_channel.min()), float(np.median(per_channel)), int(per_channel.max()))
    zeros = Zeros(
        nnz=nnz, total=weight.size, nnz_per_channel=spread, empty_filters=0, empty_inputs=0, near_zero=0, two_four=False,
        sparsity=1 - nnz / weight.size,
    )  # fmt: skip
    return ConvLayer(
        name="sanitize", weight="w", dtype="fp32", shape=g.weight_shape, geometry=g, zeros=zeros, epilogue=e
    )


def build_nodes(names: Sequence[str]) -> list[tuple[str, SparseConv, int]]:
    """(name, node, batch): the named kernels as machine code, both precisions, batch 1 and 3."""
    device, rng, nodes = find("h200"), np.random.default_rng(0), []
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for number, (g, e) in enumerate(LAYERS):
        weight = rng.standard_normal(g.weight_shape).astype(np.float16).astype(np.float32)
        weight[rng.random(g.weight_shape) < 0.8] = 0
        bias = rng.standard_normal(g.oc).astype(np.float32) if e.bias else None
        layer = make_layer(g, e, weight)
        for kernel in map(kernel_named, names):
            for precision in precisions:
                if kernel.supports(layer, device, precision) is not None:
                    continue
                for n in (1, 3):
                    config, _ = kernel.configs(layer, device, precision, n)[0]
                    node = kernel.build(
                        layer, weight, bias, device, config, BuildOptions(precision, n, (90,), True)
                    ).node
                    if node.executable:
                        nodes.append((f"{kernel.name} layer {number} {precision} N={n}", node, n))
    if "csr" not in names:
        return nodes
    weight = rng.standard_normal(CLUSTERED.weight_shape).astype(np.float16).astype(np.float32)
    layer = make_layer(CLUSTERED, Epilogue(), weight)
    bare = CSR.build(layer, weight, None, device, {}, BuildOptions("fp32"))
    tiling = Tiling(CLUSTERED, 1, 4, 2, 7, 1, 4, 2, 4, 2)
    options = BuildOptions("fp32", 1, (90,), True)
    clustered = direct.with_code(bare, "csr", CSR.places(bare.node), device, options, tiling).node
    # Image pairs read in runs: two stages, the next read ahead, and an odd batch.
    bare = CSR.build(layer, weight, None, device, {}, BuildOptions("fp16"))
    tiling, options = Tiling(CLUSTERED, 2, 1, 7, 7, 1, 4, 2, 1, 8, "images"), BuildOptions("fp16", 3, (90,), True)
    runs = direct.with_code(bare, "csr", CSR.places(bare.node), device, options, tiling).node
    return [*nodes, ("csr in clusters of 4", clustered, 2), ("csr in runs of image pairs", runs, 3)]


def build_small() -> list[tuple[str, SparseConv, int]]:
    """(name, node, batch): every kind of schedule of baked, every way to sum, on layers of a few blocks."""
    device, rng, nodes = find("h200"), np.random.default_rng(0), []
    for g, kinds, modes in (
        (SMALL, BAKED_KINDS, BAKED_MODES), (SMALL, WOVEN_KINDS, BAKED_MODES[:1]), (SHORTCUT, STRIDED_KINDS, BAKED_MODES[:3]),
    ):  # fmt: skip
        weight = rng.standard_normal(g.weight_shape).astype(np.float16).astype(np.float32)
        weight[rng.random(g.weight_shape) < 0.8] = 0
        bias, layer = rng.standard_normal(g.oc).astype(np.float32), make_layer(g, FUSED, weight)
        for (kind, config), (precision, more) in product(kinds.items(), modes):
            options = BuildOptions(precision, 2, (90,), True)
            node = BAKED.build(layer, weight, bias, device, config | more, options).node
            nodes.append((f"baked {kind} {precision} {more}", node, 2))
    return nodes


def run_nodes(folder: Path) -> int:
    """Run every node once and compare; what runs inside of the sanitizer."""
    from sparsedeploy.plugins.host import DeviceArray, Runner, cuda_driver

    nodes: list[tuple[str, SparseConv, int]] = pickle.loads((folder / "nodes.pickle").read_bytes())
    wrong = 0
    for name, node, n in nodes:
        g, rng = node.geometry, np.random.default_rng(1)
        element = np.float32 if node.precision == "fp32" else np.float16
        x = rng.standard_normal((n, g.ic, g.h, g.w)).astype(element)
        residual = rng.standard_normal((n, g.oc, g.oh, g.ow)).astype(element) if node.has_residual else None
        runner = Runner(node)
        driver = cuda_driver()
        on_device = DeviceArray(driver, x.shape, node.precision).upload(x)
        extra = None if residual is None else DeviceArray(driver, residual.shape, node.precision).upload(residual)
        y = runner.run(on_device, extra).numpy().astype(np.float64)
        weight, bias = kernel_named(node.kernel).unpack(node)
        expected = epilogue.apply(node.epilogue, conv2d(x, weight, bias, g), residual)
        error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
        if not error < TOLERANCE[node.precision]:
            wrong += 1
            print(f"WRONG {name}: relative error {error:.2e}")
        runner.close()
    print(f"{len(nodes)} nodes run, {wrong} wrong")
    return int(wrong > 0)


def run_tools(folder: Path, tools: list[str]) -> int:
    """Each tool over all nodes; prints a line per tool and the first reports of those that found something."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print(
            "compute-sanitizer is not on the PATH: install it with the CUDA toolkit, or add its folder to PATH",
            file=sys.stderr,
        )
        return 3
    failed = False
    for tool in tools:
        started = time.perf_counter()
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "child", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        text = result.stdout + result.stderr
        summary = "; ".join(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: ([^\n]*)", text)) or "no summary"
        ran = "; ".join(re.findall(r"\d+ nodes run, \d+ wrong", text)) or "the nodes did not run"
        print(f"{tool}: exit {result.returncode}, {summary}; {ran}; {time.perf_counter() - started:.0f} s", flush=True)
        if result.returncode != 0:
            failed = True
            print("\n".join(text.splitlines()[:40]), flush=True)
    return int(failed)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("prepare", "run", "both", "child"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", default=",".join(kernel.name for kernel in KERNELS))
    parser.add_argument("--small", action="store_true", help="only small schedules of baked, one of each kind")
    parser.add_argument("--tools", default=",".join(TOOLS))
    options = parser.parse_args()
    try:
        if options.action == "child":
            return run_nodes(options.folder)
        if options.action in ("prepare", "both"):
            options.folder.mkdir(parents=True, exist_ok=True)
            nodes = build_small() if options.small else build_nodes(options.kernels.split(","))
            (options.folder / "nodes.pickle").write_bytes(pickle.dumps(nodes))
            print(f"{len(nodes)} nodes")
        return run_tools(options.folder, options.tools.split(",")) if options.action in ("run", "both") else 0
    except SparseDeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
