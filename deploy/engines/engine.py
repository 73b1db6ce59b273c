"""Engines: built from a bundle by TensorRT or TensorRT-RTX in a process of their own, recorded, checked before loading.

The only importer of TensorRT. `python -m sparsedeploy.engines.engine REQUEST OUTCOME` is the build process.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, Manifest, add_to_manifest, read_manifest
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.engines.engine_build import (
    STAGE,
    TITLES,
    Answer,
    Backend,
    Outcome,
    Profile,
    Refusal,
    Request,
    build,
    install_hint,
    make_logger,
)
from sparsedeploy.engines.engine_file import (
    EngineRecord,
    PluginFile,
    Which,
    check_header,
    check_version,
    describe,
    engine_name,
    load_check,
    record_path,
)
from sparsedeploy.engines.engine_run import ExecutionContext, LoadedEngine
from sparsedeploy.errors import CheckFailed, InputError, MachineError, SparseDeployError
from sparsedeploy.gpu import first_gpu
from sparsedeploy.plugins.assemble import cache_dir
from sparsedeploy.plugins.node import ABI_VERSION, OP_TYPE
from sparsedeploy.plugins.plugin_build import (
    Arch,
    build_plugin,
    fetched_headers,
    header_version,
    plugin_file,
    system_headers,
)
from sparsedeploy.reading import file_hash

__all__ = [
    "BACKENDS",
    "RTX_SMS",
    "Backend",
    "Build",
    "EngineRecord",
    "ExecutionContext",
    "LoadedEngine",
    "Made",
    "Profile",
    "build_engine",
    "check_model",
    "compile_plugin",
    "describe",
    "load_check",
    "load_engine",
    "make_engine",
    "no_engine",
    "only_on_device",
]

BACKENDS: tuple[Backend, ...] = ("tensorrt", "tensorrt_rtx")
"""In order of preference where a machine has both: TensorRT times its choices on the GPU."""
MODULES: dict[Backend, str] = {"tensorrt_rtx": "tensorrt_rtx_bindings", "tensorrt": "tensorrt"}
RTX_LIBRARIES = "tensorrt_rtx_libs"
RTX_SMS = (75, 80, 86, 89, 120, 121)
"""Compute capabilities that TensorRT-RTX 1.7 builds for and runs on."""
RTX_SONAME = "libtensorrt_rtx.so"
"""What its ONNX parser opens when it meets a plugin node; the wheel ships only `libtensorrt_rtx.so.1`."""


@dataclass(frozen=True)
class Build:
    """How to build an engine from a bundle."""

    backend: Backend | None = None
    """None: TensorRT where this machine has it and the target's GPU, else TensorRT-RTX."""
    which: Which | None = None
    """None: sparse, or dense where nothing was converted."""
    plugin: Path | None = None
    """The plugin library for this back end; None: compiled here (and cached), where the engine has sparse layers."""
    headers: Sequence[Path] = ()
    """Folders of TensorRT's C++ headers to compile it with, the fitting one is taken; else the system's, else those of
    10.14, fetched once."""
    embed_plugin: bool = False
    tf32: bool = False
    batch: tuple[int, int, int] | None = None
    """Smallest, usual, largest batch of inputs that leave it open; None: 1, and the manifest's for the other two."""
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    workspace_mb: int | None = None
    log: Path | None = None
    """Where to keep the whole build log."""
    timeout_s: float | None = None
    tell: Callable[[str], None] = lambda stage: None


class Made(NamedTuple):
    """A built engine."""

    record: EngineRecord
    seconds: float
    """What parsing and building took; told, not recorded."""


def build_engine(bundle: Path, options: Build | None = None) -> EngineRecord:
    """`make_engine`, for its record."""
    return make_engine(bundle, options).record


