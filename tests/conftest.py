"""What tests share: where the real and minimal model files are, when this machine has them."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime

OLD_ONNXRUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < (1, 24)
"""The last ONNX Runtime for Python 3.10 is 1.23: it lacks the newest operators, and its own shape inference aborts the
process on some damaged models."""

_candidate = Path(os.environ.get("SPARSEDEPLOY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
SHARED: Path | None = _candidate if _candidate.is_dir() else None
"""Folder with cases/, models/ and data/; tests that need it skip when it is None."""
