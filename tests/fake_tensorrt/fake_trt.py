"""As much of TensorRT's Python module as a build uses, without TensorRT: parses with onnx, "builds" what it was told.

The "engine" has a real header and then, as JSON, every setting that reached the builder, so that tests see what TensorRT
would have seen. The environment variable FAKE_TRT makes it fail in one way:
abort, lose_layer, no_build, no_creator, no_parse, hang, drop_plugin, no_table, old, plugin_speaks, no_load, no_context,
no_run, no_shape. A context "runs" by appending to CALLS and calling EXECUTE, which a test may set.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

FAULT = os.environ.get("FAKE_TRT", "")


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class LayerType(enum.Enum):
    CONVOLUTION = 0
    PLUGIN_V2 = 1
    PLUGIN_V3 = 2


class BuilderFlag(enum.Enum):
    TF32 = 0


class ProfilingVerbosity(enum.Enum):
    DETAILED = 0


class MemoryPoolType(enum.Enum):
    WORKSPACE = 0


class ComputeCapability(enum.Enum):
    SM75, SM80, SM86, SM89, SM120, SM121 = 75, 80, 86, 89, 120, 121


class Severity(enum.Enum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class DataType(enum.Enum):
    FLOAT, HALF, INT32 = range(3)


_TYPES = {1: DataType.FLOAT, 10: DataType.HALF, 6: DataType.INT32}


CALLS: list[dict[str, Any]] = []
"""Every inference: stream, and per tensor (address, shape)."""
EXECUTE: Callable[[Mapping[str, tuple[int, tuple[int, ...]]]], None] | None = None


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class ILogger:
    """Base of the build's logger."""


class Tensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        kind = value.type.tensor_type
        self.name = value.name
        self.dtype = _TYPES[kind.elem_type]
        self.shape = tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in kind.shape.dim)


class Layer:
    def __init__(self, node: onnx.NodeProto) -> None:
        self.name = node.name
        self.type = LayerType.PLUGIN_V3 if node.op_type == "SparseConv2d" else LayerType.CONVOLUTION


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.graph = onnx.GraphProto()

    num_inputs = property(lambda self: len(self.graph.input))
    num_outputs = property(lambda self: len(self.graph.output))
    num_layers = property(lambda self: len(self.graph.node))

    def get_input(self, i: int) -> Tensor:
        return Tensor(self.graph.input[i])

    def get_output(self, i: int) -> Tensor:
        return Tensor(self.graph.output[i])

    def get_layer(self, i: int) -> Layer:
        return Layer(self.graph.node[i])


class ParserError:
    def __init__(self, node: onnx.NodeProto, text: str) -> None:
        self._node, self._text = node, text

    def node_name(self) -> str:
        return str(self._node.name)

    def node_operator(self) -> str:
        return str(self._node.op_type)

    def desc(self) -> str:
        return self._text


class OnnxParser:
    def __init__(self, network: Network, logger: Any) -> None:
        self._network, self._logger, self._errors = network, logger, []  # type: ignore[var-annotated]

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, i: int) -> ParserError:
        return self._errors[i]  # type: ignore[no-any-return]

    def parse_from_file(self, path: str) -> bool:
        graph = onnx.load(path).graph
        constants = {tensor.name for tensor in graph.initializer}
        for value in [value for value in graph.input if value.name in constants]:
            graph.input.remove(value)
        sparse = [node for node in graph.node if node.op_type == "SparseConv2d"]
        if sparse and not _registry.libraries:
            self._errors = [
                ParserError(node, 'creator && "Plugin not found, are the plugin name ..."') for node in sparse
            ]
        elif FAULT == "plugin_speaks":
            print("SparseConv2d c2: the residual that it adds is [1, 2], its output [3].", file=sys.stderr)
            self._errors = [ParserError(sparse[0], "output shape computation failed")]
        elif FAULT == "no_parse":
            self._logger.log(Severity.ERROR, "ModelImporter.cpp:140: While parsing node number 0")
            self._logger.log(Severity.ERROR, "SparseConv2d c1: its code is for sm_53")
            self._errors = [
                ParserError(
                    graph.node[0],
                    "createPlugin returned\nnull [checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35)",
                )
            ]
        if sparse and FAULT == "abort":
            print("terminate called without an active exception", file=sys.stderr, flush=True)
            ctypes.CDLL(None).abort()
        if FAULT == "lose_layer":
            graph.node.remove(sparse[0])
        self._network.graph = graph
        return not self._errors


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        self.shapes[name] = [list(shape) for shape in shapes]


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data + b"+timed"


