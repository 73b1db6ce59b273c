"""The folder a conversion leaves: replaced when ours, refused when not, whole or not there at all."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
from small_models import network, saved

from sparsedeploy import bundle
from sparsedeploy import convert as convert_module
from sparsedeploy.bundle import (
    MANIFEST,
    add_to_manifest,
    check_hashes,
    default_path,
    hashes,
    read_manifest,
    refuse_foreign,
    writing,
)
from sparsedeploy.convert import Conversion, Request, convert
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, InputError, MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.reverify import verify_bundle

A100 = find("a100")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(network(), tmp_path)


def run(model: Path, out: Path, choice: str = "csr", precision: Precision = "fp32") -> Conversion:
    return convert(Request(model, A100, out, precision=precision, layers=(f"*={choice}",)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_repeat_is_byte_identical(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out")
    a = contents(tmp_path / "out")
    run(model, tmp_path / "out")
    b = contents(tmp_path / "out")
    assert sorted(a) == [
        "manifest.json",
        "model.dense.onnx",
        "model.sparse.onnx",
        "plan.json",
        "report.html",
        "verify.json",
    ]
    assert a.keys() == b.keys()
    differing = [name for name in a if a[name] != b[name]]
    assert differing == []


def test_ours_is_replaced_and_nothing_of_it_stays(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out)
    assert (out / "model.sparse.onnx").exists()
    run(model, out, "dense")
    assert not (out / "model.sparse.onnx").exists()
    assert names(tmp_path) == ["model.onnx", "out"]
    assert check_hashes(out) == 4


def test_an_empty_folder_is_used(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run(model, tmp_path / "out")
    assert check_hashes(tmp_path / "out") == 5


@pytest.mark.parametrize("manifest", [None, "{}", '{"tool": "other"}'])
def test_a_foreign_folder_is_refused(manifest: str | None, model: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "data.txt").write_text("mine")
    if manifest is not None:
        (theirs / MANIFEST).write_text(manifest)
    before = contents(theirs)
    with pytest.raises(InputError, match="will not be touched"):
        run(model, theirs)
    assert contents(theirs) == before


def test_a_link_to_a_bundle_leads_to_the_new_one(model: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    run(model, real)
    link.symlink_to(real)
    run(model, link, "dense")
    assert link.is_symlink()
    assert not (real / "model.sparse.onnx").exists()
    assert names(tmp_path / "disk") == ["real"]
    assert names(tmp_path) == ["disk", "link", "model.onnx"]


def test_a_link_to_nothing_or_to_a_file_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match="link to nothing"):
        run(model, tmp_path / "link")
    (tmp_path / "other").symlink_to(model)
    with pytest.raises(InputError, match="is a file"):
        run(model, tmp_path / "other")


def test_a_link_to_someone_elses_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "x").touch()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match="will not be touched"):
        run(model, tmp_path / "link")


def test_a_bundle_that_holds_the_model_is_not_replaced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out)
    before = contents(out)
    with pytest.raises(InputError, match="holds the model"):
        run(out / "model.dense.onnx", out)
    assert contents(out) == before


def test_the_working_directory_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path(), Path("..")):
        with pytest.raises(InputError, match="working directory"):
            run(model, out)


@pytest.mark.parametrize(
    ("stage", "error"),
    [("_write_models", RuntimeError("boom")), ("_verify", CheckFailed("differs")), ("render", KeyboardInterrupt())],
)
def test_a_failure_in_the_middle_leaves_the_old_bundle(
    stage: str, error: BaseException, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run(model, out)
    before = contents(out)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(convert_module, stage, fail)
    for folder in (out, tmp_path / "new"):
        with pytest.raises(type(error)):
            run(model, folder)
    assert contents(out) == before
    assert names(tmp_path) == ["model.onnx", "out"]


def test_a_failing_rename_brings_the_old_bundle_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    fill(out, "old")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(target) == out and (Path(source) / "new").exists():
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        fill(out, "new")
    assert names(out) == [MANIFEST, "old"]
    assert names(tmp_path) == ["out"]


def fill(out: Path, name: str) -> None:
    with writing(out) as folder:
        (folder / name).touch()
        (folder / MANIFEST).write_text('{"tool": "sparsedeploy"}')


def test_conversions_into_the_same_folder_at_once(tmp_path: Path) -> None:
    """Whoever is last stays; nobody fails, nothing is mixed, nothing is left beside it."""
    out, errors, gate = tmp_path / "out", [], threading.Barrier(8)

    def work(number: int) -> None:
        try:
            gate.wait()
            for turn in range(5):
                fill(out, f"{number}-{turn}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(names(out)) == 2
    assert names(tmp_path) == ["out"]


def test_a_folder_that_appears_meanwhile_is_put_back(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def meanwhile() -> None:
        with writing(out):
            out.mkdir()
            (out / "thesis.tex").touch()

    with pytest.raises(InputError, match="will not be touched"):
        meanwhile()
    assert names(out) == ["thesis.tex"]
    assert names(tmp_path) == ["out"]


def test_a_foreign_folder_that_cannot_go_back_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    (out / "chapters").mkdir(parents=True)
    (out / "thesis.tex").write_text("years of work")
    looks = iter([None, None])  # it came after the last look
    monkeypatch.setattr(bundle, "refuse_foreign", lambda folder: next(looks))
    moved = bundle._moved

    def taken_again(source: Path, target: Path) -> bool:
        done = moved(source, target)
        (out / "somebody else's").mkdir(parents=True)
        return done

    monkeypatch.setattr(bundle, "_moved", taken_again)
    with pytest.raises(MachineError, match=r"It lies in (.*) now") as caught, writing(out):
        pass
    (aside,) = tmp_path.glob(".out.old.*/bundle")
    assert str(aside) in str(caught.value)
    assert names(aside) == ["chapters", "thesis.tex"]
    assert names(out) == ["somebody else's"]
    assert len(names(tmp_path)) == 2, "the new bundle is gone, both folders are there"


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be written"), writing(tmp_path / "file" / "out"):
        pass


def test_free_names_are_let_through(tmp_path: Path) -> None:
    refuse_foreign(tmp_path / "new" / "deeper")
    assert default_path(Path("models/net.v2.onnx")) == Path("models/net.v2.sparsedeploy")


def test_hashes_cover_all_but_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    for name in (MANIFEST, "a", f"kit/{MANIFEST}"):
        (tmp_path / name).write_text(name)
    assert list(hashes(tmp_path)) == ["a", f"kit/{MANIFEST}"]


def test_hashes_notice_every_change(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out)
    for name in sorted(read_manifest(out).files):
        data = (out / name).read_bytes()
        (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(CheckFailed, match=f"{name} was changed"):
            check_hashes(out)
        (out / name).unlink()
        with pytest.raises(CheckFailed, match=f"{name} is missing"):
            check_hashes(out)
        (out / name).write_bytes(data)
    (out / "extra").touch()
    with pytest.raises(CheckFailed, match="extra is not in the manifest"):
        check_hashes(out)


def test_what_build_sh_leaves_is_no_change(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out)
    (out / "a100").mkdir()
    for name in ("model.engine", "model.dense.engine", "model.engine.layers.json", "timing.cache"):
        (out / "a100" / name).touch()
    assert check_hashes(out) == 5
    for name in ("model.engine", "other/model.engine", "a100/deeper/model.engine", "a100/run.sh"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
        with pytest.raises(CheckFailed, match=f"{name} is not in the manifest"):
            check_hashes(out)
        (out / name).unlink()


def test_files_made_later_are_entered(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(model, out)
    (out / "a100").mkdir()
    (out / "a100" / "model.engine").write_bytes(b"x")
    add_to_manifest(out, read_manifest(out), ["a100/model.engine"])
    assert check_hashes(out) == 6
    (out / "a100" / "model.engine").write_bytes(b"y")
    with pytest.raises(CheckFailed, match=r"model\.engine was changed"):
        check_hashes(out)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 9}', "\xff"])
def test_a_damaged_manifest_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text, "latin-1")
    with pytest.raises(InputError, match=MANIFEST):
        read_manifest(tmp_path)


def test_a_moved_bundle_verifies_with_and_without_the_original(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out")
    far = tmp_path / "far"
    far.mkdir()
    (tmp_path / "out").rename(far / "moved")
    alone = verify_bundle(far / "moved", None, None, 0)
    assert alone.passed
    assert "compared with the bundle's own dense model" in alone.note
    assert alone.sparse_nodes_verified == 3
    with_it = verify_bundle(far / "moved", model, None, 0)
    assert with_it.passed
    assert with_it.note == ""
    model.rename(far / "model.onnx")  # beside the bundle it is found by itself
    assert verify_bundle(far / "moved", None, None, 0).note == ""


def test_two_notes_are_two_clauses(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out", precision="fp16")
    model.unlink()
    note = verify_bundle(tmp_path / "out", None, None, 0).note
    assert re.search(r"with every value rounded to fp16.*; model\.onnx is not here: compared", note), note


def test_a_file_is_no_bundle(model: Path) -> None:
    with pytest.raises(
        InputError, match=r"is a file, needed .*`sparsedeploy convert .*model\.onnx` makes .*model\.sparsedeploy"
    ):
        read_manifest(model)


def test_another_model_is_not_the_original(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "out")
    other = saved(network(seed=3), tmp_path, "other.onnx")
    with pytest.raises(InputError, match="not the file this bundle was made of"):
        verify_bundle(tmp_path / "out", other, None, 0)
    with pytest.raises(InputError, match="no such file"):
        verify_bundle(tmp_path / "out", tmp_path / "gone.onnx", None, 0)
    other.replace(model)  # another file of that name beside the bundle is not taken for the original
    assert "own dense model" in verify_bundle(tmp_path / "out", None, None, 0).note
