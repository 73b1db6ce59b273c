"""Lean copies of a model: everything but the large tensors, so that none of them is serialised on the way.

Inlining, shape inference and the checker need the graph alone, and a side file is written one tensor at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from sparsedeploy.converters.graph import bodies, node_label
from sparsedeploy.errors import InputError, MachineError

SMALL = 1024
"""Bytes up to which a tensor counts as small: kept in lean copies and never written to a side file."""
_PAGE = 4096  # ONNX recommends page-aligned offsets, so that runtimes can map the side file
_CHUNK = 1 << 24
_STUB = "sparsedeploy-stub:"
_BITS_4 = ("INT4", "UINT4", "FLOAT4E2M1")
_BITS_2 = ("INT2", "UINT2")


def all_graphs(proto: ModelProto) -> Iterator[GraphProto]:
    """The main graph and every body in it; bodies in functions too."""
    yield from with_bodies(proto.graph)
    for function in proto.functions:
        for node in function.node:
            for body in bodies(node):
                yield from with_bodies(body)


def with_bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and the bodies of its nodes, at any depth."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from with_bodies(body)


def all_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    """Every node of a model: main graph, bodies, functions."""
    for graph in all_graphs(proto):
        yield from graph.node
    for function in proto.functions:
        yield from function.node


def all_tensors(proto: ModelProto) -> Iterator[tuple[TensorProto, str]]:
    """Every dense tensor of a model, with words for where it is."""
    for graph in all_graphs(proto):
        for tensor in graph.initializer:
            yield tensor, f"initializer '{tensor.name}'"
        for sparse in graph.sparse_initializer:
            yield sparse.values, f"sparse initializer '{sparse.values.name}'"
            yield sparse.indices, f"the indices of sparse initializer '{sparse.values.name}'"
    for node in all_nodes(proto):
        for entry in node.attribute:
            if not _holds_tensors(entry):
                continue
            where = f"attribute '{entry.name}' of {node.op_type} '{node_label(node)}'"
            if entry.HasField("t"):
                yield entry.t, where
            for tensor in entry.tensors:
                yield tensor, where
            for sparse in [entry.sparse_tensor] if entry.HasField("sparse_tensor") else entry.sparse_tensors:
                yield sparse.values, where
                yield sparse.indices, where


def is_external(tensor: TensorProto) -> bool:
    """Whether a tensor's data lies in a side file."""
    return bool(tensor.HasField("data_location") and tensor.data_location == TensorProto.EXTERNAL)


def tensor_bytes(tensor: TensorProto) -> int:
    """Size of a tensor's data as raw bytes, from its dims and type; strings count as 16 bytes each."""
    count = 1
    for dim in tensor.dims:
        count *= dim
    if tensor.data_type == TensorProto.STRING:
        return count * 16
    name = TensorProto.DataType.Name(tensor.data_type)
    if name in _BITS_4:
        return (count + 1) // 2
    if name in _BITS_2:
        return (count + 3) // 4
    return count * int(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)


def skeleton(proto: ModelProto) -> ModelProto:
    """A copy without tensor data above 1 KB, for shape inference and checks.

    Large initializers and Constant nodes become typed graph inputs of the same name; those inside bodies become inputs
    of the main graph, under a new name. Large tensors in other attributes are dropped, and so are model-local functions.
    """
    lean, parked = lean_copy(proto, attributes=True)
    del lean.functions[:]
    if parked:
        taken = {name for graph in all_graphs(lean) for node in graph.node for name in (*node.input, *node.output)}
        taken |= {value.name for graph in all_graphs(lean) for value in (*graph.input, *graph.initializer)}
        _hoist(lean.graph, lean.graph, {}, taken)
    return lean


def _hoist(graph: GraphProto, top: GraphProto, renamed: dict[str, str], taken: set[str]) -> None:
    """Turn the stubs of a graph and its bodies into inputs of `top`. `renamed` holds what outer graphs renamed."""
    own = {name for node in graph.node for name in node.output}
    own |= {value.name for value in (*graph.input, *graph.initializer)}
    renamed = {name: new for name, new in renamed.items() if name not in own}
    listed = {value.name for value in graph.input}

    def hoist(name: str, tensor: TensorProto) -> None:
        if graph is not top:
            new, count = name, 0
            while new in taken:
                count += 1
                new = f"{name}_{count}"
            taken.add(new)
            renamed[name] = new
            name = new
        if graph is not top or name not in listed:
            top.input.append(typed_input(tensor, name))

    for at in reversed([i for i, tensor in enumerate(graph.initializer) if stub_index(tensor) is not None]):
        hoist(graph.initializer[at].name, graph.initializer[at])
        del graph.initializer[at]
    gone = []
    for at, node in enumerate(graph.node):
        for i in reversed([i for i, entry in enumerate(node.attribute) if _has_stub(entry)]):
            if node.op_type == "Constant" and node.domain == "":
                hoist(node.output[0], node.attribute[i].t)
                gone.append(at)
            else:
                del node.attribute[i]
    for at in reversed(gone):
        del graph.node[at]
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in renamed:
                node.input[i] = renamed[name]
        for body in bodies(node):
            _hoist(body, top, renamed, taken)
    for value in graph.output:
        value.name = renamed.get(value.name, value.name)


def _has_stub(entry: AttributeProto) -> bool:
    tensors = ([entry.t] if entry.HasField("t") else []) + list(entry.tensors)
    return any(stub_index(tensor) is not None for tensor in tensors)


def stub_index(tensor: TensorProto) -> int | None:
    """Which parked tensor a stub stands for; None for a tensor that is no stub."""
    if not is_external(tensor) or len(tensor.external_data) != 1:
        return None
    location = str(tensor.external_data[0].value)
    return int(location[len(_STUB) :]) if location.startswith(_STUB) else None


