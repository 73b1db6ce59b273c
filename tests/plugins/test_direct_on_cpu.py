"""direct.cu compiled as C++ by the system's compiler and run with a thread per CUDA thread, against float64.

The same source that NVRTC compiles, past NVRTC and past the PTX interpreter: what these agree on, the source says.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conv_cases import EPILOGUES, Case, fill
from numpy.typing import NDArray

from sparsedeploy.devices import find
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins import direct, epilogue, kernel_named
from sparsedeploy.plugins.csr import CSR
from sparsedeploy.plugins.direct import Tiling
from sparsedeploy.plugins.kernel import BuildOptions
from sparsedeploy.plugins.packed import PACKED
from sparsedeploy.plugins.reference import conv2d

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SHIM = Path(__file__).with_name("cuda_shim.h")
TAIL = """
extern "C" void shim_run(const int* grid, int shared_bytes, void** a, int n, int h, int w) {
  shim_grid(grid, THREADS, shared_bytes, [=] {
    int k = 0;
    const element* x = (const element*)a[k++];
    element* y = (element*)a[k++];
#if RESIDUAL
    const element* residual = (const element*)a[k++];
#endif
    const int* table = (const int*)a[k++];
    const u32* words = (const u32*)a[k++];
#if CSR
    const u32* values = (const u32*)a[k++];
#endif
#if BIAS
    const float* bias = (const float*)a[k++];
#endif
    direct(x, y,
#if RESIDUAL
           residual,
#endif
           table, words,
#if CSR
           values,
#endif
#if BIAS
           bias,
#endif
           n, h, w);
  });
}
"""


def compile_shim(text: str, folder: Path) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    source, library = folder / "direct.cpp", folder / "direct.so"
    source.write_text(f'#include "{SHIM}"\n{text}{TAIL}')
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "error: 'barrier'" in result.stderr or "barrier: No such file" in result.stderr:
        pytest.skip(f"{COMPILER} knows no std::barrier")
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))


def run_on_cpu(name: str, case: Case, precision: Precision, tiling: Tiling, folder: Path) -> NDArray[np.float64]:
    g, fmt = case.geometry, "csr" if name == "csr" else "packed"
    bare = kernel_named(name).build(case.layer, case.weight, case.bias, find("a100"), {}, BuildOptions(precision)).node
    places = (CSR if fmt == "csr" else PACKED).places(bare)
    table, stages, capacity = direct.make_table(tiling, fmt, places)
    library = compile_shim(direct.source(tiling, fmt, case.layer.epilogue, precision, stages, capacity), folder)
    element = np.float32 if precision == "fp32" else np.float16
    n = len(case.x)
    y = np.full((n, g.oc, g.oh, g.ow), np.nan, element)
    constants = bare.constants
    arrays = [case.x.astype(element), y]
    if case.residual is not None:
        arrays.append(case.residual.astype(element))
    arrays += [table, *(constants[1:3] if fmt == "csr" else constants[:1])]
    if case.bias is not None:
        arrays.append(constants[-1])
    pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    blocks = direct.blocks_of_channels(tiling, places)
    sizes = {"N": n, "OH": g.oh, "OW": g.ow}
    grid = (ctypes.c_int * 3)(*[size.value(sizes) for size in tiling.grid(len(blocks))])
    library.shim_run(grid, tiling.shared_bytes(stages, capacity), pointers, n, g.h, g.w)
    return y.astype(np.float64)


SAME = Geometry(oc=10, ic=9, kh=3, kw=3, h=9, w=8, pads=(1, 1, 1, 1))
STRIDED = Geometry(oc=6, ic=4, kh=5, kw=3, h=13, w=12, pads=(2, 1, 0, 2), stride=(2, 2), dilation=(1, 2), group=2)
ODD = Geometry(oc=6, ic=32, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
UNEVEN = Geometry(oc=5, ic=6, kh=3, kw=2, h=6, w=6, pads=(0, 1, 1, 0))
ROUNDING = {"fp32": 8 * 2.0**-24, "fp16": 8 * 2.0**-11}


@pytest.mark.parametrize(
    ("name", "precision", "tiling", "epilogue_number"),
    [
        ("packed", "fp32", Tiling(SAME, 2, 2, 5, 8, 1, 2, 2, 1, 4), 2),
        ("csr", "fp32", Tiling(STRIDED, 1, 2, 2, 6, 1, 2, 2, 1, 2), 3),
        ("packed", "fp16", Tiling(SAME, 1, 2, 5, 8, 1, 2, 4, 1, 3, "images"), 4),
        ("csr", "fp16", Tiling(SAME, 1, 2, 3, 8, 1, 2, 4, 1, 9, "rows"), 1),
        ("packed", "fp16", Tiling(ODD, 4, 1, 7, 7, 1, 2, 2, 1, 16, "images"), 2),  # two batches of loads a stage
        ("csr", "fp16", Tiling(ODD, 1, 2, 4, 7, 1, 2, 3, 1, 8, "images"), 4),
        ("csr", "fp16", Tiling(UNEVEN, 2, 1, 5, 6, 1, 3, 2, 1, 4, "images"), 1),
    ],
    ids=["packed-fp32", "csr-strided", "packed-image-pairs", "csr-row-pairs", "packed-runs", "csr-runs", "uneven-runs"],
)
def test_source_runs_as_cpp(
    name: str, precision: Precision, tiling: Tiling, epilogue_number: int, tmp_path: Path
) -> None:
    case = fill(tiling.geometry, EPILOGUES[epilogue_number], 120, 3, 11)
    element = np.float32 if precision == "fp32" else np.float16
    weight = (
        case.weight.astype(np.float16).astype(np.float32) if name == "packed" or precision == "fp16" else case.weight
    )
    x = case.x.astype(element)
    residual = None if case.residual is None else case.residual.astype(element)
    expected = epilogue.apply(case.layer.epilogue, conv2d(x, weight, case.bias, case.geometry), residual)
    magnitude = conv2d(np.abs(x), np.abs(weight), None if case.bias is None else np.abs(case.bias), case.geometry)
    magnitude += 0 if residual is None else np.abs(residual.astype(np.float64))
    got = run_on_cpu(name, case, precision, tiling, tmp_path)
    assert (np.abs(got - expected) <= ROUNDING[precision] * magnitude + 1e-7).all()


def test_which_tiles_are_read_in_runs() -> None:
    assert Tiling(ODD, 4, 1, 7, 7, stage=16, pairs="images").flat
    assert Tiling(UNEVEN, 2, 1, 5, 6, stage=4, pairs="images").flat
    assert not Tiling(ODD, 4, 1, 7, 7, sets=24, slots=3, stage=16, pairs="images").flat  # too few registers
    assert not Tiling(ODD, 4, 1, 7, 7, stage=12, pairs="images").flat  # runs would start inside of 16 bytes
    assert not Tiling(ODD, 1, 1, 4, 7, stage=16, pairs="rows").flat
    assert not Tiling(ODD, 1, 1, 4, 7, stage=16, pairs="images").flat  # half of the map


def test_halves_round_as_numpy_does(tmp_path: Path) -> None:
    text = 'extern "C" unsigned to_half(float f) { return float_to_half(f); }\nextern "C" float from_half(unsigned h) { return half_to_float(h); }\n'
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    (tmp_path / "half.cpp").write_text(f'#include "{SHIM}"\n{text}')
    subprocess.run(
        [COMPILER, "-std=c++20", "-shared", "-fPIC", "-o", str(tmp_path / "half.so"), str(tmp_path / "half.cpp")],
        check=True,
    )
    library = ctypes.CDLL(str(tmp_path / "half.so"))
    library.to_half.argtypes, library.from_half.restype = [ctypes.c_float], ctypes.c_float
    every = np.arange(65536, dtype=np.uint16)
    finite = every[np.isfinite(every.view(np.float16))]
    values = finite.view(np.float16).astype(np.float32)
    assert [library.from_half(int(h)) for h in finite[::37]] == values[::37].tolist()
    rng = np.random.default_rng(0)
    drawn = np.concatenate(
        [rng.standard_normal(500) * 2.0 ** rng.integers(-30, 18, 500), values[::611], [65519.9, 65520.0, 2.0**-25]]
    )
    with np.errstate(over="ignore"):
        wanted = drawn.astype(np.float32).astype(np.float16).view(np.uint16).tolist()
    assert [library.to_half(float(np.float32(v))) for v in drawn] == wanted
