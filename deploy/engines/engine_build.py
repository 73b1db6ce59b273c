"""The steps of one engine build, given a TensorRT module: parse, profile, configure, build, count what was built.

Runs in a process of its own (engine.py starts it), because TensorRT ends the process where it cannot go on. Imports no
TensorRT: engine.py, its only importer, hands the module in.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from sparsedeploy.errors import CheckFailed, InputError, MachineError
from sparsedeploy.plugins.node import OP_TYPE, PLUGIN_NAMESPACE, PLUGIN_VERSION
from sparsedeploy.record import Record

Backend = Literal["tensorrt_rtx", "tensorrt"]
TITLES: dict[Backend, str] = {"tensorrt_rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}
OLDEST: dict[Backend, tuple[int, int]] = {"tensorrt_rtx": (1, 7), "tensorrt": (10, 0)}
"""Oldest versions that import a V3 plugin: TensorRT-RTX 1.6 refuses the operator, TensorRT 8 knows V2 only."""
RTX_WHEEL = "1.7.1.116"
"""The version of the wheels that pyproject's extra `rtx` pins and the tests run with."""
SHOWN_ERRORS = 3
STAGE = "STAGE"
"""Severity of our own lines in the log: what the build was doing when the process ended."""

_ERRORS = ("ERROR", "INTERNAL_ERROR")
_NOISE = re.compile(r"ModelImporter\.cpp|catchCudaError|checkMacros")
"""Lines at level ERROR that say nothing: the parser's frames, and the missing driver that a build does without."""
_NO_DRIVER = re.compile(r"\s*\[checkMacros\.cpp\S* Error Code 1: Cuda Runtime \(.*")
"""What TensorRT-RTX adds to every error on a machine without a driver."""
_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>[^,]*), (?P<rest>.*)$", re.MULTILINE)
_ONNX_NAME = re.compile(r"Metadata: .*?\[ONNX Layer: (.*?)\]")
_TENSOR = re.compile(r"Dimensions: (\[[^\]]*\]).*?(?:Datatype: (\w+), )?Format(?:/Datatype)?: (.*?) \}")
DTYPES = {"FLOAT": "fp32", "HALF": "fp16"}
"""TensorRT's names in ours; the other types keep their names in lower case, which are numpy's."""


class Profile(Record):
    """The sizes one input may take: smallest, the one built for, largest."""

    minimum: tuple[int, ...]
    optimum: tuple[int, ...]
    maximum: tuple[int, ...]


class Request(Record):
    """What to build. Paths are absolute: the build runs in a folder of its own."""

    backend: Backend
    model: str
    engine: str
    log: str
    sm: int
    tf32: bool
    batch: tuple[int, int, int]
    """Smallest, usual and largest first dimension of inputs that leave it open."""
    inputs: dict[str, tuple[int, ...]]
    """Shapes the model was converted for: what other open dimensions become."""
    profiles: dict[str, Profile] = {}
    """Sizes of an input given outright, instead of from batch and inputs."""
    plugin: str | None = None
    embed_plugin: bool = False
    plugin_nodes: tuple[str, ...] = ()
    """Names of the SparseConv2d nodes of the model."""
    workspace_mb: int | None = None
    timing_cache: str | None = None
    """File to keep timings in, before TensorRT's version is added to its name."""


class Tensor(Record):
    """An input or output of the engine."""

    dtype: str
    shape: tuple[int, ...]
    """-1 for an open dimension."""


class PluginLayer(Record):
    """A plugin layer as the build log shows it."""

    name: str
    inputs: tuple[str, ...]
    """Per activation input: dimensions, type and memory layout."""
    outputs: tuple[str, ...]


class Answer(Record):
    """What was built."""

    version: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    profiles: dict[str, Profile]
    plugin_layers: tuple[PluginLayer, ...]
    layer_types: dict[str, int]
    """Layers of the engine by type, as the build log names them."""
    seconds: float


class Refusal(Record):
    """Why nothing was built."""

    kind: Literal["InputError", "CheckFailed", "MachineError"]
    text: str