def make_engine(bundle: Path, options: Build | None = None) -> Made:
    """Build the engine of a bundle's target into the bundle, with its record, and enter both in the manifest.

    Raises SparseDeployError; the bundle is then as it was before.
    """
    options = options or Build()
    manifest = read_manifest(bundle)
    which = options.which or ("sparse" if manifest.sparse_layers else "dense")
    if which == "dense" and (options.embed_plugin or options.plugin):
        raise InputError(
            f"{bundle}: the dense model has no sparse layer, so there is no plugin to {'put into its engine' if options.embed_plugin else 'load'}. "
            "Leave out --embed-plugin and --plugin with --dense (or where nothing was converted)."
        )
    backend = choose_backend(options.backend, manifest)
    model = bundle / (SPARSE_MODEL if which == "sparse" else DENSE_MODEL)
    options.tell("reading the nodes")
    nodes = check_model(bundle, manifest, which)
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-build-") as folder:
        work = Path(folder)
        plugin = _plugin(options, backend, work) if nodes else None
        options.tell(f"building with {TITLES[backend]}")
        request = _request(options, manifest, backend, model, nodes, plugin, work)
        try:
            answer = _run(request, work, options.timeout_s)
        finally:
            if options.log and (work / "log").is_file():
                shutil.copyfile(work / "log", options.log)
        made = Path(request.engine)
        _check_made(made, backend, plugin if options.embed_plugin else None)
        record = _record(request, answer, manifest, which, plugin)
        _publish(bundle, manifest, record, made, plugin)
    return Made(record, answer.seconds)


def check_model(bundle: Path, manifest: Manifest, which: Which) -> tuple[str, ...]:
    """Names of the model's sparse nodes, in graph order.

    Raises CheckFailed or InputError unless the model is the one that was verified and every node can run on the target.
    """
    model = bundle / (SPARSE_MODEL if which == "sparse" else DENSE_MODEL)
    _check_source(bundle, manifest, model)
    return _check_nodes(bundle, manifest, model) if which == "sparse" else ()


def _check_source(bundle: Path, manifest: Manifest, model: Path) -> None:
    """Refuse a model that is not the one that was verified."""
    for path in (model, model.with_name(model.name + ".data")):
        expected = manifest.files.get(path.name)
        if expected is not None and path.is_file() and file_hash(path) != expected:
            raise CheckFailed(
                f"{bundle}: {path.name} was changed after conversion (its SHA-256 differs from the manifest), so nothing is known "
                "about it. Convert again; an engine is built only from what was verified."
            )


def _request(
    options: Build,
    manifest: Manifest,
    backend: Backend,
    model: Path,
    nodes: tuple[str, ...],
    plugin: Path | None,
    work: Path,
) -> Request:
    return Request(
        backend=backend,
        model=str(model.resolve()),
        engine=str(work / "engine"),
        log=str(work / "log"),
        sm=manifest.sm,
        tf32=options.tf32,
        batch=options.batch or (1, manifest.batch, manifest.batch),
        inputs=manifest.inputs,
        profiles=dict(options.profiles),
        plugin=str(plugin) if plugin else None,
        embed_plugin=options.embed_plugin,
        plugin_nodes=nodes,
        workspace_mb=options.workspace_mb,
        timing_cache=_timing_cache(backend, manifest.sm),
    )


def _record(request: Request, answer: Answer, manifest: Manifest, which: Which, plugin: Path | None) -> EngineRecord:
    made, model = Path(request.engine), Path(request.model)
    side = model.with_name(model.name + ".data")
    sources = [path for path in (model, side) if path.is_file()]
    return EngineRecord(
        engine=engine_name(request.backend, manifest.sm, which),
        engine_bytes=made.stat().st_size,
        engine_hash=file_hash(made),
        backend=request.backend,
        backend_version=answer.version,
        loads_in=_loads_in(request.backend, answer.version, manifest.sm, plugin, request.embed_plugin),
        target=manifest.target,
        sm=manifest.sm,
        which=which,
        precision=manifest.precision,
        tf32=request.tf32,
        inputs=answer.inputs,
        outputs=answer.outputs,
        profiles=answer.profiles,
        workspace_mb=request.workspace_mb,
        sparse_layers=len(request.plugin_nodes),
        plugin_layers=answer.plugin_layers,
        layer_types=answer.layer_types,
        plugin=_plugin_file(plugin, request.embed_plugin) if plugin else None,
        model_bytes=sum(path.stat().st_size for path in sources),
        sources={path.name: file_hash(path) for path in sources},
    )