def lean_copy(proto: ModelProto, *, attributes: bool) -> tuple[ModelProto, list[TensorProto]]:
    """A copy in which every large or external tensor is a stub, and the tensors themselves, still owned by `proto`.

    With attributes=False only initializers become stubs, those of bodies included.
    """
    lean = ModelProto()
    parked: list[TensorProto] = []

    def copy_tensor(source: TensorProto, target: TensorProto, is_attribute: bool) -> None:
        large = tensor_bytes(source) > SMALL and source.data_type != TensorProto.STRING
        if (large or is_external(source)) and (attributes or not is_attribute):
            target.name, target.data_type = source.name, source.data_type
            target.dims.extend(source.dims)
            target.data_location = TensorProto.EXTERNAL
            target.external_data.add(key="location", value=f"{_STUB}{len(parked)}")
            parked.append(source)
        else:
            target.CopyFrom(source)

    def copy_graph(source: GraphProto, target: GraphProto) -> None:
        _copy_fields(source, target, skip=("node", "initializer"))
        for tensor in source.initializer:
            copy_tensor(tensor, target.initializer.add(), False)
        for node in source.node:
            copy_node(node, target.node.add())

    def copy_node(source: NodeProto, target: NodeProto) -> None:
        if not any(_holds_tensors(entry) for entry in source.attribute):
            target.CopyFrom(source)
            return
        _copy_fields(source, target, skip=("attribute",))
        for entry in source.attribute:
            copy_attribute(entry, target.attribute.add())

    def copy_attribute(source: AttributeProto, target: AttributeProto) -> None:
        _copy_fields(source, target, skip=("t", "tensors", "g", "graphs"))
        if source.HasField("t"):
            copy_tensor(source.t, target.t, True)
        for tensor in source.tensors:
            copy_tensor(tensor, target.tensors.add(), True)
        if source.HasField("g"):
            copy_graph(source.g, target.g)
        for graph in source.graphs:
            copy_graph(graph, target.graphs.add())

    _copy_fields(proto, lean, skip=("graph", "functions"))
    copy_graph(proto.graph, lean.graph)
    for function in proto.functions:
        copied = lean.functions.add()
        _copy_fields(function, copied, skip=("node",))
        for node in function.node:
            copy_node(node, copied.node.add())
    return lean, parked


def _holds_tensors(entry: AttributeProto) -> bool:
    return bool(
        entry.HasField("t")
        or entry.HasField("g")
        or entry.HasField("sparse_tensor")
        or entry.tensors
        or entry.graphs
        or entry.sparse_tensors
    )


def _copy_fields(source: onnx.ModelProto, target: onnx.ModelProto, skip: tuple[str, ...]) -> None:
    """Copy the set fields of any message but the skipped ones."""
    for field, value in source.ListFields():
        if field.name in skip:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def write_lean(lean: ModelProto, parked: list[TensorProto], base_dir: Path, path: Path) -> tuple[Path, Path]:
    """Write a lean copy, its stubs' data to `<name>.data` beside it: only one tensor is in memory at a time."""
    side = side_file(path)
    stubs = [(tensor, at) for tensor, _ in all_tensors(lean) if (at := stub_index(tensor)) is not None]

    def stream_all(stream: BinaryIO) -> None:
        for stub, at in stubs:
            start = -(-stream.tell() // _PAGE) * _PAGE
            stream.write(b"\0" * (start - stream.tell()))
            _stream_data(parked[at], base_dir, stream)
            del stub.external_data[:]
            for key, value in (("location", side.name), ("offset", start), ("length", stream.tell() - start)):
                stub.external_data.add(key=key, value=str(value))

    write_whole(side, stream_all)
    for tensor, _ in all_tensors(lean):
        if is_external(tensor) and not any(entry.value == side.name for entry in tensor.external_data):
            pull_in(tensor, base_dir)  # in attributes, which runtimes do not read from side files
    write_whole(path, lambda stream: stream.write(lean.SerializeToString(deterministic=True)))
    return path, side


def _stream_data(tensor: TensorProto, base_dir: Path, stream: BinaryIO) -> None:
    if is_external(tensor):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        left = tensor_bytes(tensor)
        with (base_dir / entries["location"]).open("rb") as source:
            source.seek(int(entries.get("offset") or 0))
            while left and (block := source.read(min(left, _CHUNK))):
                stream.write(block)
                left -= len(block)
    elif tensor.HasField("raw_data"):
        stream.write(tensor.raw_data)
    else:
        stream.write(numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data)


def pull_in(tensor: TensorProto, base_dir: Path) -> None:
    """Read an external tensor's data into the tensor; raises InputError when its side file is no longer what it was."""
    try:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(base_dir))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise InputError(
            f"The data of tensor '{tensor.name}' cannot be read from its side file in {base_dir}: "
            f"{' '.join(str(error).split())}. Put the file back and run again."
        ) from error


def typed_input(tensor: TensorProto, name: str | None = None) -> onnx.ValueInfoProto:
    """A graph input with a tensor's name (or another), type and shape."""
    return onnx.helper.make_tensor_value_info(
        tensor.name if name is None else name, tensor.data_type, list(tensor.dims)
    )


def side_file(path: Path) -> Path:
    """Where `save` puts the data of a model too large for one file."""
    return path.with_name(path.name + ".data")


def write_whole(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write through a temporary name, so that an interrupted run leaves no half file."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as stream:
            fill(stream)
        os.replace(part, path)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be written: {error.strerror or error}. Check the folder and the disk space."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
