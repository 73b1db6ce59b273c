"""Explore baked's configurations on a GPU: check each against float64, then time it by CUDA-graph replay beside cuDNN.

`prepare` needs sparsedeploy and no GPU: it writes PTX (or CUDA C++ made PTX), weights and launches to a folder. `run`
needs torch and a driver, not sparsedeploy: it assembles what is missing, checks, times and prints a table. So the folder
can be made on one machine and measured on another. The work list with all kernels: scripts/bench_kernels.py.

    python scripts/lab/bench_baked.py prepare FOLDER [--only TEXT]
    python scripts/lab/bench_baked.py run FOLDER --out results.json [--cudnn]
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from raw_driver import Driver

TOLERANCE = {"fp32": 1e-6, "hf": 1e-3, "h2": 6e-3}
"""Largest relative L2 error against float64: rounding of the sums, for fp16 also of input, output and half2 sums."""


# ---------------------------------------------------------------- run
def time_us(call: Callable[[], None], launches: int = 20, repeats: int = 9) -> tuple[float, float]:
    """Median and spread (max - min) in microseconds of one call inside a replayed graph."""
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
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return float(np.median(times)), float(max(times) - min(times))


def assemble(path: Path, arch: int) -> tuple[bytes, float, str]:
    """Cubin, seconds and log of NAME.ptx.gz, or NAME.cubin when it lies there."""
    cubin = path.with_suffix("").with_suffix(".cubin")
    if cubin.exists():
        return cubin.read_bytes(), 0.0, ""
    ptxas = os.environ.get("PTXAS") or shutil.which("ptxas")
    if ptxas is None:
        raise RuntimeError(f"no {cubin} and no ptxas: set PTXAS or run `prepare` with --assemble")
    source = path.with_suffix("")
    source.write_bytes(gzip.decompress(path.read_bytes()))
    start = time.monotonic()
    done = subprocess.run([ptxas, "-v", "-O3", f"-arch=sm_{arch}", source, "-o", cubin], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}: {done.stderr[:2000]}")
    return cubin.read_bytes(), time.monotonic() - start, done.stderr


def dense_us(geometry: dict[str, Any], n: int) -> dict[str, float]:
    """By cuDNN with full search: best of NCHW and NHWC, layouts converted outside the timing."""
    import torch
    from torch.nn import functional

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 0
    g = geometry
    x = torch.randn(n, g["ic"], g["h"], g["w"], device="cuda")
    w = torch.randn(g["oc"], g["ic"] // g["group"], g["kh"], g["kw"], device="cuda") / np.sqrt(
        g["ic"] * g["kh"] * g["kw"] / g["group"]
    )
    if g["pads"][:2] != g["pads"][2:]:
        x = functional.pad(x, (g["pads"][1], g["pads"][3], g["pads"][0], g["pads"][2]))
        padding: Any = 0
    else:
        padding = tuple(g["pads"][:2])

    def best(a: Any, b: Any) -> float:
        found = []
        for layout in (torch.contiguous_format, torch.channels_last):
            ai, bi = a.contiguous(memory_format=layout), b.contiguous(memory_format=layout)

            def call(ai: Any = ai, bi: Any = bi) -> None:
                functional.conv2d(ai, bi, None, tuple(g["stride"]), padding, tuple(g["dilation"]), g["group"])

            found.append(time_us(call)[0])
        return min(found)

    result = {}
    for name, tf32, half in (("fp32", False, False), ("tf32", True, False), ("fp16", False, True)):
        torch.backends.cudnn.allow_tf32 = tf32
        result[name] = best(x.half() if half else x, w.half() if half else w)
    torch.backends.cudnn.allow_tf32 = False
    return result


def reference(job: dict[str, Any], x: Any, w: Any, bias: Any, residual: Any) -> Any:
    """The layer in float64 by torch."""
    import torch
    from torch.nn import functional

    g, e = job["geometry"], job["epilogue"]
    top, left, bottom, right = g["pads"]
    y = functional.conv2d(
        functional.pad(x.double(), (left, right, top, bottom)),
        w.double(),
        bias,
        tuple(g["stride"]),
        0,
        tuple(g["dilation"]),
        g["group"],
    )
    if e["residual"] == "before_activation":
        y = y + residual.double()
    if e["activation"] == "relu":
        y = torch.relu(y)
    elif e["activation"] == "clip":
        y = y.clamp(e["low"], e["high"])
    elif e["activation"] == "leaky_relu":
        y = functional.leaky_relu(y, e["slope"])
    return y + residual.double() if e["residual"] == "after_activation" else y


class Bench:
    """One job on the device."""

    def __init__(self, driver: Driver, job: dict[str, Any], weight: np.ndarray, image: bytes) -> None:
        import torch

        self.driver, self.job, self.torch = driver, job, torch
        self.weight = torch.from_numpy(weight).cuda()
        module = driver.load(image)
        self.functions = {op["entry"]: driver.function(module, op["entry"], op["shared"]) for op in job["ops"]}
        self.clusters = [driver.clusters(self.functions[op["entry"]], op) for op in job["ops"] if op["cluster"] > 1]
        self.dtype = torch.float32 if job["dtype"] == "fp32" else torch.float16

    def measure(self, n: int, timed: bool = True) -> dict[str, float]:
        """Error and time at batch n; raises when the error is too large or two runs differ in a bit."""
        torch, g, job = self.torch, self.job["geometry"], self.job
        torch.manual_seed(n + 17)
        x = torch.randn(n, g["ic"], g["h"], g["w"], device="cuda").to(self.dtype)
        oh, ow = job["out"]
        y = torch.full((n, g["oc"], oh, ow), float("nan"), device="cuda", dtype=self.dtype)
        residual = torch.randn_like(y) if job["epilogue"]["residual"] != "none" else None
        if residual is not None:
            residual = torch.randn(y.shape, device="cuda").to(self.dtype)
        bias = torch.from_numpy(np.array(job["bias"])).cuda().double() if job["bias"] else None
        workspace = torch.full((max(16, job["workspace"][str(n)]),), 255, device="cuda", dtype=torch.uint8)
        pointers = {"input": x, "output": y, "residual": residual, "workspace": workspace}
        prepared = []
        for op in job["ops"]:
            values = [
                ctypes.c_uint32(n) if kind == "N" else ctypes.c_uint64(pointers[kind].data_ptr() + index)
                for kind, index in op["args"]
            ]
            prepared.append((self.functions[op["entry"]], op, op["grid"][str(n)], values))

        def call() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for function, op, grid, values in prepared:
                self.driver.launch(function, op, grid, values, stream)

        call()
        torch.cuda.synchronize()
        first = y.clone()
        want = reference(job, x, self.weight, bias, residual)
        error = float(((first.double() - want).norm() / want.norm().clamp_min(1e-30)).item())
        if not error < TOLERANCE[job["sums"]]:
            raise RuntimeError(f"relative error {error:.2e} against float64, allowed {TOLERANCE[job['sums']]:.0e}")
        y.fill_(float("nan"))
        call()
        torch.cuda.synchronize()
        if not torch.equal(first, y):
            raise RuntimeError("two runs differ")
        if not timed:
            return {"error": error}
        us, spread = time_us(call)
        call()
        torch.cuda.synchronize()
        if not torch.equal(first, y):
            raise RuntimeError("the result changed while it was timed")
        return {"error": error, "us": us, "spread_us": spread}


def floors_us() -> dict[str, float]:
    """What nothing can beat: an empty kernel's share of a graph, and the copy rate."""
    import torch

    tiny = torch.zeros(1, device="cuda")
    big = torch.randn(1 << 28, device="cuda")
    other = torch.empty_like(big)
    copy = time_us(lambda: torch.add(big, 1.0, out=other), 5)[0]
    return {"one_element_kernel_us": time_us(lambda: tiny.zero_())[0], "copy_gbs": 2 * big.numel() * 4 / copy / 1e3}