def choose_backend(asked: Backend | None, manifest: Manifest) -> Backend:
    """The back end to build with on this machine; raises MachineError in words where there is none for the target."""
    if asked is not None:
        if why := _why_not(asked, manifest):
            raise MachineError(why)
        return asked
    reasons = {backend: _why_not(backend, manifest) for backend in BACKENDS}
    for backend, why in reasons.items():
        if why is None:
            return backend
    if manifest.sm not in RTX_SMS and not _is_here(manifest):  # installing a wheel would not help
        raise MachineError(str(reasons["tensorrt_rtx"]))
    raise MachineError(f"No engine can be built here. {reasons['tensorrt_rtx']} {reasons['tensorrt']}")


def no_engine(bundle: Path, manifest: Manifest) -> str | None:
    """One sentence on why no engine can be built on this machine and what to do about it; None where one can.

    Looks only at what is installed: nothing of TensorRT is imported.
    """
    if any(_why_not(backend, manifest) is None for backend in BACKENDS):
        return None
    if manifest.sm not in RTX_SMS and not _is_here(manifest):
        return _why_not("tensorrt_rtx", manifest)
    wheel = "'tensorrt>=10.3'" if _is_here(manifest) else "'.[rtx]'"
    where = "for the GPU here" if _is_here(manifest) else "in sparsedeploy's folder (x86-64 Linux, no GPU needed)"
    return (
        f"no TensorRT is installed. `pip install {wheel}` {where}, then `sparsedeploy build {shlex.quote(str(bundle))}`, makes "
        f"one for {manifest.target}"
    )


def _is_here(manifest: Manifest) -> bool:
    """Whether this machine's GPU is of the target's kind."""
    gpu = first_gpu()
    return gpu is not None and gpu.sm == manifest.sm


def only_on_device(manifest: Manifest) -> str | None:
    """Why no TensorRT can build for the target from this machine, whatever were installed; None where one can."""
    if manifest.sm in RTX_SMS or _is_here(manifest):
        return None
    return (
        f"TensorRT-RTX does not build for {manifest.target} (compute capability {manifest.sm // 10}.{manifest.sm % 10}), and "
        "TensorRT builds on the device itself"
    )


def _why_not(backend: Backend, manifest: Manifest) -> str | None:
    """Why a back end cannot build for the bundle's target on this machine; None when it can."""
    if backend == "tensorrt_rtx":
        if manifest.sm not in RTX_SMS:
            known = ", ".join(f"{sm // 10}.{sm % 10}" for sm in RTX_SMS)
            return (
                f"TensorRT-RTX does not build for {manifest.target}: that is compute capability "
                f"{manifest.sm // 10}.{manifest.sm % 10}, it knows {known}. {_on_the_device(manifest)}"
            )
        if not _installed(MODULES[backend]) or not _installed(RTX_LIBRARIES):
            return f"TensorRT-RTX is not installed in this Python ({sys.executable}): {install_hint(backend)}."
        return None
    if not _installed(MODULES[backend]):
        return f"TensorRT is not installed in this Python ({sys.executable}): {install_hint(backend)}."
    gpu = first_gpu()
    if gpu is None:
        return (
            f"TensorRT builds on the GPU that the engine is for, and this machine has none. {_on_the_device(manifest)}"
        )
    if gpu.sm != manifest.sm:
        return (
            f"TensorRT builds for the GPU it runs on: here {gpu.name}, compute capability {gpu.sm // 10}.{gpu.sm % 10}; "
            f"{manifest.target} has {manifest.sm // 10}.{manifest.sm % 10}. {_on_the_device(manifest)}"
        )
    return None


