"""Convolutions for the plugin on a GPU: nodes, their data, what the output must be, and how far it may be off.

    python tests/plugins/gpu_cases.py FOLDER [--target h200]      makes them all on another machine
    SPARSEDEPLOY_GPU_CASES=FOLDER python -m pytest -m gpu tests   takes them from there

Building a node takes longer than running it: a lent GPU should not wait for that. Without the variable they are made
where they run.
"""

from __future__ import annotations

import argparse
import lzma
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from conv_cases import EPILOGUES, Case, fill, layer_of
from numpy.typing import NDArray

from sparsedeploy.devices import Device, find
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins import epilogue, kernel_named
from sparsedeploy.plugins.assemble import assemble_many
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.node import Image, SparseConv
from sparsedeploy.plugins.reference import conv2d

FOLDER = os.environ.get("SPARSEDEPLOY_GPU_CASES")

GEOMETRIES = (
    Geometry(oc=64, ic=64, kh=3, kw=3, h=56, w=56, pads=(1, 1, 1, 1)),
    Geometry(oc=128, ic=64, kh=3, kw=3, h=28, w=28, stride=(2, 2), pads=(1, 1, 1, 1)),
    Geometry(oc=96, ic=33, kh=1, kw=1, h=14, w=9),
    Geometry(oc=256, ic=256, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1)),
)
NUMBERS = range(len(EPILOGUES))
BATCHES = (1, 3)
DTYPES: tuple[Precision, ...] = ("fp32", "fp16")
NETWORKS: tuple[tuple[str, Precision], ...] = (("baked", "fp32"), ("csr", "fp32"), ("packed", "fp16"))
"""Kernel and type of a whole ResNet-18."""
SPARSITY = 0.9

UNIT: dict[Precision, float] = {"fp32": 2.0**-24, "fp16": 2.0**-11}
SMALLEST: dict[Precision, float] = {"fp32": 2.0**-149, "fp16": 2.0**-24}
"""Distance of subnormal numbers: what one rounding may be off by, however small the value."""


@dataclass(frozen=True)
class Prepared:
    """A node with its data and what its output must be."""

    name: str
    node: SparseConv
    dtype: Precision
    x: NDArray[np.float64]
    residual: NDArray[np.float64] | None
    expected: NDArray[np.float64]
    magnitudes: NDArray[np.float64]
    """Sum of the magnitudes of everything added up, per element."""
    terms: NDArray[np.int64]
    """How many are added up, per output channel: nonzeros, and bias, residual, slope."""


def faults(y: NDArray[np.generic], case: Prepared) -> str:
    """What is wrong with an output, in words; "" for nothing. NaN is wrong.

    Sums are taken in the activations' type (half2 in fp16), unit roundoff u, in any order. Each of n terms rounds once, by at
    most u times a partial sum. Per element: such errors are independent, and no partial sum is larger than the sum of
    magnitudes M, so they stay below 3 sqrt(n) u M (Hoeffding; the worst of a million draws is 1.3) and never exceed n u M.
    Per channel: partial sums of mixed signs grow with the square root of their length, so that the errors' root mean
    square is about 0.8 u M whatever n is; twice u M allowed. That catches a lost term where the first cannot: one of
    the 60 terms of a 3x3 layer of 64 channels makes it 4 and more.
    """
    unit = UNIT[case.dtype]
    n = case.terms.reshape(1, -1, 1, 1).astype(np.float64)
    error = np.abs(y.astype(np.float64) - case.expected)
    allowed = np.minimum(n, 3 * np.sqrt(n)) * (unit * case.magnitudes + SMALLEST[case.dtype])
    wrong = ~(error <= allowed)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        return f"{case.name}: {wrong.sum()} of {wrong.size} wrong, first at {at}: {y[at]}, not {case.expected[at]}"
    shares = error / np.maximum(unit * case.magnitudes, SMALLEST[case.dtype])
    rms = np.sqrt((shares**2).mean((0, 2, 3)))
    if (rms > 2).any():
        return f"{case.name}: channel {int(rms.argmax())} is off by {rms.max():.1f} roundings (root mean square)"
    return ""


