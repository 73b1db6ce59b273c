"""`sparsedeploy prune`: a dense file in, a test file with zeros out."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.prune import PruneReport, prune
from sparsedeploy.errors import InputError, MachineError

METHODS = ("magnitude-global", "magnitude-layer", "random", "n:m")


def prune_file(model: Path, out: Path, sparsity: str, method: str, layers: tuple[str, ...], seed: int) -> PruneReport:
    """Prune `model` into `out`; raises InputError for a bad sparsity, method, layer name or output."""
    if method not in METHODS:
        raise InputError(f"--method {method}: needed one of {', '.join(METHODS)}.")
    share, pattern = _sparsity(sparsity, method)
    if out.resolve() == model.resolve():
        raise InputError(f"-o {out}: is the input itself; choose another name.")
    if out.is_dir():
        raise InputError(f"-o {out}: is a folder; name the ONNX file to write.")
    loaded = load(model)
    fold_constants(loaded)
    report = prune(loaded, share, pattern, layers, seed)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            for path in save(loaded, Path(folder) / out.name):
                os.replace(path, out.parent / path.name)
    except OSError as error:
        raise MachineError(f"-o {out}: cannot be written ({error.strerror}). Choose a place you may write.") from error
    return report


def _sparsity(text: str, method: str) -> tuple[float, str]:
    if method == "n:m":
        found = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", text)
        n, m = (int(part) for part in found.groups()) if found else (0, 0)
        if 0 < n < m:
            return 1 - n / m, text
        raise InputError(f"--sparsity {text}: with --method n:m it is N:M with 0 < N < M, as in 2:4.")
    try:
        share = float(text)
    except ValueError:
        share = float("nan")
    if not 0 <= share < 1:
        raise InputError(f"--sparsity {text}: needed a number from 0 to below 1, as in 0.9.")
    return share, method
