"""An engine file and the record beside it: what it is, what loads it, and whether it can be loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sparsedeploy import __version__
from sparsedeploy.engines.engine_build import TITLES, Backend, PluginLayer, Profile, Tensor, describe_profiles
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins.node import ABI_VERSION
from sparsedeploy.reading import file_hash
from sparsedeploy.record import Document, Record

MAGIC: dict[bytes, Backend] = {b"vtrt": "tensorrt_rtx", b"ftrt": "tensorrt"}
"""First bytes of an engine. Bytes 16..24 hold its size, 24..28 the version that built it."""
_HEADER = 28

Which = Literal["sparse", "dense"]


class PluginFile(Record):
    """The plugin library an engine was built with."""

    file: str
    """Name of the file beside the engine."""
    abi: int
    sha256: str
    size_bytes: int
    embedded: bool
    """Whether the engine carries it; loading then needs no file, only `engine_host_code_allowed`."""


class EngineRecord(Document):
    """The JSON beside an engine: what it is, what it was made from, and what loads it.

    It holds nothing of the build itself (times, folders): two builds of the same bundle leave the same bytes where the
    back end does, as TensorRT-RTX does.
    """

    TITLE = "the JSON that `build` leaves beside an engine"

    tool: str = "sparsedeploy"
    version: str = __version__
    engine: str
    """File name of the engine, which lies beside this record."""
    engine_bytes: int
    engine_hash: str
    backend: Backend
    backend_version: str
    loads_in: str
    """In words: what can load it and what cannot."""
    target: str
    sm: int
    which: Which
    precision: Precision
    tf32: bool
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    profiles: dict[str, Profile]
    """Sizes of inputs with open dimensions."""
    workspace_mb: int | None
    sparse_layers: int
    plugin_layers: tuple[PluginLayer, ...]
    """The same layers as found in the built engine, with types and memory layouts."""
    layer_types: dict[str, int]
    plugin: PluginFile | None
    model_bytes: int
    sources: dict[str, str]
    """SHA-256 of what it was built from, by file name."""


def engine_name(backend: Backend, sm: int, which: Which) -> str:
    """`model.tensorrt_rtx.sm80.engine`; the dense one beside it is `model.dense.tensorrt_rtx.sm80.engine`."""
    return f"model.{'dense.' if which == 'dense' else ''}{backend}.sm{sm}.engine"


def record_path(engine: Path) -> Path:
    """The JSON beside an engine."""
    return engine.with_name(engine.name + ".json")


def check_header(engine: Path, backend: Backend | None = None) -> Backend:
    """The back end that an engine's first bytes name; raises InputError for a truncated, foreign or other file."""
    try:
        size = engine.stat().st_size
        with engine.open("rb") as stream:
            header = stream.read(_HEADER)
    except OSError as error:
        raise InputError(f"{engine}: cannot be read ({error.strerror}). Give the path of an engine.") from error
    found = MAGIC.get(header[:4])
    if found is None or len(header) < _HEADER:
        raise InputError(
            f"{engine}: is no engine of TensorRT or TensorRT-RTX ({size:,} bytes that do not begin like one). Build it again "
            "with `sparsedeploy build`."
        )
    if backend is not None and found != backend:
        raise InputError(f"{engine}: {_other_backend(found, backend)}")
    promised = int.from_bytes(header[16:24], "little")
    if found == "tensorrt_rtx" and promised > size:
        raise InputError(
            f"{engine}: is truncated: it has {size:,} bytes and its header promises {promised:,}. Copy it again, or build it "
            "again with `sparsedeploy build`."
        )
    return found


def _other_backend(found: Backend, wanted: Backend) -> str:
    return (
        f"was built by {TITLES[found]} and cannot be loaded by {TITLES[wanted]}: their engines are not exchangeable. Build one "
        f"with `sparsedeploy build --backend {wanted}`, or load it with {TITLES[found]}."
    )


