"""How long and how much memory a ResNet-50 takes to scan and convert on this machine, against the limits.

Usage: python scripts/bench_convert.py [--target a100] [--sparsity 0.9] [--folder DIR]

Each command runs in a process of its own; wall seconds, CPU seconds and peak resident memory are those of that process
(getrusage of the child). Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import onnx

from sparsedeploy.models.networks import build
from sparsedeploy.models.sparsity import pruned

CONVERT_SECONDS, CONVERT_GB, SCAN_SECONDS = 60.0, 3.0, 2.0
NETWORK = "resnet50"


@dataclass(frozen=True)
class Run:
    """One command, measured."""

    label: str
    wall_s: float
    cpu_s: float
    peak_gb: float
    limit_s: float
    limit_gb: float

    @property
    def fits(self) -> bool:
        """Whether it stayed within both limits."""
        return self.wall_s <= self.limit_s and self.peak_gb <= self.limit_gb


def measure(label: str, words: list[str], limit_s: float, limit_gb: float) -> Run:
    """Run `sparsedeploy WORDS` and take its wall and CPU time and its peak memory; raises when it fails."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "sparsedeploy.cli", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"sparsedeploy {' '.join(words)} ended with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    peak = usage.ru_maxrss * unit / 1e9
    return Run(label, wall, usage.ru_utime + usage.ru_stime, peak, limit_s, limit_gb)


def write_models(folder: Path, sparsity: float) -> tuple[Path, Path]:
    """The pruned network with BatchNormalization folded, and the dense one with it unfolded."""
    sparse, dense = folder / f"{NETWORK}-{sparsity:.0%}.onnx", folder / f"{NETWORK}-dense-bn.onnx"
    onnx.save(pruned(NETWORK, sparsity), sparse)
    onnx.save(build(NETWORK, with_batchnorm=True), dense)
    return sparse, dense


def runs(folder: Path, target: str, sparsity: float) -> list[Run]:
    """Scan both files, then convert and verify the pruned one, by plan and forced."""
    # In a process of its own: a child's peak memory on Linux starts with what its parent held when it forked.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        sparse, dense = pool.submit(write_models, folder, sparsity).result()
    base = ["convert", str(sparse), "--target", target]
    done = [
        measure(f"scan {path.name}", ["scan", str(path), "--target", target], SCAN_SECONDS, CONVERT_GB)
        for path in (sparse, dense)
    ]
    forced = ["--layer", "*=sparse"]
    for label, words in (("by plan", []), ("forced", forced), ("forced, fp16", [*forced, "--precision", "fp16"])):
        out = ["-o", str(folder / label.replace(", ", "-").replace(" ", "-"))]
        done.append(measure(f"convert {label}", [*base, *words, *out], CONVERT_SECONDS, CONVERT_GB))
    done.append(measure("verify forced", ["verify", str(folder / "forced")], CONVERT_SECONDS, CONVERT_GB))
    return done


def main() -> int:
    """Print the table; 1 when a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="a100")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    print(f"{NETWORK} at {options.sparsity:.0%}, {options.target}; {os.cpu_count()} cores, {platform.machine()}{load}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = runs(folder, options.target, options.sparsity)
    width = max(len(run.label) for run in done)
    print(f"{'command':{width}}  wall s  CPU s  limit s  peak GB  limit GB")
    for run in done:
        verdict = "" if run.fits else "  over the limit"
        print(
            f"{run.label:{width}}  {run.wall_s:6.2f} {run.cpu_s:6.2f} {run.limit_s:8.0f} {run.peak_gb:8.2f} {run.limit_gb:9.0f}{verdict}"
        )
    return 0 if all(run.fits for run in done) else 1


if __name__ == "__main__":
    sys.exit(main())
