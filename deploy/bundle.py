"""The folder that a conversion leaves: written aside, renamed once, with a manifest that says what it is and what holds."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from sparsedeploy import __version__
from sparsedeploy.errors import CheckFailed, InputError, MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins.node import ABI_VERSION
from sparsedeploy.reading import file_hash
from sparsedeploy.record import Document, Record

MANIFEST = "manifest.json"
DENSE_MODEL, SPARSE_MODEL, PLAN, VERIFY, REPORT = (
    "model.dense.onnx",
    "model.sparse.onnx",
    "plan.json",
    "verify.json",
    "report.html",
)


_ATTEMPTS = 20
"""To swap a folder in while others do the same."""
_LEFT_BY_SCRIPT = ("*.engine", "*.layers.json", "timing.cache")
"""What build.sh adds to the target's folder, on the device, where nothing can enter it in the manifest."""


class Evidence(Record):
    """What has been shown about the bundle, and what not."""

    weights: bool
    """Every node's weights were read back and compared with the model's."""
    outputs: bool
    """The sparse graph was run with them and compared with the original."""
    code: bool = False
    """The nodes' code was interpreted on the CPU, sampled blocks of every layer, and compared with float64."""
    device: bool = False
    """It ran on the target."""


class Manifest(Document):
    """The content of manifest.json."""

    TITLE = "the manifest.json of a bundle"

    tool: str = "sparsedeploy"
    version: str = __version__
    model: str
    """File name of the user's model."""
    model_hash: str
    target: str
    sm: int
    precision: Precision
    batch: int
    inputs: dict[str, tuple[int, ...]]
    plugin_abi: int = ABI_VERSION
    sparse_layers: int
    executable: bool
    """Whether every sparse node carries code and a plan to launch it."""
    evidence: Evidence
    files: dict[str, str]
    """SHA-256 of every other file, by path inside the bundle."""