class Config:
    def __init__(self) -> None:
        self.num_compute_capabilities = 0
        self.capabilities: list[ComputeCapability] = []
        self.tf32 = True
        self.profiling_verbosity: ProfilingVerbosity | None = None
        self.workspace: int | None = None
        self.plugins_to_serialize: list[str] = []
        self.profile: Profile | None = None
        self.cache: TimingCache | None = None

    def set_compute_capability(self, capability: ComputeCapability, i: int) -> None:
        assert i == len(self.capabilities)
        self.capabilities.append(capability)

    def set_flag(self, flag: BuilderFlag) -> None:
        self.tf32 = True

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.tf32 = False

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        self.workspace = size

    def add_optimization_profile(self, profile: Profile) -> int:
        self.profile = profile
        return 0

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache(data)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        if cache.data.startswith(b"of another version"):
            return False
        self.cache = cache
        return True


class Builder:
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        # TensorRT-RTX logs this on every machine without a driver, and builds all the same.
        logger.log(Severity.ERROR, "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (cudaError 35)")

    def create_network(self, flags: int) -> Network:
        return Network(flags)

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        if FAULT == "hang":
            time.sleep(60)
        if FAULT == "no_build":
            self._logger.log(Severity.ERROR, "Could not find any implementation for node c9")
            return None
        table = "\n".join(_describe(layer, at) for at, layer in enumerate(network.graph.node))
        if FAULT != "no_table":
            self._logger.log(Severity.VERBOSE, f"Layers:\n{table}")
        said = {
            "flags": network.flags,
            "capabilities": [capability.name for capability in config.capabilities],
            "count": config.num_compute_capabilities,
            "tf32": config.tf32,
            "workspace": config.workspace,
            "profile": config.profile.shapes if config.profile else None,
            "library_path": os.environ.get("LD_LIBRARY_PATH"),
            "folder": sorted(os.listdir(".")),
            "tensors": [
                [tensor.name, mode.name, tensor.dtype.name, tensor.shape]
                for mode, values in (
                    (TensorIOMode.INPUT, network.graph.input),
                    (TensorIOMode.OUTPUT, network.graph.output),
                )
                for tensor in map(Tensor, values)
            ],
        }
        return engine_bytes(json.dumps(said).encode() + _plugins(config))


class LayerInformationFormat(enum.Enum):
    JSON = 0


class Inspector:
    """Shows three plugin layers, or two where a layer was to be lost."""

    def get_engine_information(self, kind: LayerInformationFormat) -> str:
        tensor = {"Name": "x", "Dimensions": [1, 16, 8, 8], "Format/Datatype": "Row major linear FP32"}
        names = ["c1", "c2 [decorated]", "c3"][: int(os.environ.get("FAKE_TRT_LAYERS", "3"))]
        layers: list[object] = [
            {"Name": name, "LayerType": "PluginV3", "Inputs": [tensor], "Outputs": [tensor]} for name in names
        ]
        return json.dumps(
            {"Layers": [*layers, {"Name": "gemm", "LayerType": "gemm"}, "a name alone"], "Bindings": ["x"]}
        )


class Engine:
    def __init__(self, logger: Any, plan: bytes) -> None:
        self.logger = logger
        said = json.JSONDecoder().raw_decode(plan[28:].decode("latin-1"))[0]
        self._tensors = {
            name: (TensorIOMode[mode], DataType[kind], tuple(shape)) for name, mode, kind, shape in said["tensors"]
        }
        self._profile: dict[str, list[list[int]]] = said["profile"] or {}

    num_io_tensors = property(lambda self: len(self._tensors))

    def get_tensor_name(self, i: int) -> str:
        return list(self._tensors)[i]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._tensors[name][0]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self._tensors[name][1]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert profile == 0
        return [tuple(shape) for shape in self._profile[name]]

    def create_engine_inspector(self) -> Inspector:
        return Inspector()

    def create_execution_context(self) -> Context | None:
        if FAULT == "no_context":
            self.logger.log(Severity.ERROR, "Requested size was 17 bytes, out of memory")
            return None
        return Context(self)