def element(dtype: Precision) -> type[np.float32] | type[np.float16]:
    """Numpy's type."""
    return np.float32 if dtype == "fp32" else np.float16


def _rounded(case: Case, dtype: Precision) -> Case:
    """The case with activations that `dtype` holds exactly."""
    x = case.x.astype(element(dtype)).astype(np.float64)
    residual = None if case.residual is None else case.residual.astype(element(dtype)).astype(np.float64)
    return Case(case.layer, case.weight, case.bias, x, residual)


def _data(number: int, dtype: Precision, batch: int) -> Case:
    g, chosen = GEOMETRIES[number % len(GEOMETRIES)], EPILOGUES[number]
    return _rounded(fill(g, chosen, int((1 - SPARSITY) * np.prod(g.weight_shape)), batch, 100 + number), dtype)


def _finished(name: str, node: SparseConv, dtype: Precision, case: Case) -> Prepared:
    g, e, weight, bias = node.geometry, node.epilogue, case.weight, case.bias
    if node.kernel != "baked":  # whose weights are in the PTX, which is left out here
        weight, bias = kernel_named(node.kernel).unpack(node)
    weight = weight.astype(element(dtype)).astype(np.float32)  # half kernels multiply by weights rounded to half
    magnitudes = conv2d(np.abs(case.x), np.abs(weight), None if bias is None else np.abs(bias), g)
    magnitudes += 0 if case.residual is None else np.abs(case.residual)
    return Prepared(
        name, node, dtype, case.x, case.residual,
        epilogue.apply(e, conv2d(case.x, weight, bias, g), case.residual), magnitudes,
        np.count_nonzero(weight.reshape(len(weight), -1), axis=1) + 3,
    )  # fmt: skip


def _cubins(nodes: list[SparseConv], arch: int) -> list[SparseConv]:
    """The nodes with the machine code of their PTX alone, so that no driver compiles while a GPU is waiting."""
    made = assemble_many([(node.images[0].data, arch) for node in nodes])
    return [
        replace(node, images=(Image(arch, node.precision, "cubin", one.cubin),))
        for node, one in zip(nodes, made, strict=True)
    ]


def _stored(name: str) -> SparseConv | list[SparseConv] | None:
    path = Path(FOLDER or "", f"{name}.xz")
    if not FOLDER or not path.is_file():
        return None
    found: SparseConv | list[SparseConv] = pickle.loads(lzma.decompress(path.read_bytes()))
    return found


Key = tuple[str, int, Precision, int]
"""Kernel, number of geometry and epilogue, type, batch."""
KEYS: tuple[Key, ...] = tuple(
    (kernel, number, dtype, batch)
    for kernel in ("baked", "csr", "packed")
    for number in NUMBERS
    for dtype in DTYPES
    for batch in BATCHES
)


@cache
def singles(target: str) -> dict[Key, Prepared | None]:
    """All cases of one layer; None where the kernel does not run it on the device."""
    with _pool() as pool:
        return dict(zip(KEYS, pool.map(_single, [(target, key) for key in KEYS]), strict=True))


def _pool() -> ProcessPoolExecutor:
    """Processes started anew, not forked: this one may hold a CUDA context."""
    return ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn"))


def _single(job: tuple[str, Key]) -> Prepared | None:
    target, (kernel, number, dtype, batch) = job
    case, device = _data(number, dtype, batch), find(target)
    if kernel_named(kernel).supports(case.layer, device, dtype) is not None:
        return None
    node = _stored(_name(kernel, number, dtype, batch)) or _built(kernel, device, number, dtype, batch)
    assert isinstance(node, SparseConv)
    title = f"{kernel} {number}: {case.layer.epilogue.describe()} {dtype} N={batch}"
    return _finished(title, node, dtype, case)


