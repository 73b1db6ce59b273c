"""Imports go one way, and the heavy ones stay where they belong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Who may import whom: each layer may import itself and every layer named before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("record",),
    ("layer", "statistics", "gpu_state"),
    ("devices",),
    ("gpu",),
    ("roofline",),
    ("plugins",),
    ("converters",),
    ("models",),
    ("two_four",),
    ("reading",),
    ("scan",),
    ("profile",),
    ("plan",),
    ("candidate_build",),
    ("code",),
    ("verify",),
    ("figures",),
    ("report",),
    ("bundle",),
    ("engine_build",),
    ("engine_file",),
    ("engine_run",),
    ("engine", "trtexec"),
    ("triton",),
    ("target_folder",),
    ("build",),
    ("convert", "pruning"),
    ("reverify",),
    ("cuda_stream", "max_pool"),
    ("torch_operators",),
    ("runtime", "torch_forms", "torch_program", "torch_runner", "onnxruntime_runner", "engine_runner"),
    ("images",),
    ("run",),
    ("doctor",),
    ("stage",),
    ("torch_stage",),
    ("timing", "results"),
    ("bench_figures",),
    ("bench_report",),
    ("bench", "bench_files"),
    ("compare", "sweep"),
    ("tuning",),
    ("selection",),
    ("tune",),
    ("tune_command",),
    ("whatif",),
    ("bench_command",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FOLDERS = {"deploy": "sparsedeploy", "plugins": "sparsedeploy.plugins", "converters": "sparsedeploy.converters"}
GROUPS = ("engines", "measure", "runners")
"""Folders in deploy/: their modules have a place of their own in LAYERS."""
ONLY = {
    "torch": {
        "converters/torch_model.py",
        "deploy/runners/torch_operators.py",
        "deploy/runners/torch_runner.py",
        "deploy/measure/torch_stage.py",
        "deploy/runners/torch_forms.py",
        "deploy/runners/torch_program.py",
    },
    "tensorrt": {"deploy/engines/engine.py"},
    "tensorrt_rtx_bindings": {"deploy/engines/engine.py"},
    "cuda": set(),  # the driver is reached through ctypes
}


def modules() -> list[Path]:
    """Every shipped Python file."""
    return [path for folder in (*FOLDERS, "models") for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Absolute names of the modules a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(path: Path) -> str:
    """The layer a file belongs to."""
    top = path.relative_to(ROOT).parts[0]
    return path.stem if top == "deploy" else top


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    assert layer in RANK, f"{path} is no layer yet: give it a place in LAYERS"
    for name in imported(path):
        parts = name.split(".")
        if parts[1:2] and parts[1] in GROUPS:
            del parts[1]
        if parts[0] != "sparsedeploy" or len(parts) < 2 or parts[1] not in RANK:
            continue
        assert RANK[parts[1]] <= RANK[layer], f"{path} ({layer}) imports {name}"
        assert parts[1] != "models" or layer in ("models", "demo"), f"{path} imports models"


def test_converters_know_of_plugins_only_the_node() -> None:
    for path in (ROOT / "converters").glob("*.py"):
        wrong = {
            name
            for name in imported(path)
            if name.startswith("sparsedeploy.plugins.") and not name.startswith("sparsedeploy.plugins.node")
        }
        assert not wrong, f"{path}: {wrong}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_imports_stay_in_their_module(path: Path) -> None:
    for name in imported(path):
        allowed = ONLY.get(name.split(".")[0])
        assert allowed is None or path.relative_to(ROOT).as_posix() in allowed, f"{path} imports {name}"


def test_no_bare_folder_imports() -> None:
    for path in [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        bare = imported(path) & {"deploy", "plugins", "converters", "models"}
        assert not bare, f"{path} imports {bare}"