def _on_the_device(manifest: Manifest) -> str:
    if manifest.sm == 53:
        return (
            "Its engine is built on the device, and this version has no kit that was tried there yet; `sparsedeploy build` with "
            "--tensorrt-include DIR, the C++ headers of its TensorRT 8, makes a folder with library and build.sh."
        )
    return (
        f"Its engine is built on the device itself: `sparsedeploy build` makes the bundle's folder {manifest.target}/ for that; "
        f"copy {manifest.target}/ there and run its build.sh."
    )


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def import_backend(backend: Backend) -> Any:
    """The back end's module; raises MachineError in words where it cannot be imported."""
    try:
        return importlib.import_module(MODULES[backend])
    except ImportError as error:
        raise MachineError(
            f"{TITLES[backend]} cannot be imported ({error}). Install it: {install_hint(backend)}."
        ) from error


def _check_nodes(bundle: Path, manifest: Manifest, model: Path) -> tuple[str, ...]:
    """Names of the sparse nodes, in graph order; raises unless each can run in the engine asked for."""
    if manifest.plugin_abi != ABI_VERSION:
        raise InputError(
            f"{bundle}: its nodes follow plugin ABI {manifest.plugin_abi}, this version of sparsedeploy builds plugins of ABI "
            f"{ABI_VERSION}. Convert the model again with this version."
        )
    if not model.is_file():
        raise InputError(
            f"{bundle}: holds no sparse model: nothing was converted. Build the dense engine with --dense."
        )
    loaded = load(model)
    nodes = read_nodes(loaded)
    if bare := [node.layer for node in nodes.values() if not node.executable]:
        more = f" and {len(bare) - 1} more" if len(bare) > 1 else ""
        raise CheckFailed(
            f"{bundle}: the sparse node of layer '{bare[0]}'{more} carries weights but no code, so no engine can run it. "
            "Convert again with a kernel that has code for this target and precision (--layer NAME=KERNEL), or leave the "
            "layer dense."
        )
    for node in nodes.values():
        archs = sorted({image.arch for image in node.images})
        if not any(_runs_on(image.kind, image.arch, manifest.sm) for image in node.images):
            raise CheckFailed(
                f"{bundle}: layer '{node.layer}' carries code for sm_{', sm_'.join(map(str, archs))}, not for {manifest.target} "
                f"(sm_{manifest.sm}). Convert again with --target {manifest.target}."
            )
    return tuple(str(node.name) for node in loaded.proto.graph.node if node.op_type == OP_TYPE)


def _runs_on(kind: str, arch: int, sm: int) -> bool:
    """PTX is compiled for any later device; a cubin runs within its major version, from its own minor on."""
    return arch <= sm if kind == "ptx" else arch // 10 == sm // 10 and arch <= sm