class Context:
    """Open first dimensions of outputs are the first input's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if FAULT == "no_shape":
            self._engine.logger.log(Severity.ERROR, "Static dimension mismatch")
            return False
        self._shapes[name] = shape
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._names(TensorIOMode.INPUT) if name not in self._shapes]

    def _names(self, mode: TensorIOMode) -> list[str]:
        names = (self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors))
        return [name for name in names if self._engine.get_tensor_mode(name) == mode]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        batch = next(iter(self._shapes.values()))[0]
        return tuple(batch if size == -1 else size for size in self._engine.get_tensor_shape(name))

    def set_tensor_address(self, name: str, address: int) -> bool:
        if address % 256:
            self._engine.logger.log(Severity.ERROR, "address is not aligned")
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        names = [*self._names(TensorIOMode.INPUT), *self._names(TensorIOMode.OUTPUT)]
        if FAULT == "no_run" or set(names) != set(self._addresses):
            self._engine.logger.log(Severity.ERROR, "Address is not set for output tensor y")
            return False
        tensors = {name: (self._addresses[name], self.get_tensor_shape(name)) for name in names}
        CALLS.append({"stream": stream_handle, "tensors": tensors})
        if EXECUTE is not None:
            EXECUTE(tensors)
        return True


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.engine_host_code_allowed = False

    def get_plugin_registry(self) -> Registry:
        return _registry

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        if FAULT == "no_load":
            self._logger.log(Severity.ERROR, "The engine cannot run on this GPU")
            return None
        assert self.engine_host_code_allowed or _registry.libraries, "the plugin comes first"
        return Engine(self._logger, plan)


def _describe(node: onnx.NodeProto, at: int) -> str:
    tensor = (
        "Dimensions: [-1,16,8,8], Strides: [1024,64,8,1], StrideOrder: [3,2,1,0], Datatype: Float, Format: (Linear) Row major "
        "linear format }"
    )
    kind = "custom_layer" if node.op_type == "SparseConv2d" else "correlation"
    return (
        f"Name: {node.name}_myl0_{at}, LayerType: {kind}, Inputs: [ {{ Name: x.1_18_myl0, {tensor}], "
        f"Constants: [ {{ Name: __mye2088dconst, Dimensions: [64], Strides: [1], StrideOrder: [0], Datatype: Int32, Format: (Linear) Row "
        f"major linear format }}], Outputs: [ {{ Name: y, {tensor}], TacticName: , StreamId: 0, Metadata: [ONNX Layer: {node.name}]"
    )


def _plugins(config: Config) -> bytes:
    if FAULT == "drop_plugin":
        return b""
    return b"".join(Path(plugin).read_bytes() for plugin in config.plugins_to_serialize)


MAGIC = b"vtrt"


def engine_bytes(body: bytes) -> bytes:
    """A header as TensorRT writes it (its size at byte 16, the version at 24), then the body."""
    size = (28 + len(body)).to_bytes(8, "little")
    return MAGIC + bytes(12) + size + bytes((1, 7, 1, 116)) + body


class Creator:
    name = "SparseConv2d"


class Registry:
    def __init__(self) -> None:
        self.libraries: list[str] = []

    @property
    def all_creators(self) -> list[Creator]:
        return [Creator()] if self.libraries and FAULT != "no_creator" else []

    def load_library(self, path: str) -> object | None:
        if self.libraries:  # as the real one: a second creator of the same name is refused
            return None
        self.libraries.append(path)
        return object()

    def get_creator(self, name: str, version: str, namespace: str) -> object | None:
        known = (name, version, namespace) == ("SparseConv2d", "1", "") and FAULT != "no_creator"
        return object() if known and self.libraries else None


_registry = Registry()


def get_plugin_registry() -> Registry:
    return _registry
