"""The command `build`: an engine where one can be built from here, and the folder that builds one on the device."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparsedeploy.bundle import DENSE_MODEL, MANIFEST, SPARSE_MODEL, Manifest, add_to_manifest, read_manifest
from sparsedeploy.converters.shapes import parse_shape
from sparsedeploy.engines.engine import (
    Backend,
    Build,
    EngineRecord,
    Made,
    Profile,
    compile_plugin,
    describe,
    make_engine,
    no_engine,
    only_on_device,
)
from sparsedeploy.engines.target_folder import TargetFolder, make_target_folder, make_triton_repository
from sparsedeploy.engines.trtexec import graph_shapes
from sparsedeploy.errors import InputError, MachineError, SparseDeployError
from sparsedeploy.plugins.plugin_build import (
    Arch,
    Flavour,
    build_plugin,
    fetched_headers,
    header_version,
    plugin_file,
    system_headers,
)
from sparsedeploy.record import Document


class BuildReport(Document):
    """What `build` made; what `build --json` prints."""

    engine: EngineRecord | None = None
    engine_seconds: float | None = None
    """What building it took."""
    no_engine: str | None = None
    """Why there is none: the target's engine can only be built on the device."""
    folder: str | None = None
    """Folder of the bundle that builds an engine on the device."""
    files: tuple[str, ...] = ()
    """What is in that folder."""
    libraries: tuple[str, ...] = ()
    """Plugin libraries, by path inside the bundle (or the folder of --plugin-only)."""
    triton: str | None = None
    """The model's folder in the Triton repository."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """What the command line asks for, beyond how the engine is built."""

    engine: Build = field(default_factory=Build)
    max_batch: int | None = None
    arch: Arch | None = None
    """Processor that the libraries are for; None: the target's."""
    triton: Path | None = None
    """Root of a Triton model repository to write a model into."""


def build_bundle(out: Path, options: Options) -> BuildReport:
    """Build the engine of a bundle and fill the target's folder.

    A target whose engine can only be built on the device gets the folder alone, which is then the result. Raises
    SparseDeployError; a machine that lacks what the engine needs still gets the folder, and the error says so.
    """
    manifest = read_manifest(out)
    build = replace(options.engine, batch=_batch_range(out, manifest, options.max_batch))
    why = only_on_device(manifest) if build.backend is None else None
    if why is not None:
        _refuse_idle(build, manifest, why)
    elif build.which == "dense" and manifest.sparse_layers and (options.arch or build.headers):
        raise InputError(
            f"{'--arch' if options.arch else '--tensorrt-include'} with --dense: says how plugin libraries are compiled, and the "
            "dense engine needs none. Leave one of them out."
        )
    made, lacking = None, None
    if why is None:
        try:
            made = make_engine(out, build)
        except MachineError as error:
            lacking = error
    if build.which == "dense" and manifest.sparse_layers and why is None:
        if lacking:
            raise lacking
        return _with_engine(made, BuildReport())  # one more engine to compare with: the folder is the sparse model's
    build.tell(f"filling {manifest.target}/")
    folder = _folder(out, manifest, build, options.arch, lacking)
    if lacking:
        raise MachineError(f"{lacking} {_can_be_built_there(out, manifest)}") from lacking
    report = BuildReport(
        no_engine=why,
        folder=manifest.target,
        files=tuple(path.name for path in folder.files),
        libraries=tuple(f"{manifest.target}/{name}" for name in folder.libraries.values()),
        triton=_triton(out, manifest, build, options.triton),
        notes=folder.notes,
    )
    return _with_engine(made, report)


def _refuse_idle(build: Build, manifest: Manifest, why: str) -> None:
    """Raise InputError for what would say how an engine is built, where none can be built."""
    there = {
        "--embed-plugin": (build.embed_plugin, "EMBED=1 ./build.sh puts the plugin into the engine"),
        "--dense": (build.which == "dense", "./build.sh dense builds the dense engine"),
        "--plugin": (build.plugin is not None, "the library beside build.sh is used"),
        "--log": (build.log is not None, "trtexec prints its own log"),
    }
    for flag, (given, instead) in there.items():
        if given:
            raise InputError(
                f"{flag}: no engine is built here: {why}. Leave it out; on the device, in {manifest.target}/, {instead}."
            )


def _with_engine(made: Made | None, report: BuildReport) -> BuildReport:
    update = {} if made is None else {"engine": made.record, "engine_seconds": made.seconds}
    return report.model_copy(update=update)


def _folder(
    out: Path, manifest: Manifest, build: Build, arch: Arch | None, lacking: MachineError | None
) -> TargetFolder:
    try:
        return make_target_folder(
            out,
            headers=build.headers,
            batch=build.batch,
            profiles=build.profiles,
            tf32=build.tf32,
            workspace_mb=build.workspace_mb,
            arch=arch,
        )
    except MachineError as error:
        if lacking is None:
            raise
        raise MachineError(
            f"{lacking} {manifest.target}/, to build on the device, could not be made either: {error}"
        ) from error


def _can_be_built_there(out: Path, manifest: Manifest) -> str:
    return f"To build it on the device with TensorRT instead, copy {out / manifest.target}/ there and run its build.sh."


def _triton(out: Path, manifest: Manifest, build: Build, root: Path | None) -> str | None:
    if root is None:
        return None
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(manifest.model).stem) or "model"
    return str(make_triton_repository(out, root, name, batch=build.batch)[0].parent)