def load_engine(engine: Path, plugin: Path | None = None) -> LoadedEngine:
    """Load an engine on this machine's first GPU, its plugin library first (the one beside it unless another is given).

    Whatever TensorRT would refuse in its own words is refused in ours before; raises InputError or MachineError. The
    device's primary CUDA context must be current in threads that use it (CUDA's runtime API and torch see to that).
    """
    gpu = first_gpu()
    if gpu is None:
        raise MachineError(
            f"{engine}: an engine runs on an NVIDIA GPU and this machine shows none (no libcuda.so.1 or no GPU). Copy the "
            "engine, its record and its plugin library to the device."
        )
    backend = check_header(engine)
    record = load_check(engine, sm=gpu.sm, plugin=plugin)
    trt = import_backend(backend)
    check_version(engine, record, str(trt.__version__))
    logger, errors = make_logger(trt)
    runtime = trt.Runtime(logger)
    if record.plugin is not None and record.plugin.embedded:
        runtime.engine_host_code_allowed = True
    elif record.plugin is not None:
        library = (plugin or engine.with_name(record.plugin.file)).resolve()
        _load_library(
            runtime.get_plugin_registry(), library, record.plugin.sha256, f"{TITLES[backend]} {trt.__version__}", errors
        )
    told = len(errors)
    made = runtime.deserialize_cuda_engine(engine.read_bytes())
    if made is None:
        raise MachineError(
            f"{engine}: {TITLES[backend]} {trt.__version__} refused it: {'; '.join(errors[told:]) or 'it gave no reason'}. Build it "
            "again on this machine with `sparsedeploy build`."
        )
    return LoadedEngine(engine, record, trt, made, runtime, logger, errors)


_libraries: dict[str, str] = {}
"""SHA-256 of the plugin library loaded in this process, by back end with its version: a registry takes one per name."""


def _load_library(registry: Any, library: Path, sha256: str, title: str, errors: list[str]) -> None:
    """Make the plugin known to a registry, once a process: a second library of the same name is refused by TensorRT."""
    if any(creator.name == OP_TYPE for creator in registry.all_creators):
        held = _libraries.get(title)
        if held in (None, sha256):  # None: the program loaded it itself
            return
        raise MachineError(
            f"{library}: another build of the plugin is loaded in this process already, and {title} takes one. Load engines of "
            "different plugin builds in processes of their own, or build them again with one library."
        )
    told = len(errors)
    registry.load_library(str(library))
    if not any(creator.name == OP_TYPE for creator in registry.all_creators):
        raise MachineError(
            f"{library}: {title} finds no plugin {OP_TYPE} in it: {'; '.join(errors[told:]) or 'it gives no reason'}. Build it again "
            "with `sparsedeploy build --plugin-only`."
        )
    _libraries[title] = sha256


def _plugin(options: Build, backend: Backend, work: Path) -> Path:
    if options.plugin is not None:
        return _check_plugin(options.plugin, backend)
    options.tell("compiling the plugin")
    return compile_plugin(backend, work, _headers_for(backend, options.headers))


def _headers_for(backend: Backend, given: Sequence[Path]) -> Path | None:
    """Of several folders of headers the one for this back end; None leaves it to compile_plugin to find some."""
    wanted = 10 if backend == "tensorrt_rtx" else _installed_major()
    fitting = [path for path in given if wanted is None or header_version(path)[0] == wanted]
    if backend == "tensorrt_rtx":
        return fitting[0] if fitting else None  # 10.14 is fetched: headers given for the device are no mistake
    return next(iter([*fitting, *given]), None)


def compile_plugin(backend: Backend, folder: Path, headers: Path | None = None) -> Path:
    """The plugin library for the back end of this machine, compiled into `folder` (or copied from the cache).

    Raises MachineError where headers or compiler are missing or the headers are of another major version.
    """
    arch: Arch = "aarch64" if platform.machine() == "aarch64" else "x86_64"
    if backend == "tensorrt_rtx":
        return build_plugin(folder / plugin_file("rtx"), headers or fetched_headers(), "rtx", arch)
    found = headers or system_headers(arch) or fetched_headers()
    major, installed = header_version(found)[0], _installed_major()
    if installed is not None and installed != major:
        raise MachineError(
            f"TensorRT {installed} is installed, the C++ headers in {found} are of TensorRT {major}; a plugin built with them "
            f"would crash inside TensorRT. Give the headers of TensorRT {installed} with --tensorrt-include."
        )
    return build_plugin(folder / plugin_file("v3", major), found, "v3", arch)