def run(folder: Path, out: Path | None, cudnn: bool, only: str, profile: bool) -> int:
    """Check and time every job of a folder; returns the number of failures."""
    jobs = [job for job in json.loads((folder / "jobs.json").read_text()) if only in job["name"]]
    driver = Driver()
    import torch

    torch.zeros(1, device="cuda")
    results: list[dict[str, Any]] = []
    dense: dict[str, dict[str, float]] = {}
    failures = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        files = sorted({job["file"] for job in jobs}, key=lambda f: -(folder / f).stat().st_size)
        images: dict[str, Future[tuple[bytes, float, str]]] = {
            file: pool.submit(assemble, folder / file, 90) for file in files
        }
        header = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            **floors_us(),
        }
        print(header, flush=True)
        for job in sorted(jobs, key=lambda job: (folder / job["file"]).stat().st_size):
            weight = np.load(folder / job["weight"])["w"]
            try:
                image, seconds, log = images[job["file"]].result()
                bench = Bench(driver, job, weight, image)
            except RuntimeError as error:
                print(f"FAIL {job['name']}: {error}", flush=True)
                failures += 1
                continue
            used = [line.split("Used ")[1].split(" ")[0] for line in log.splitlines() if "Used " in line]
            spilled = sum(
                int(line.split(" bytes spill stores")[0].split(",")[-1])
                for line in log.splitlines()
                if "spill stores" in line
            )
            for n in job["batches"]:
                try:
                    row: dict[str, Any] = {
                        "name": job["name"],
                        "layer": job["layer"],
                        "n": n,
                        **bench.measure(n, not profile),
                    }
                except RuntimeError as error:
                    print(f"FAIL {job['name']} N={n}: {error}", flush=True)
                    failures += 1
                    if "illegal" in str(error) or "misaligned" in str(error):
                        return failures
                    continue
                if cudnn:
                    key = f"{job['geometry']} {n}"
                    if key not in dense:
                        dense[key] = dense_us(job["geometry"], n)
                    row["cudnn_us"] = dense[key]
                row |= {
                    "registers": ",".join(used),
                    "spill_bytes": spilled,
                    "ptxas_s": round(seconds, 1),
                    "clusters_at_once": bench.clusters,
                    "predicted": job.get("predicted", {}).get(str(n)),
                }
                results.append(row)
                ratio = (
                    " ".join(f"{k} {v:.1f}us {v / row['us']:.2f}x" for k, v in row.get("cudnn_us", {}).items())
                    if "us" in row
                    else ""
                )
                print(
                    f"{job['name']:44s} N={n:3d} {row.get('us', 0):8.2f} us +-{row.get('spread_us', 0):.2f} err {row['error']:.1e} reg {row['registers']} spill {spilled} pred {row['predicted']} cl {bench.clusters} {ratio}",
                    flush=True,
                )
    if out:
        out.write_text(json.dumps({"header": header, "rows": results}, indent=1))
    return failures