def load_check(
    engine: Path,
    *,
    backend: Backend | None = None,
    version: str | None = None,
    sm: int | None = None,
    plugin: Path | None = None,
) -> EngineRecord:
    """The record of an engine that can be loaded here; refuses in words what TensorRT would refuse in its own.

    backend, version and sm are the loader's and its GPU's; None leaves that one unchecked. plugin is the library that
    will be loaded with it, if not the one beside the engine. Raises InputError or MachineError.
    """
    check_header(engine, backend)
    path = record_path(engine)
    try:
        record = EngineRecord.from_json(path.read_bytes(), path)
    except OSError as error:
        raise InputError(
            f"{engine}: its record {path.name} cannot be read ({error.strerror}). Copy both files, or build again with "
            "`sparsedeploy build`."
        ) from error
    _check_content(engine, record)
    if backend is not None and record.backend != backend:
        raise InputError(f"{engine}: {_other_backend(record.backend, backend)}")
    if version is not None:
        check_version(engine, record, version)
    if sm is not None and record.sm != sm:
        raise InputError(
            f"{engine}: was built for compute capability {record.sm // 10}.{record.sm % 10} ({record.target}), this GPU has "
            f"{sm // 10}.{sm % 10}. Convert for a target of that capability and build again."
        )
    _check_plugin_of(engine, record, plugin)
    return record


def check_version(engine: Path, record: EngineRecord, version: str) -> None:
    """Raise InputError unless the engine was built by this version of its back end."""
    if record.backend_version != version:
        raise InputError(
            f"{engine}: was built by {TITLES[record.backend]} {record.backend_version}, installed is {version}; engines load in "
            "the version that built them. Build it again here, or install that version."
        )


def _check_content(engine: Path, record: EngineRecord) -> None:
    size = engine.stat().st_size
    if size < record.engine_bytes:
        raise InputError(
            f"{engine}: is truncated: it has {size:,} of {record.engine_bytes:,} bytes. Copy it again, or build it again with "
            "`sparsedeploy build`."
        )
    if size != record.engine_bytes or file_hash(engine) != record.engine_hash:
        raise InputError(
            f"{engine}: is not the file that its record {record_path(engine).name} describes (another SHA-256). Copy both "
            "again, or build again with `sparsedeploy build`."
        )


def _check_plugin_of(engine: Path, record: EngineRecord, plugin: Path | None) -> None:
    needed = record.plugin
    if needed is None:
        return
    if needed.abi != ABI_VERSION:
        raise InputError(
            f"{engine}: its sparse layers follow plugin ABI {needed.abi}, this version of sparsedeploy has {ABI_VERSION}. "
            "Convert and build again with this version, or use the version that built it."
        )
    if needed.embedded:
        return
    library = plugin or engine.with_name(needed.file)
    if not library.is_file():
        raise MachineError(
            f"{library}: the plugin library that {engine.name} needs is not there. Copy it beside the engine, give its path, "
            "or build with --embed-plugin."
        )
    if file_hash(library) != needed.sha256:
        raise MachineError(
            f"{library}: is not the plugin library that {engine.name} was built with (another SHA-256). Copy {needed.file} from "
            "the bundle, or build the engine again."
        )


def describe(record: EngineRecord, seconds: float | None = None) -> tuple[str, ...]:
    """What to tell a person about an engine, one sentence a line; `seconds` is what building it took."""
    layers = f"{len(record.plugin_layers)} plugin layers" if record.which == "sparse" else "no plugin layer (dense)"
    lines = [
        f"{record.engine}: {record.engine_bytes / 1e6:.2f} MB, {layers} of {sum(record.layer_types.values())}, "
        f"{record.precision}{', TF32 allowed' if record.tf32 else ''}, built by {TITLES[record.backend]} "
        f"{record.backend_version}{'' if seconds is None else f' in {seconds:.1f} s'} from {record.model_bytes / 1e6:.2f} MB of ONNX"
    ]
    if record.profiles:
        lines.append(f"sizes: {describe_profiles(dict(record.profiles))}")
    lines.append(f"loads in {record.loads_in}")
    return tuple(lines)