def _batch_range(out: Path, manifest: Manifest, largest: int | None) -> tuple[int, int, int] | None:
    """1, the batch converted for, and the largest asked for; raises InputError where the model leaves no batch open."""
    if largest is None:
        return None
    model = out / (SPARSE_MODEL if manifest.sparse_layers else DENSE_MODEL)
    inputs = graph_shapes(model)[0] if model.is_file() else {}
    if inputs and not any(dims and dims[0] == -1 for dims in inputs.values()):
        name, dims = next(iter(inputs.items()))
        raise InputError(
            f"--max-batch {largest}: {model.name} leaves no batch open (input '{name}' is {'x'.join(map(str, dims))}). Export "
            "the model with an open batch and convert it again, or leave --max-batch out."
        )
    return 1, min(manifest.batch, largest), largest


def parse_profile(text: str) -> tuple[str, Profile]:
    """`NAME=MIN:OPT:MAX` or `NAME=SIZES`, sizes such as 1x3x224x224; raises InputError for anything else."""
    name, equals, words = text.rpartition("=")
    sizes = words.split(":")
    try:
        if not equals or len(sizes) not in (1, 3):
            raise InputError(text)
        shapes = [parse_shape(f"{name}={size}")[1] for size in sizes]
    except InputError as error:
        raise InputError(
            f"--profile {text}: is not understood. Needed are the input's name and its smallest, usual and largest sizes: "
            "--profile images=1x3x224x224:8x3x224x224:32x3x224x224."
        ) from error
    return name, Profile(minimum=shapes[0], optimum=shapes[len(shapes) // 2], maximum=shapes[-1])


def build_libraries(folder: Path, backend: Backend | None, headers: Sequence[Path], arch: Arch | None) -> BuildReport:
    """Compile the plugin alone into a folder; a bundle's manifest then lists it.

    One library per folder of headers, for TensorRT's version there. Without a back end, headers of version 10 also make
    the one for TensorRT-RTX, which runs on x86-64 only. Raises SparseDeployError.
    """
    own: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
    arch = arch or own
    folder.mkdir(parents=True, exist_ok=True)
    if backend == "tensorrt" and not headers and arch == own:
        made = [compile_plugin(backend, folder)]  # also compares the headers with the TensorRT installed
    else:
        found = [*headers] or [path for path in [system_headers(arch)] if path] or [fetched_headers()]
        made = [
            build_plugin(folder / plugin_file(flavour, major), path, flavour, arch)
            for flavour, major, path in _libraries(backend, {header_version(path)[0]: path for path in found}, arch)
        ]
    if (folder / MANIFEST).is_file():
        add_to_manifest(folder, read_manifest(folder), [path.name for path in made])
    return BuildReport(libraries=tuple(path.name for path in made))


def _libraries(backend: Backend | None, headers: Mapping[int, Path], arch: Arch) -> list[tuple[Flavour, int, Path]]:
    rows: list[tuple[Flavour, int, Path]] = []
    if backend != "tensorrt_rtx":
        rows += [("v2" if major < 10 else "v3", major, path) for major, path in sorted(headers.items())]
    if backend == "tensorrt_rtx":
        rows.append(("rtx", 10, headers.get(10) or next(iter(headers.values()))))
    elif backend is None and 10 in headers and arch == "x86_64":
        rows.append(("rtx", 10, headers[10]))
    return rows


def lines_of(out: Path, report: BuildReport) -> tuple[str, ...]:
    """What to tell a person about a report, one thing a line."""
    lines = [*_engine_lines(out, report.engine, report.engine_seconds)] if report.engine else []
    if report.no_engine:
        lines.append(f"no engine from here: {report.no_engine}")
    if report.folder is not None:
        lines.append(folder_line(out, report.folder, report.libraries))
    else:
        lines += [f"{out / name}: {(out / name).stat().st_size / 1e6:.2f} MB" for name in report.libraries]
    if report.triton:
        lines.append(f"{report.triton}/: for Triton; start.sh beside its config.pbtxt starts the server")
    return (*lines, *(f"note: {note}" for note in report.notes))


def _engine_lines(out: Path, record: EngineRecord, seconds: float | None) -> tuple[str, ...]:
    first, *others = describe(record, seconds)
    return (f"{out}/{first}", *others)


def folder_line(out: Path, target: str, libraries: Iterable[str]) -> str:
    """What the target's folder holds and what to do with it, in one line."""
    majors = [found[1] for name in libraries if (found := re.search(r"_trt(\d+)\.so$", name))]
    version = f" {' or '.join(majors)}" if majors else ""
    with_library = "model, plugin, build.sh" if majors else "model, build.sh"
    return (
        f"{out / target}/: {with_library}. On the device, ./build.sh builds an engine with its TensorRT{version}, for trtexec, "
        "Triton, DeepStream and ONNX Runtime"
    )


def add_engine(out: Path, manifest: Manifest, tell: Callable[[str], None]) -> tuple[str, ...]:
    """What a conversion adds to its bundle where a TensorRT is at hand: engine and target folder. Returns what to tell.

    Raises nothing that a machine lacks or TensorRT refuses: the bundle is good without an engine. A bundle without sparse
    nodes that can run is left alone.
    """
    if not manifest.executable:
        return ()
    if why := no_engine(out, manifest):
        return (f"no engine: {why}",)
    try:
        lines = _engine_lines(out, *make_engine(out, Build(tell=tell)))
    except (SparseDeployError, OSError) as error:
        return (f"note: the bundle is complete, its engine could not be built: {' '.join(str(error).split())}",)
    tell(f"filling {manifest.target}/")
    try:
        return (*lines, folder_line(out, manifest.target, make_target_folder(out).libraries.values()))
    except (SparseDeployError, OSError) as error:
        return (
            *lines,
            f"note: {manifest.target}/, to build with TensorRT there, was not made: {' '.join(str(error).split())}",
        )