class Outcome(Record):
    """What the build process leaves: one of both."""

    answer: Answer | None = None
    refusal: Refusal | None = None


def build(trt: Any, request: Request) -> Answer:
    """Build the engine and write it; raises InputError, CheckFailed or MachineError in words.

    Sparse layers are counted three times, which must agree: in the file, in the parsed network, in the built engine.
    """
    began = perf_counter()
    title = f"{TITLES[request.backend]} {trt.__version__}"
    _check_version(trt, request)
    log = _Log(Path(request.log))
    logger, _ = make_logger(trt, log)
    builder = trt.Builder(logger)
    if request.plugin:
        log.write(STAGE, f"loading the plugin library {request.plugin}")
        _load_plugin(trt, request.plugin, title, log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    log.write(STAGE, f"reading {Path(request.model).name}")
    _parse(trt, network, logger, request, title, log)
    _compare_names(_plugin_names(trt, network), request.plugin_nodes, f"the network that {title} parsed", request.model)
    config = builder.create_builder_config()
    _configure(trt, config, request)
    profiles = _add_profiles(builder, network, config, request, title)
    timings = _timings_of(request, str(trt.__version__))
    cache = _use_timing_cache(config, timings)
    log.write(STAGE, f"building the engine of {Path(request.model).name}")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CheckFailed(
            f"{title} could not build {Path(request.model).name}: {log.reason()}. {_what_next(request, log.reason())}"
        )
    layers = _layers(trt, log, plan, logger, request)
    plugin_layers = tuple(layer for layer in layers if layer.is_plugin)
    if layers or request.backend == "tensorrt_rtx":
        # TensorRT may decorate a layer's name: there the number is compared, with TensorRT-RTX the names.
        names = [layer.name for layer in plugin_layers]
        if request.backend == "tensorrt" and len(names) == len(request.plugin_nodes):
            names = list(request.plugin_nodes)
        _compare_names(names, request.plugin_nodes, f"the engine that {title} built", request.model)
    Path(request.engine).write_bytes(memoryview(plan))
    if cache is not None and timings is not None:
        partial = timings.with_name(f"{timings.name}.{os.getpid()}")  # builds at once must not write into one another
        partial.write_bytes(memoryview(cache.serialize()))
        partial.replace(timings)
    return Answer(
        version=str(trt.__version__),
        inputs=_tensors(network.get_input(i) for i in range(network.num_inputs)),
        outputs=_tensors(network.get_output(i) for i in range(network.num_outputs)),
        profiles=profiles,
        plugin_layers=tuple(
            PluginLayer(name=layer.name, inputs=layer.inputs, outputs=layer.outputs) for layer in plugin_layers
        ),
        layer_types=dict(sorted(Counter(layer.kind for layer in layers).items())),
        seconds=round(perf_counter() - began, 3),
    )


class _Log:
    """The build log: written line by line, so that it outlives an abort; errors and layer tables kept."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="replace", buffering=1)
        self.errors: list[str] = []
        self.layer_texts: list[str] = []

    def write(self, severity: str, message: str) -> None:
        self._file.write(f"{severity}: {message}\n")
        if severity in _ERRORS and not _NOISE.search(message):
            self.errors.append(_tidy(message))
        if "LayerType: " in message:
            self.layer_texts.append(message)

    def reason(self) -> str:
        """The errors that say something, in the order they came."""
        return "; ".join(dict.fromkeys(self.errors[:SHOWN_ERRORS])) or "it gives no reason"


def _tidy(message: str) -> str:
    return _NO_DRIVER.sub("", " ".join(message.split()))


def make_logger(trt: Any, log: _Log | None = None) -> tuple[Any, list[str]]:
    """A logger for TensorRT and the list that its errors go to."""
    errors: list[str] = log.errors if log else []

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base class comes with the module
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if log:
                log.write(severity.name, message)
            elif severity.name in _ERRORS:
                errors.append(_tidy(message))

    return Logger(), errors


def _check_version(trt: Any, request: Request) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", trt.__version__)[:2])
    oldest = OLDEST[request.backend]
    if request.plugin_nodes and numbers < oldest:
        raise MachineError(
            f"{TITLES[request.backend]} {trt.__version__} is installed; it cannot import a plugin of our kind. Needed is "
            f"{'.'.join(map(str, oldest))} or newer: {install_hint(request.backend)}."
        )


def install_hint(backend: Backend) -> str:
    """The pip line that brings a back end."""
    if backend == "tensorrt_rtx":
        packages = " ".join(f"tensorrt-rtx-cu13-{part}=={RTX_WHEEL}" for part in ("bindings", "libs"))
        return f"pip install {packages} (x86-64 Linux, no GPU needed)"
    return "pip install 'tensorrt>=10.3' (needs an NVIDIA GPU to build)"


def _load_plugin(trt: Any, plugin: str, title: str, log: _Log) -> None:
    registry = trt.get_plugin_registry()
    registry.load_library(plugin)
    if registry.get_creator(OP_TYPE, PLUGIN_VERSION, PLUGIN_NAMESPACE) is None:
        raise MachineError(
            f"{plugin}: {title} finds no plugin {OP_TYPE}, version {PLUGIN_VERSION}, namespace '{PLUGIN_NAMESPACE}' in it "
            f"({log.reason()}). Needed is the plugin library that sparsedeploy builds for this back end; build it again "
            "with `sparsedeploy build --plugin-only`."
        )


def _parse(trt: Any, network: Any, logger: Any, request: Request, title: str, log: _Log) -> None:
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(request.model):
        return
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    file = Path(request.model).name
    if not errors:
        raise InputError(f"{file}: {title} cannot read it: {log.reason()}. {_what_next(request)}")
    first = errors[0]
    where = f"node '{first.node_name()}' ({first.node_operator()})"
    more = f" ({len(errors) - 1} more nodes fail)" if len(errors) > 1 else ""
    if "Plugin not found" in first.desc() and first.node_operator() != OP_TYPE:
        raise InputError(
            f"{file}: {title} has no operator {first.node_operator()}: {where}{more}. {_what_next(request)}"
        )
    if "Plugin not found" in first.desc():
        raise MachineError(
            f"{file}: {title} has no plugin for {where}{more}. Needed is the plugin library of sparsedeploy, name "
            f"{OP_TYPE}, version {PLUGIN_VERSION}, namespace '{PLUGIN_NAMESPACE}', built for this back end. Build it "
            "with `sparsedeploy build --plugin-only`; if the node asks for another version or namespace, convert the model again."
        )
    reasons = dict.fromkeys([_tidy(first.desc()).rstrip("."), *log.errors[:SHOWN_ERRORS]])
    raise InputError(f"{file}: {title} cannot read {where}{more}: {'; '.join(reasons)}. {_what_next(request)}")


def _what_next(request: Request, reason: str = "") -> str:
    if "check_turing_op_compatibility" in reason:
        return "TensorRT-RTX has no such operation in fp32 for Turing GPUs: convert with --precision fp16."
    if request.plugin_nodes:
        return (
            "Try --dense to see whether the model without sparse nodes builds; the whole log is kept with --log FILE, and "
            "`sparsedeploy convert --layer NAME=dense` leaves a layer out"
        ) + "."
    return "Export the model with other operators, or build it with another back end; the whole log is kept with --log FILE."


def _plugin_names(trt: Any, network: Any) -> list[str]:
    kinds = {getattr(trt.LayerType, name, None) for name in ("PLUGIN_V3", "PLUGIN_V2")} - {None}
    layers = (network.get_layer(i) for i in range(network.num_layers))
    return [str(layer.name) for layer in layers if layer.type in kinds]


def _compare_names(found: Sequence[str], expected: Sequence[str], where: str, model: str) -> None:
    if Counter(found) == Counter(expected):
        return
    missing = sorted((Counter(expected) - Counter(found)).elements())
    extra = sorted((Counter(found) - Counter(expected)).elements())
    which = f"'{missing[0]}' is missing" if missing else f"'{extra[0]}' is not among the model's nodes"
    raise CheckFailed(
        f"{Path(model).name}: {where} has {len(found)} plugin layers, the model has {len(expected)} sparse nodes; {which}. "
        "An engine that silently lost or changed a sparse layer is not kept; please report the model and the log (--log FILE)."
    )


def _configure(trt: Any, config: Any, request: Request) -> None:
    if request.backend == "tensorrt_rtx":
        # Without a target the engine is portable and compiled on the device; CURRENT without a GPU ends the process.
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{request.sm}"), 0)
    if request.tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    # The layer table, formats included, is logged only with this.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.workspace_mb is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace_mb << 20)
    if request.plugin and request.embed_plugin:
        config.plugins_to_serialize = [request.plugin]


def _add_profiles(builder: Any, network: Any, config: Any, request: Request, title: str) -> dict[str, Profile]:
    """One optimisation profile over every input with open dimensions; empty where every shape is fixed."""
    found: dict[str, Profile] = {}
    names = [str(network.get_input(i).name) for i in range(network.num_inputs)]
    if unknown := [name for name in request.profiles if name not in names]:
        raise InputError(
            f"{Path(request.model).name}: has no input '{unknown[0]}' to give sizes to with --profile. Its inputs are "
            f"{', '.join(names)}."
        )
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shape = tuple(int(size) for size in tensor.shape)
        profile = profile_of(str(tensor.name), shape, request)
        if profile is not None:
            found[str(tensor.name)] = profile
    if found:
        profile = builder.create_optimization_profile()
        for name, sizes in found.items():
            profile.set_shape(name, sizes.minimum, sizes.optimum, sizes.maximum)
        if config.add_optimization_profile(profile) < 0:
            raise InputError(f"{title} refuses the optimisation profile {describe_profiles(found)}. Give other sizes.")
    return found


def profile_of(name: str, shape: tuple[int, ...], request: Request) -> Profile | None:
    """The sizes for one input of the parsed network (-1: open); None for one that is fixed. Raises InputError."""
    given = request.profiles.get(name)
    if given is None and -1 not in shape:
        if shape and len(shape) >= 4 and not request.batch[0] <= shape[0] <= request.batch[2]:
            raise InputError(
                f"{Path(request.model).name}: input '{name}' is fixed at {spell(shape)}, asked for was a batch of "
                f"{_range(request.batch)}. Export the model with an open batch and convert it again, or leave the batch out."
            )
        return None
    if given is None:
        base = request.inputs.get(name)
        if base is None or len(base) != len(shape):
            raise InputError(
                f"{Path(request.model).name}: input '{name}' is {spell(shape)} and the manifest gives "
                f"{spell(base) if base else 'no shape'} for it. Give its sizes with --profile {name}=MIN:OPT:MAX."
            )
        sizes = [
            tuple(
                size if size != -1 else batch if axis == 0 else base[axis]  # only the first dimension is a batch
                for axis, size in enumerate(shape)
            )
            for batch in request.batch
        ]
        given = Profile(minimum=sizes[0], optimum=sizes[1], maximum=sizes[2])
    _check_profile(name, shape, given)
    return given if -1 in shape else None


def _check_profile(name: str, shape: tuple[int, ...], profile: Profile) -> None:
    three = (profile.minimum, profile.optimum, profile.maximum)
    fits = all(
        len(sizes) == len(shape)
        and all(size >= 1 and want in (-1, size) for size, want in zip(sizes, shape, strict=True))
        for sizes in three
    )
    if not fits or not all(a <= b <= c for a, b, c in zip(*three, strict=True)):
        raise InputError(
            f"input '{name}' is {spell(shape)}; the sizes {':'.join(spell(sizes) for sizes in three)} do not fit it: each "
            "must agree with the fixed dimensions, be at least 1, and go from smallest over usual to largest."
        )


def describe_profiles(profiles: dict[str, Profile]) -> str:
    """`input 1x3x224x224 : 8x3x224x224 : 32x3x224x224`."""
    return ", ".join(
        f"{name} {spell(p.minimum)} : {spell(p.optimum)} : {spell(p.maximum)}" for name, p in profiles.items()
    )


def spell(shape: Iterable[int]) -> str:
    """`1x3x224x224`, ? for an open dimension."""
    return "x".join("?" if size == -1 else str(size) for size in shape) or "a scalar"


def _range(batch: tuple[int, int, int]) -> str:
    return str(batch[0]) if batch[0] == batch[2] else f"{batch[0]} to {batch[2]}"


def _timings_of(request: Request, version: str) -> Path | None:
    if request.timing_cache is None:
        return None
    file = Path(request.timing_cache)
    return file.with_name(f"{file.stem}.{version}{file.suffix}")


def _use_timing_cache(config: Any, file: Path | None) -> Any:
    """The cache in use; None where none was asked for. A file that TensorRT does not take is started anew."""
    if file is None:
        return None
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _tensors(tensors: Iterable[Any]) -> dict[str, Tensor]:
    return {
        str(tensor.name): Tensor(
            dtype=DTYPES.get(tensor.dtype.name, tensor.dtype.name.lower()),
            shape=tuple(int(size) for size in tensor.shape),
        )
        for tensor in tensors
    }


class _Layer(NamedTuple):
    """A layer of the built engine."""

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def is_plugin(self) -> bool:
        """TensorRT-RTX says custom_layer, TensorRT PluginV2 or PluginV3."""
        return self.kind == "custom_layer" or self.kind.startswith("Plugin")


def _layers(trt: Any, log: _Log, plan: Any, logger: Any, request: Request) -> list[_Layer]:
    """The layers that were built: from the build log, else (TensorRT, which builds on a GPU) from the engine inspector.

    Empty where neither shows a table: then the parsed network is all that was counted.
    """
    found = [_logged(match) for text in log.layer_texts for match in _LAYER.finditer(text)]
    if found or request.backend == "tensorrt_rtx":
        return found
    runtime = trt.Runtime(logger)
    if request.plugin and request.embed_plugin:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise CheckFailed(
            f"{TITLES[request.backend]} built {Path(request.model).name} and cannot read its own engine: {log.reason()}. Keep "
            "the log with --log FILE and report it."
        )
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    entries = json.loads(text).get("Layers", [])
    return [_inspected(entry) for entry in entries if isinstance(entry, dict)]


def _inspected(entry: dict[str, Any]) -> _Layer:
    def tensors(key: str) -> tuple[str, ...]:
        return tuple(f"{tensor.get('Dimensions')} {kind(tensor)}" for tensor in entry.get(key, []))

    def kind(tensor: dict[str, Any]) -> str:
        if "Format/Datatype" in tensor:
            return str(tensor["Format/Datatype"])
        return " ".join(str(tensor[key]) for key in ("DataType", "Format") if key in tensor)  # TensorRT 11 splits it

    return _Layer(str(entry.get("Name")), str(entry.get("LayerType")), tensors("Inputs"), tensors("Outputs"))


def _logged(match: re.Match[str]) -> _Layer:
    """`Name: l_myl0_14, LayerType: custom_layer, Inputs: [ { Name: ..., Dimensions: [-1,128,28,28], ... Format: ... }], ...`"""
    onnx_name = _ONNX_NAME.search(match["rest"])
    name = onnx_name[1] if onnx_name else re.sub(r"_myl\d+_\d+$", "", match["name"])
    before, _, after = match["rest"].partition("Outputs: [")
    activations = before.partition("Constants: [")[0]
    return _Layer(name, match["type"], _formats(activations), _formats(after))


def _formats(text: str) -> tuple[str, ...]:
    return tuple(f"{dims} {dtype} {layout}".replace("  ", " ") for dims, dtype, layout in _TENSOR.findall(text))
