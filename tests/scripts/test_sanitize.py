"""The sanitizer script without a GPU: what it builds, and what it makes of a tool's answer."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import sanitize

ANSWERS = {
    "clean": 'echo "5 nodes run, 0 wrong"; echo "========= ERROR SUMMARY: 0 errors"; exit 0',
    "racy": 'echo "========= Race reported"; echo "========= RACECHECK SUMMARY: 1 hazard displayed"; exit 9',
}


def tool(folder: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a compute-sanitizer that says `answer` on the path."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{ANSWERS[answer]}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_nodes_are_machine_code_for_every_layer_and_both_precisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitize, "LAYERS", sanitize.LAYERS[1:2])
    nodes = sanitize.build_nodes(["packed", "csr"])
    names = [name for name, _, _ in nodes]
    assert names == [
        *(f"{kernel} layer 0 {precision} N={n}" for kernel in ("packed", "csr") for precision in ("fp32", "fp16") for n in (1, 3)),
        "csr in clusters of 4",
        "csr in runs of image pairs",
    ]  # fmt: skip
    assert all(any(image.kind == "cubin" for image in node.images) for _, node, _ in nodes)
    assert nodes[-2][1].plan[0].ops[0].cluster == 4
    (tmp_path / "nodes.pickle").write_bytes(pickle.dumps(nodes))
    again = pickle.loads((tmp_path / "nodes.pickle").read_bytes())
    assert [(name, node.images, node.plan, n) for name, node, n in again] == [
        (name, node.images, node.plan, n) for name, node, n in nodes
    ]


def test_a_clean_tool_is_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "clean", monkeypatch)
    assert sanitize.run_tools(tmp_path, ["memcheck", "racecheck"]) == 0
    printed = capsys.readouterr().out
    assert "memcheck: exit 0, 0 errors; 5 nodes run, 0 wrong" in printed
    assert "racecheck: exit 0" in printed


def test_what_a_tool_finds_is_shown_and_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, "racy", monkeypatch)
    assert sanitize.run_tools(tmp_path, ["racecheck"]) == 1
    printed = capsys.readouterr().out
    assert "1 hazard displayed; the nodes did not run" in printed
    assert "Race reported" in printed


def test_no_tool_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.run_tools(tmp_path, ["memcheck"]) == 3
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