def _name(kernel: str, number: int, dtype: Precision, batch: int) -> str:
    return f"{kernel}-{number}-{dtype}-{batch}"


def _built(kernel: str, device: Device, number: int, dtype: Precision, batch: int) -> SparseConv:
    case = _data(number, dtype, batch)
    options = BuildOptions(dtype, batch, (device.sm,))
    built = kernel_named(kernel).build(case.layer, case.weight, case.bias, device, {}, options)
    return _cubins([built.node], device.sm)[0]


def network_nodes(kernel: str, dtype: Precision, target: str) -> list[SparseConv]:
    """Every layer of a ResNet-18 at 224x224 that one kernel runs, as `convert` makes them for batch 1."""
    if (found := _stored(f"resnet18-{kernel}-{dtype}")) is not None:
        assert isinstance(found, list)
        return found
    import tempfile

    import onnx

    from sparsedeploy.convert import Request, convert
    from sparsedeploy.converters.load import load
    from sparsedeploy.converters.rewrite import read_nodes
    from sparsedeploy.models.sparsity import pruned

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "resnet18.onnx")
        onnx.save(pruned("resnet18", SPARSITY), model)
        # conv1 has weights that fp16 holds as subnormal numbers only: kept dense there.
        rules = ("*=dense", f"*={kernel}", *(("conv1=dense",) if dtype == "fp16" else ()))
        convert(Request(model, find(target), Path(folder, "out"), dtype, layers=rules))
        nodes = list(read_nodes(load(Path(folder, "out", "model.sparse.onnx"))).values())
    return _cubins(nodes, find(target).sm)


def _network_layer(job: tuple[int, SparseConv, Precision, SparseConv]) -> Prepared:
    number, node, dtype, exact = job
    rng = np.random.default_rng(number)
    g = node.geometry
    x = rng.standard_normal((1, g.ic, g.h, g.w))
    residual = rng.standard_normal((1, g.oc, g.oh, g.ow)) if node.has_residual else None
    weight, bias = kernel_named("csr").unpack(exact)
    case = Case(layer_of(g, weight, node.epilogue), weight, bias, x, residual)
    return _finished(f"{node.layer} {node.kernel} {dtype}", node, dtype, _rounded(case, dtype))


@cache
def network(kernel: str, dtype: Precision, target: str) -> list[Prepared]:
    """The same with data; the weights of `csr`, which are the model's own, are those of `baked`."""
    exact = {node.layer: node for node in network_nodes("csr", "fp32", target)}
    nodes = network_nodes(kernel, dtype, target)
    jobs = [(number, node, dtype, exact[node.layer]) for number, node in enumerate(nodes)]
    with _pool() as pool:
        return list(pool.map(_network_layer, jobs))


def _make(job: tuple[Path, str, Device, str, int, Precision, int]) -> int:
    folder, name, device, kernel, number, dtype, batch = job
    target = folder / f"{name}.xz"
    if target.exists():
        return 0
    if number < 0:
        made: SparseConv | list[SparseConv] = network_nodes(kernel, dtype, device.name)
    elif kernel_named(kernel).supports(_data(number, dtype, batch).layer, device, dtype) is not None:
        return 0
    else:
        made = _built(kernel, device, number, dtype, batch)
    target.write_bytes(lzma.compress(pickle.dumps(made)))
    return target.stat().st_size


def main() -> None:
    """Make all nodes into a folder; what lies there already is kept."""
    parser = argparse.ArgumentParser(description="Nodes for the gpu tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="h200")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    device = find(asked.target)
    jobs = [(asked.folder, f"resnet18-{kernel}-{dtype}", device, kernel, -1, dtype, 1) for kernel, dtype in NETWORKS]
    jobs += [(asked.folder, _name(*key), device, *key) for key in KEYS]
    with ProcessPoolExecutor(2) as pool:
        for job, size in zip(jobs, pool.map(_make, jobs), strict=True):
            print(job[1], size, flush=True)


if __name__ == "__main__":
    main()