def default_path(model: Path) -> Path:
    """`model.sparsedeploy` beside the model."""
    return model.parent / f"{model.stem}.sparsedeploy"


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it when the block ends well, removed when it does not.

    A folder that holds our manifest is replaced, also where `out` is a link to it; raises InputError for any other
    existing file or non-empty folder and MachineError where nothing can be written.
    """
    refuse_foreign(out)
    out = out.resolve()
    # Named before it exists: Ctrl-C at the moment it is made must find it as well.
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir(mode=0o700)
        except OSError as error:
            raise MachineError(
                f"{out}: cannot be written ({error.strerror}). Choose a folder you may write with -o."
            ) from error
        yield temporary
        temporary.chmod(0o755)
        _publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_foreign(out: Path, model: Path | None = None) -> None:
    """Raise InputError unless `out` is free, an empty folder, or a bundle of ours that does not hold the model itself."""
    if out.is_symlink() and not out.exists():
        raise InputError(f"{out}: is a link to nothing. Make the folder it should lead to, or choose another with -o.")
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise InputError(f"{out}: is the working directory or holds it; name a folder in it with -o.")
    if model is not None and out.resolve() in model.resolve().parents:
        raise InputError(
            f"{out}: holds the model {model.name} itself, which would go with the folder when it is replaced. "
            "Choose another folder with -o."
        )
    try:
        # Looked at again before it is refused: another conversion may be swapping its folder in.
        if not any(_may_replace(out) for _ in range(_ATTEMPTS)):
            raise InputError(
                f"{out}: is not empty and holds no manifest of sparsedeploy; it will not be touched. "
                "Choose another folder with -o."
            )
    except NotADirectoryError as error:
        if not out.exists():
            return  # what is above it is a file: making the folder will say so
        raise InputError(f"{out}: is a file; the output is a folder. Choose another name with -o.") from error
    except OSError as error:
        raise InputError(f"{out}: cannot be read ({error.strerror}). Choose another folder with -o.") from error


def _may_replace(out: Path) -> bool:
    try:
        return not any(out.iterdir()) or _is_ours(out)
    except FileNotFoundError:
        return True


def _publish(temporary: Path, out: Path) -> None:
    """Swap the new folder in; the old one goes aside first because a rename cannot replace a full folder.

    Another conversion into the same folder may get there in between: whoever is last stays, and nobody fails.
    """
    for _ in range(_ATTEMPTS):
        refuse_foreign(out)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        if _moved(out, aside / "bundle") and not _is_replaceable(aside / "bundle"):
            _give_back(aside, out)
            continue
        try:
            os.rename(temporary, out)
        except OSError as error:
            _bring_back(aside / "bundle", out)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    raise MachineError(f"{out}: other conversions keep writing there. Wait for them, or choose another folder with -o.")


def _give_back(aside: Path, out: Path) -> None:
    """A folder that somebody put at `out` since it was looked at, back to its place. It is never deleted."""
    try:
        os.rename(aside / "bundle", out)
        aside.rmdir()
    except OSError as error:
        raise MachineError(
            f"{out}: another program put a folder there while this conversion ended, and it could not be left in its place "
            f"({error.strerror}). It lies in {aside / 'bundle'} now: move it where it belongs, and convert again with -o."
        ) from error


def _bring_back(aside: Path, out: Path) -> None:
    """The old bundle to its place, unless another conversion has put its own there."""
    if out.exists() or not aside.exists():
        return
    try:
        os.rename(aside, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _moved(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return False
    return True


def _is_replaceable(folder: Path) -> bool:
    """Whether a folder moved aside is what refuse_foreign let through, and not what somebody put there since."""
    return folder.is_dir() and (_is_ours(folder) or not any(folder.iterdir()))


def _is_ours(folder: Path) -> bool:
    try:
        return '"tool": "sparsedeploy"' in (folder / MANIFEST).read_text("utf-8", "replace")
    except (FileNotFoundError, IsADirectoryError):
        return False


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the manifest, by relative path, sorted."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_hash(path) for path in files if path != folder / MANIFEST}


def read_manifest(out: Path) -> Manifest:
    """The bundle's manifest; raises InputError when the folder is no bundle."""
    path = out / MANIFEST
    if out.is_file():
        raise InputError(
            f"{out}: is a file, needed the folder that convert made. `sparsedeploy convert {out}` makes {default_path(out)}."
        )
    try:
        return Manifest.from_json(path.read_bytes(), path)
    except OSError as error:
        raise InputError(
            f"{out}: no bundle here ({MANIFEST}: {error.strerror}). Make one with `sparsedeploy convert MODEL -o {out}`."
        ) from error


def add_to_manifest(out: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Enter files made after the conversion (paths inside the bundle), so that check_hashes knows them."""
    files = dict(sorted({**manifest.files, **{name: file_hash(out / name) for name in names}}.items()))
    text = manifest.model_copy(update={"files": files}).to_json()
    partial = out / f".{MANIFEST}.partial"
    partial.write_text(text, "utf-8")
    partial.replace(out / MANIFEST)


def check_hashes(out: Path) -> int:
    """Compare every file with the manifest; raises CheckFailed naming what changed. Returns the number of files.

    Engines that the target folder's build.sh left beside itself are no part of the bundle and are passed over.
    """
    manifest, found = read_manifest(out), hashes(out)
    for name, expected in manifest.files.items():
        if name not in found:
            raise CheckFailed(
                f"{out}: {name} is missing, the manifest lists it. Copy the bundle again or convert again."
            )
        if found[name] != expected:
            raise CheckFailed(
                f"{out}: {name} was changed after conversion (its SHA-256 differs from the manifest). Convert again."
            )
    extra = sorted(name for name in found.keys() - manifest.files.keys() if not _left_by_script(name, manifest.target))
    if extra:
        raise CheckFailed(
            f"{out}: {extra[0]} is not in the manifest ({len(extra)} such files). Remove it or convert again."
        )
    return len(manifest.files)


def _left_by_script(name: str, target: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == target and any(fnmatchcase(file, pattern) for pattern in _LEFT_BY_SCRIPT)