def _installed_major() -> int | None:
    """Major version of the installed TensorRT by its package's metadata; None where that does not say."""
    names = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings")
    versions = {str(found.metadata["Name"]).replace("_", "-"): found.version for found in metadata.distributions()}
    numbers = [versions[name].partition(".")[0] for name in names if name in versions]
    return int(numbers[0]) if numbers and numbers[0].isdigit() else None


def _check_plugin(plugin: Path, backend: Backend) -> Path:
    if not plugin.is_file():
        raise MachineError(
            f"{plugin}: no such plugin library. Build it with `sparsedeploy build --plugin-only`, or give the path of one."
        )
    with plugin.open("rb") as stream:
        if stream.read(4) != b"\x7fELF":
            raise MachineError(
                f"{plugin}: is no shared library (.so). Give the plugin library that sparsedeploy built for "
                f"{TITLES[backend]}, or build it with `sparsedeploy build --plugin-only`."
            )
    return plugin.resolve()


def _timing_cache(backend: Backend, sm: int) -> str | None:
    """One file per back end and GPU model; the build adds TensorRT's version to its name. RTX times nothing."""
    if backend == "tensorrt_rtx":
        return None
    root = cache_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a cache is a convenience: a read-only home must not stop a build
    gpu = first_gpu()
    model = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name) if gpu else "unknown"
    return str(root / f"timing.{backend}.sm{sm}.{model}.cache")


def _run(request: Request, work: Path, timeout_s: float | None) -> Answer:
    """Build in a child process: TensorRT ends the process where it cannot go on, and that must become a message."""
    (work / "request").write_text(request.to_json(), "utf-8")
    environment = dict(os.environ)
    if request.backend == "tensorrt_rtx":
        _place_soname(work)
        found = environment.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = str(work) + (os.pathsep + found if found else "")
    command = [sys.executable, "-m", "sparsedeploy.engines.engine", "request", "outcome"]
    with (work / "output").open("wb") as output:
        try:
            done = subprocess.run(
                command,
                cwd=work,  # the user's folder may hold a file named like a module of ours
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MachineError(
                f"{TITLES[request.backend]} did not finish within {timeout_s:g} s and was stopped. Allow more time, or build a "
                "smaller model."
            ) from error
    outcome = work / "outcome"
    if done.returncode == 0 and outcome.is_file():
        result = Outcome.from_json(outcome.read_bytes(), outcome)
        if result.answer is not None:
            return result.answer
        if result.refusal is not None:
            raise _KINDS[result.refusal.kind](_plugin_words(request, work) or result.refusal.text)
    raise MachineError(_post_mortem(request, done.returncode, work))


_KINDS: dict[str, type[SparseDeployError]] = {kind.__name__: kind for kind in (InputError, CheckFailed, MachineError)}


def _place_soname(work: Path) -> None:
    """A link of the name that the parser opens, in a folder of ours: the installed wheel is not ours to change."""
    spec = importlib.util.find_spec(RTX_LIBRARIES)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(folder).glob(f"{RTX_SONAME}*")):
            (work / RTX_SONAME).symlink_to(library.resolve())
            return
    raise MachineError(
        f"TensorRT-RTX is incomplete: the package {RTX_LIBRARIES} holds no {RTX_SONAME}.1. Install it again: "
        f"{install_hint('tensorrt_rtx')}."
    )


def _post_mortem(request: Request, code: int, work: Path) -> str:
    """One paragraph for a build process that ended without an outcome."""
    how = f"signal {-code} ({_signal_name(-code)})" if code < 0 else f"exit code {code}"
    log = _lines(work / "log")
    stages = [line.partition(": ")[2] for line in log if line.startswith(f"{STAGE}: ")]
    doing = f" while {stages[-1]}" if stages else ""
    last = [line for line in (*log, *_lines(work / "output")) if _is_error(line)]
    said = f"; its last words: {last[-1][:300]}" if last else "; it said nothing"
    advice = (
        "The system ended it, most likely for want of memory: close other programs or add swap."
        if -code == signal.SIGKILL
        else "Keep the whole log with --log FILE and report it with the model; --dense shows whether the sparse nodes are the cause."
    )
    return f"{TITLES[request.backend]} ended the build process{doing} ({how}){said}. {advice}"


