"""What tests share: where the real and minimal model files are, when this machine has them."""

from __future__ import annotations

import os
from pathlib import Path

_candidate = Path(os.environ.get("SPARSEDEPLOY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
SHARED: Path | None = _candidate if _candidate.is_dir() else None
"""Folder with cases/, models/ and data/; tests that need it skip when it is None."""