# ---------------------------------------------------------------- prepare
class Case(NamedTuple):
    """One layer to measure: (name, geometry, weight, batches)."""

    name: str
    geometry: Any
    weight: np.ndarray
    batches: tuple[int, ...]


def cases(
    lists: Sequence[str], sparsities: Sequence[float], batches: Sequence[int], filters: Path | None
) -> Iterator[Case]:
    """The work lists with magnitude-pruned random weights, then real filters where their folder is given."""
    from sparsedeploy.layer import Geometry
    from sparsedeploy.models.shapes import work
    from sparsedeploy.models.sparsity import magnitude

    for entry in work(*lists) if lists else ():
        g = entry.geometry
        dense = np.random.default_rng(0).standard_normal(g.weight_shape).astype(np.float32)
        for sparsity in sparsities or entry.sparsities:
            weight = magnitude(dense, sparsity) / np.float32(np.sqrt(g.ic // g.group * g.kh * g.kw * (1 - sparsity)))
            yield Case(f"{entry.name}/{sparsity:g}", g, weight, tuple(batches) or entry.batches)
    if filters is not None:
        for file in sorted(filters.glob("resnet50_3x3_*.npz")):
            for key, array in sorted(np.load(file).items()):
                c, side = array.shape[0], 3584 // array.shape[0]
                g = Geometry(oc=c, ic=array.shape[1], kh=3, kw=3, h=side, w=side, pads=(1, 1, 1, 1))
                yield Case(f"real {c}@{side}/{key.rpartition('s')[2]}", g, array, tuple(batches) or (1, 32))


def prepare(
    folder: Path,
    found: Iterator[Case],
    precisions: Sequence[Literal["fp32", "fp16"]],
    top: int,
    extra: Mapping[str, list[dict[str, int]]],
    assembled: bool,
) -> None:
    """Write the `top` configurations predicted fastest of every case, batch and precision, and those of `extra`.

    `extra` maps "name precision batch" to further configurations.
    """
    from sparsedeploy.devices import find
    from sparsedeploy.layer import ConvLayer, Epilogue, Zeros
    from sparsedeploy.plugins.baked import BAKED
    from sparsedeploy.plugins.kernel import BuildOptions
    from sparsedeploy.plugins.launch import Launch, choose

    device = find("h200")
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[dict[str, Any]] = []
    for number, case in enumerate(found):
        g, weight = case.geometry, case.weight
        np.savez_compressed(folder / f"w{number}.npz", w=weight)
        per = (weight != 0).reshape(len(weight), -1).sum(1)
        zeros = Zeros(
            nnz=int(per.sum()), total=weight.size, nnz_per_channel=(int(per.min()), float(np.median(per)), int(per.max())),
            empty_filters=int((per == 0).sum()), empty_inputs=0, near_zero=0, two_four=False, sparsity=1 - float((weight != 0).mean()),
        )  # fmt: skip
        layer = ConvLayer(
            name=case.name, weight="w", dtype="fp32", shape=weight.shape, geometry=g, zeros=zeros, epilogue=Epilogue()
        )
        for precision, n in [(p, n) for p in precisions for n in case.batches]:
            ranked: list[tuple[dict[str, int], float | None]] = [
                (config, prediction.us) for config, prediction in BAKED.configs(layer, device, precision, n)[:top]
            ]
            ranked += [(config, None) for config in extra.get(f"{case.name} {precision} {n}", [])]
            for config, predicted in ranked:
                built = BAKED.build(layer, weight, None, device, config, BuildOptions(precision, n, (90,), assembled))
                variant = choose(built.node.plan, precision, n)
                assert variant is not None
                sizes = {"N": n, "H": g.h, "W": g.w, "OH": g.oh, "OW": g.ow}
                file = f"k{len(jobs)}.ptx.gz"
                (folder / file).write_bytes(gzip.compress(built.node.images[0].data, 6, mtime=0))
                if assembled:
                    (folder / f"k{len(jobs)}.cubin").write_bytes(built.node.images[1].data)
                ops = [
                    {
                        "entry": op.entry, "grid": {str(n): [size.value(sizes) for size in op.grid]}, "block": op.block,
                        "shared": op.shared_bytes, "cluster": op.cluster, "dependent": op.dependent,
                        "args": [[arg.kind, arg.index] for arg in op.args],
                    }
                    for op in variant.ops
                    if isinstance(op, Launch)
                ]  # fmt: skip
                sums = "fp32" if precision == "fp32" else "hf" if config.get("sums") == 32 else "h2"
                brief = " ".join(
                    f"{key}={value}" for key, value in config.items() if value and (key, value) not in _DULL
                )
                jobs.append({
                    "name": f"{case.name} {sums} {brief}", "layer": case.name, "file": file, "weight": f"w{number}.npz",
                    "geometry": g.model_dump(), "out": [g.oh, g.ow], "epilogue": layer.epilogue.model_dump(), "bias": None,
                    "dtype": precision, "sums": sums, "batches": [n], "ops": ops, "config": config,
                    "workspace": {str(n): variant.workspace.value(sizes)}, "predicted": {str(n): predicted},
                })  # fmt: skip
                print(jobs[-1]["name"], n, predicted, flush=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))


_DULL = {("mates", 1), ("rows", 1), ("splits", 1), ("min_blocks", 1), ("sums", 16)}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="what", required=True)
    make = sub.add_parser("prepare")
    make.add_argument("folder", type=Path)
    make.add_argument(
        "--list", action="append", default=[], help="a work list or list/name of sparsedeploy.models.shapes"
    )
    make.add_argument("--sparsity", action="append", type=float, default=[])
    make.add_argument("--batch", action="append", type=int, default=[])
    make.add_argument("--precision", action="append", default=[], choices=["fp32", "fp16"])
    make.add_argument("--filters", type=Path, help="folder of real pruned filters (*.npz)")
    make.add_argument("--top", type=int, default=3)
    make.add_argument("--extra", type=Path, help="JSON of further configurations by 'name precision batch'")
    make.add_argument("--assemble", action="store_true")
    go = sub.add_parser("run")
    go.add_argument("folder", type=Path)
    go.add_argument("--out", type=Path)
    go.add_argument("--cudnn", action="store_true")
    go.add_argument("--only", default="")
    go.add_argument("--profile", action="store_true", help="check only, for use under a profiler")
    options = parser.parse_args()
    if options.what == "run":
        return min(1, run(options.folder, options.out, options.cudnn, options.only, options.profile))
    extra = json.loads(options.extra.read_text()) if options.extra else {}
    found = cases(options.list, options.sparsity, options.batch, options.filters)
    prepare(options.folder, found, options.precision or ["fp32", "fp16"], options.top, extra, options.assemble)
    return 0


if __name__ == "__main__":
    sys.exit(main())