def _plugin_words(request: Request, work: Path) -> str | None:
    """The plugin's own reason, which it prints where it finds no logger; TensorRT only says that a call returned 1."""
    words = [line for line in _lines(work / "output") if line.startswith(OP_TYPE)]
    if not words:
        return None
    return (
        f"{Path(request.model).name}: {words[0].rstrip('. ')}. {TITLES[request.backend]} stopped there; the whole log is kept "
        "with --log FILE."
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []


def _is_error(line: str) -> bool:
    return (
        line.startswith(("ERROR", "INTERNAL_ERROR", "terminate called", "free()", "malloc", "corrupted"))
        or "Error: " in line
    )


def _check_made(engine: Path, backend: Backend, embedded: Path | None) -> None:
    """Refuse an engine whose header contradicts what was built, or which lacks the library it should carry."""
    check_header(engine, backend)
    if embedded is None:
        return
    with engine.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
        if bytes_.find(embedded.read_bytes()) < 0:
            raise CheckFailed(
                f"{TITLES[backend]} was asked to put {embedded.name} into the engine and did not. Build without --embed-plugin "
                "and ship the library beside the engine."
            )


def _loads_in(backend: Backend, version: str, sm: int, plugin: Path | None, embedded: bool) -> str:
    capability = f"compute capability {sm // 10}.{sm % 10}"
    if plugin is None:
        needs = "it needs no plugin"
    elif embedded:
        needs = "the plugin is inside: set engine_host_code_allowed before loading"
    else:
        needs = f"load {plugin.name} first (IPluginRegistry.load_library)"
    if backend == "tensorrt_rtx":
        return (
            f"the TensorRT-RTX {version} runtime only, on a GPU of {capability}; {needs}; not TensorRT, trtexec, Triton, "
            "DeepStream or ONNX Runtime's TensorRT provider"
        )
    return f"the TensorRT {version} runtime, on a GPU of {capability} like the one it was built on; {needs}"


def _plugin_file(plugin: Path, embedded: bool) -> PluginFile:
    return PluginFile(
        file=plugin.name,
        abi=ABI_VERSION,
        sha256=file_hash(plugin),
        size_bytes=plugin.stat().st_size,
        embedded=embedded,
    )


def _publish(bundle: Path, manifest: Manifest, record: EngineRecord, made: Path, plugin: Path | None) -> None:
    """Engine, record and plugin into the bundle, each by one rename; the manifest last, so that it never promises more."""
    try:
        _place(made, bundle / record.engine)
        names = [record.engine, record_path(Path(record.engine)).name]
        (bundle / f".{names[1]}.partial").write_text(record.to_json(), "utf-8")
        (bundle / f".{names[1]}.partial").replace(bundle / names[1])
        if plugin is not None and record.plugin and not record.plugin.embedded:
            _place(plugin, bundle / plugin.name)
            names.append(plugin.name)
        add_to_manifest(bundle, manifest, names)
    except OSError as error:
        raise MachineError(
            f"{bundle}: cannot be written ({error.strerror}). Free some space or change its permissions."
        ) from error


def _place(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.copyfile(source, partial)
    partial.replace(target)


def main(arguments: Sequence[str]) -> int:
    """The build process: a request file in, an outcome file out."""
    request_file, outcome_file = (Path(name) for name in arguments)
    request = Request.from_json(request_file.read_bytes(), request_file)
    try:
        outcome = Outcome(answer=build(import_backend(request.backend), request))
    except (InputError, CheckFailed, MachineError) as error:
        kind: Any = type(error).__name__
        outcome = Outcome(refusal=Refusal(kind=kind, text=str(error)))
    outcome_file.write_text(outcome.to_json(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
