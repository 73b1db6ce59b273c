"""Read a model file into a Model that every later pass can trust, and write one back.

Large tensors are never serialised on the way: what needs the graph alone (inlining, shape inference, the checker) works
on a lean copy in which they are stubs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto, numpy_helper

from sparsedeploy.converters.check_convs import check_convs
from sparsedeploy.converters.graph import Model, bodies, node_label, outer_names
from sparsedeploy.converters.lean import (
    SMALL,
    all_graphs,
    all_nodes,
    all_tensors,
    is_external,
    lean_copy,
    pull_in,
    side_file,
    skeleton,
    stub_index,
    tensor_bytes,
    typed_input,
    with_bodies,
    write_lean,
    write_whole,
)
from sparsedeploy.errors import InputError, MachineError

__all__ = ["load", "save", "skeleton"]

SIDE_FILE_ABOVE = 1_500_000_000
"""Total tensor bytes above which `save` writes a side file: one protobuf message ends at 2 GiB."""
_PROTOBUF_LIMIT = 2**31
_TORCH_EXPORT = 'torch.onnx.export(model.eval(), (torch.zeros(1, 3, 224, 224),), "model.onnx")'

_FOREIGN: tuple[tuple[int, bytes, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model itself; fetch it with `git lfs pull`"),
    (0, b"\x89HDF", "an HDF5 file (Keras?); convert it with tf2onnx first"),
    (4, b"TFL3", "a TensorFlow Lite model; convert it with tf2onnx first"),
    (4, b"ORTM", "an ONNX Runtime .ort file; give the .onnx it was made from"),
    (0, b"ftrt", "a TensorRT engine; give the .onnx it was built from"),
    (0, b"<!DOCTYPE", "a web page, so the download went wrong; fetch the file again"),
    (0, b"<html", "a web page, so the download went wrong; fetch the file again"),
    (0, b"\x1f\x8b", "gzip-compressed; unpack it first"),
)


def load(path: Path) -> Model:
    """Read an ONNX file; external tensors above 1 KB stay on disk.

    What later passes need not know about is undone here, each with a note: model-local functions are inlined, sparse
    initializers made dense, initializers no longer listed as inputs (IR 4 and later; before, the format demands it),
    nodes put in order, "ai.onnx" spelled "". Raises InputError for a file that is not a sound ONNX model, for a missing
    side file, and for a Conv whose weight or bias is not finite or does not fit its attributes.
    """
    path = Path(path)
    model = Model(_parse(path), path)
    _check_texts(model)
    _check_tensors(model)
    _make_dense(model)
    _spell_default_domain(model.proto)
    _inline_functions(model)
    _list_inputs(model)
    _order_nodes(model)
    _check_structure(model)
    check_convs(model)
    model.path = path.absolute()  # its side files are read later, from whatever working directory
    return model


# --- the file -----------------------------------------------------------------------------------------------------


def _parse(path: Path) -> ModelProto:
    data = _read_file(path)
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError, from a package without types
        # An ONNX file starts with field 1, ir_version, or field 8, opset_import.
        kind = "a truncated or damaged ONNX model" if data[:1] in (b"\x08", b"\x42") else "not an ONNX model"
        raise InputError(
            f"{path} is {kind}: its {len(data)} bytes cannot be read as protobuf. Copy or export it again; "
            f"`python -c 'import onnx; onnx.load(\"{path.name}\")'` must succeed."
        ) from error
    if not proto.HasField("graph") or not proto.graph.node or not proto.graph.output:
        raise InputError(
            f"{path} is not an ONNX model with a graph: it holds {len(proto.graph.node)} nodes and "
            f"{len(proto.graph.output)} outputs. Give a model file that ONNX Runtime can run."
        )
    if not proto.opset_import:
        raise InputError(
            f"{path} names no operator set (opset_import is empty), so no node has a meaning. Export it again."
        )
    return proto


def _read_file(path: Path) -> bytes:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the .onnx file in it.")
    if not path.exists():
        raise InputError(f"{path} does not exist; check the path, the working directory is {Path.cwd()}.")
    if not path.is_file():
        raise InputError(f"{path} is not a regular file; give an .onnx file.")
    try:
        size = path.stat().st_size
        if size >= _PROTOBUF_LIMIT:
            raise InputError(
                f"{path} is {size / 1e9:.1f} GB, but one protobuf message ends at 2 GiB; save the model with external "
                "data "
                f"(onnx.save(model, path, save_as_external_data=True)) and give that file."
            )
        data = path.read_bytes()
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror or error}. Check its permissions.") from error
    if not data:
        raise InputError(f"{path} is empty (0 bytes); copy or export it again.")
    if path.suffix.lower() in (".pt", ".pth") or data[:4] == b"PK\x03\x04" or data[:2] in (b"\x80\x02", b"\x80\x04"):
        raise InputError(
            f"{path} looks like a PyTorch checkpoint, not an ONNX model. Export it to ONNX first, where the model's "
            "class "
            f"exists: {_TORCH_EXPORT}, with an example input of your model's size."
        )
    for offset, magic, words in _FOREIGN:
        if data[offset : offset + len(magic)] == magic:
            raise InputError(f"{path} is {words}.")
    return data


# --- soundness of what the file says ------------------------------------------------------------------------------


def _check_texts(model: Model) -> None:
    """Protobuf hands out a name that is no UTF-8 as bytes, and every later comparison with it would go wrong; control
    characters would break every message and table.
    """
    for text in _texts(model.proto):
        if not isinstance(text, str) or (text and not text.isprintable() and min(text) < " "):
            raise InputError(f"{model.path} is damaged: it holds the name {text!r}, which is no text. Export it again.")


def _texts(proto: ModelProto) -> Iterator[object]:
    yield from (entry.domain for entry in proto.opset_import)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from (entry.domain for entry in function.opset_import)
    for graph in all_graphs(proto):
        yield graph.name
        yield from (tensor.name for tensor in graph.initializer)
        yield from (sparse.values.name for sparse in graph.sparse_initializer)
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            if value.type.HasField("tensor_type"):
                yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for node in all_nodes(proto):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for entry in node.attribute:
            yield entry.name
            yield entry.ref_attr_name


def _check_tensors(model: Model) -> None:
    """Check every tensor's type and size against its data, and read small external ones into the model."""
    for tensor, where in all_tensors(model.proto):
        problem = None
        if tensor.data_type == TensorProto.UNDEFINED or tensor.data_type not in TensorProto.DataType.values():
            problem = f"its data type {tensor.data_type} is unknown"
        elif any(dim < 0 for dim in tensor.dims):
            problem = f"its shape {list(tensor.dims)} has a negative dimension"
        elif is_external(tensor):
            _check_side_file(model, tensor, where)
            if tensor_bytes(tensor) <= SMALL:
                pull_in(tensor, model.base_dir)
        elif tensor.HasField("raw_data"):
            found, needed = len(tensor.raw_data), tensor_bytes(tensor)
            if found != needed:
                problem = f"it holds {found} bytes of data, and its shape {list(tensor.dims)} needs {needed}"
        else:
            try:
                numpy_helper.to_array(tensor)
            except Exception as error:  # whatever numpy or onnx says of data that does not fit its own shape
                problem = f"its data does not fit its shape {list(tensor.dims)} ({_one_line(error)})"
        if problem:
            raise InputError(f"{model.path}: {where} is damaged: {problem}. Copy or export the model again.")


def _check_side_file(model: Model, tensor: TensorProto, where: str) -> None:
    """Refuse what onnx itself would only refuse much later, when the data is read."""
    entries = {str(entry.key): str(entry.value) for entry in tensor.external_data}
    location = entries.get("location", "")
    start = f"{model.path}: {where} keeps its data in the side file '{location}'"
    inside = Path(os.path.normpath(location))
    if not location or "\0" in location or inside.is_absolute() or ".." in inside.parts:
        raise InputError(
            f"{start}, which is not a file name inside the model's own folder; reading elsewhere is refused. "
            f"Save the model again with its data beside it."
        )
    side = model.base_dir / inside
    if not side.is_file():
        hint = f"it is looked for beside the file that {model.path.name} links to. " if model.path.is_symlink() else ""
        raise InputError(
            f"{start}, but {side} does not exist; {hint}Put the side file there (both files move together), or save "
            "the "
            f"model again as one file."
        )
    if any((model.base_dir / Path(*inside.parts[:depth])).is_symlink() for depth in range(1, len(inside.parts) + 1)):
        raise InputError(
            f"{start}, but {side} is a symbolic link, which onnx refuses to follow; put a copy in its place."
        )
    needed, size = tensor_bytes(tensor), side.stat().st_size
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or size - offset)
    except ValueError:
        offset, length = -1, -1
    if offset < 0 or length != needed or offset + length > size or tensor.data_type == TensorProto.STRING:
        raise InputError(
            f"{start} at offset {entries.get('offset', 0)}, length {entries.get('length', 'not said')}; the file has "
            f"{size} "
            f"bytes and the tensor's shape {list(tensor.dims)} needs {needed}. The side file is truncated or belongs "
            "to "
            f"another export: copy both files again."
        )


def _check_structure(model: Model) -> None:
    """Let onnx's checker look at a lean copy; what only a newer or a custom operator set could judge is let through."""
    lean = skeleton(model.proto)
    _let_unknowns_through(lean)
    try:
        onnx.checker.check_model(lean)
    except Exception as error:  # the checker raises its own type, and C++ exceptions on damaged files
        raise InputError(
            f"{model.path} is not a valid ONNX model: {_one_line(error)}. Export it again, or repair it until "
            f"onnx.checker.check_model accepts it."
        ) from error


def _let_unknowns_through(lean: ModelProto) -> None:
    graph = lean.graph
    lean.ir_version = min(lean.ir_version, onnx.IR_VERSION)
    graph.name = graph.name or "graph"
    for value in (*graph.input, *graph.output):
        if not value.HasField("type"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    versions = {entry.domain: entry.version for entry in lean.opset_import}
    for node in all_nodes(lean):
        if node.domain == "" and not _known(node.op_type, versions.get("", 0)):
            node.domain = "unknown"
        if node.domain not in versions:
            versions[node.domain] = 1
            lean.opset_import.append(onnx.helper.make_opsetid(node.domain, 1))


def _known(op_type: str, version: int) -> bool:
    try:
        return not onnx.defs.get_schema(op_type, version).deprecated
    except onnx.defs.SchemaError:
        return False


def _one_line(error: BaseException) -> str:
    """The first sentences of a message, on one line and without its final stop."""
    return " ".join(str(error).split())[:600].rstrip(". ")


# --- undoing what later passes need not know ----------------------------------------------------------------------


def _make_dense(model: Model) -> None:
    count = 0
    for graph in all_graphs(model.proto):
        for sparse in graph.sparse_initializer:
            graph.initializer.append(_dense(model, sparse))
            count += 1
        del graph.sparse_initializer[:]
    if count:
        model.notes.append(f"{_plural(count, 'sparse initializer')} read and made dense")


def _dense(model: Model, sparse: SparseTensorProto) -> TensorProto:
    """A COO tensor as a dense one: indices are linear [nnz] or coordinates [nnz, rank]."""
    name, dims = sparse.values.name, tuple(sparse.dims)
    values = numpy_helper.to_array(sparse.values, str(model.base_dir)).reshape(-1)
    indices = np.asarray(numpy_helper.to_array(sparse.indices, str(model.base_dir)))
    indices = indices if np.issubdtype(indices.dtype, np.integer) else np.full(1, -1)
    start = f"{model.path}: sparse initializer '{name}' of shape {list(dims)}"
    if (
        values.dtype.kind == "O"
        or not dims
        or min(dims) < 1
        or float(np.prod(dims, dtype=np.float64)) * values.itemsize >= _PROTOBUF_LIMIT
    ):
        raise InputError(
            f"{start} cannot be made dense: it must hold numbers, at least one and below 2 GiB. Export it dense."
        )
    size = int(np.prod(dims, dtype=np.int64))
    linear = indices
    if indices.ndim == 2 and indices.shape == (values.size, len(dims)):
        inside = bool(((indices >= 0) & (indices < np.asarray(dims))).all())
        linear = np.ravel_multi_index(tuple(indices.T), dims) if inside else indices
    else:
        inside = indices.shape == (values.size,) and bool(((indices >= 0) & (indices < size)).all())
    if not inside:
        raise InputError(
            f"{start} holds {values.size} values, but its indices (shape {list(indices.shape)}) are not one position "
            f"inside that shape for each. The file is damaged: export it again."
        )
    flat = np.zeros(size, values.dtype)
    flat[linear] = values
    return numpy_helper.from_array(flat.reshape(dims), name)


def _spell_default_domain(proto: ModelProto) -> None:
    for node in all_nodes(proto):
        if node.domain == "ai.onnx":
            node.domain = ""
    for owner in (proto, *proto.functions):
        default = [entry for entry in owner.opset_import if entry.domain in ("", "ai.onnx")]
        if any(entry.domain for entry in default):
            version = max(entry.version for entry in default)
            others = [
                (entry.domain, entry.version) for entry in owner.opset_import if entry.domain not in ("", "ai.onnx")
            ]
            del owner.opset_import[:]
            owner.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in [("", version), *others])


def _inline_functions(model: Model) -> None:
    """Inline model-local functions on a lean copy, because the inliner serialises it, then put the tensors back."""
    if not model.proto.functions:
        return
    names = {(function.domain, function.name) for function in model.proto.functions}
    _refuse_recursion(model)
    lean, parked = lean_copy(model.proto, attributes=True)
    try:
        inlined = onnx.inliner.inline_local_functions(lean)
    except Exception as error:  # C++ exceptions of any kind on malformed functions
        raise InputError(
            f"{model.path}: its {_plural(len(names), 'model-local function')} cannot be inlined: {_one_line(error)}. "
            "Export "
            f"the model without functions (torch.onnx.export(..., export_modules_as_functions=False))."
        ) from error
    for tensor, _ in all_tensors(inlined):
        at = stub_index(tensor)
        if at is not None:
            name = tensor.name  # the inliner renames values
            tensor.CopyFrom(parked[at])
            tensor.name = name
    model.proto = inlined
    left = sorted(function.name for function in inlined.functions)
    if len(names) > len(left):
        model.notes.append(f"{_plural(len(names) - len(left), 'model-local function')} inlined")
    if left:
        model.notes.append(
            f"functions {', '.join(left)} were written for another opset than the model's and are not inlined: "
            f"convolutions in them are not seen"
        )


def _refuse_recursion(model: Model) -> None:
    """A function that calls itself would send the inliner into endless recursion."""
    calls: dict[tuple[str, str], set[tuple[str, str]]] = {
        (function.domain, function.name): {
            (node.domain, node.op_type) for top in function.node for node in (top, *_body_nodes(top))
        }
        for function in model.proto.functions
    }
    finished: set[tuple[str, str]] = set()
    while ready := {
        key for key, called in calls.items() if key not in finished and (called & calls.keys()) <= finished
    }:
        finished |= ready
    if stuck := sorted(name for _, name in calls.keys() - finished):
        raise InputError(
            f"{model.path}: model-local function '{stuck[0]}' calls itself, which ONNX forbids. Export it again."
        )


def _body_nodes(node: NodeProto) -> Iterator[NodeProto]:
    for body in bodies(node):
        for graph in with_bodies(body):
            yield from graph.node


def _list_inputs(model: Model) -> None:
    """Initializers among the graph inputs: required before IR 4, where missing ones are added; defaults a caller may
    override from IR 4 on, where they are taken off the list, because we treat them as constants.
    """
    graph = model.proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    listed = {value.name for value in graph.input}
    both = listed & constants.keys()
    if both:
        model.notes.append(
            f"{_plural(len(both), 'initializer')} also listed as graph input (as files of IR 3 do): treated as constant"
        )
    if model.proto.ir_version >= 4:
        for at in reversed([i for i, value in enumerate(graph.input) if value.name in both]):
            del graph.input[at]
    else:
        graph.input.extend(typed_input(constants[name]) for name in constants if name not in listed)


def _order_nodes(model: Model) -> None:
    """Check that every value read is made somewhere, and sort the nodes where one reads what a later one makes."""
    graph = model.proto.graph
    ready = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    made = ready.union(*(node.output for node in graph.node))
    reads = [set(node.input) | outer_names(node) for node in graph.node]
    for node, names in zip(graph.node, reads, strict=True):
        if missing := sorted(names - made):
            raise InputError(
                f"{model.path}: {node.op_type} '{node_label(node)}' reads '{missing[0]}', which no node, input or "
                "initializer "
                f"of the model makes. The export is incomplete: export the model again."
            )
    if missing := sorted({value.name for value in graph.output} - made):
        raise InputError(f"{model.path}: its output '{missing[0]}' is made by no node. Export the model again.")
    order = _topological(ready, [set(node.output) for node in graph.node], reads)
    if len(order) < len(reads):
        stuck = min(set(range(len(reads))) - set(order))
        raise InputError(
            f"{model.path}: {graph.node[stuck].op_type} '{node_label(graph.node[stuck])}' depends on its own output: "
            "the graph "
            f"has a cycle. Export the model again."
        )
    if order != list(range(len(order))):
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        del graph.node[:]
        graph.node.extend(nodes[at] for at in order)
        model.notes.append("nodes put in an order in which every value is made before it is read")


def _topological(ready: set[str], makes: list[set[str]], reads: list[set[str]]) -> list[int]:
    """Indices in file order where that is valid, else moved back as little as needed; nodes in cycles are left out."""
    known, order, waiting = set(ready), [], list(range(len(reads)))
    while waiting:
        later = []
        for at in waiting:
            if reads[at] <= known:
                known |= makes[at]
                order.append(at)
            else:
                later.append(at)
        if len(later) == len(waiting):
            break
        waiting = later
    return order


# --- writing ------------------------------------------------------------------------------------------------------


def save(model: Model, path: Path, *, side_file_above: int = SIDE_FILE_ABOVE) -> tuple[Path, ...]:
    """Write a model; returns the files written. Equal models give equal bytes.

    External tensors are pulled into the file (and into model.proto). When all tensors together exceed `side_file_above`
    bytes, initializers above 1 KB go to `<name>.data` beside it instead, one at a time, and model.proto stays as it was.
    Raises InputError when that would overwrite the user's own file, MachineError when it cannot be written.
    """
    tensors = [tensor for tensor, _ in all_tensors(model.proto)]
    total = sum(tensor_bytes(tensor) for tensor in tensors)
    _spare_the_original(model, path, tensors)
    if total > side_file_above:
        lean, parked = lean_copy(model.proto, attributes=False)
        return tuple(write_lean(lean, parked, model.base_dir, path))
    for tensor in tensors:
        if is_external(tensor):
            pull_in(tensor, model.base_dir)
    write_whole(path, lambda stream: stream.write(model.proto.SerializeToString(deterministic=True)))
    return (path,)


def _spare_the_original(model: Model, path: Path, tensors: list[TensorProto]) -> None:
    sides = {
        entry.value
        for tensor in tensors
        if is_external(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    kept = {model.path.resolve(), *((model.base_dir / side).resolve() for side in sides)}
    for target in (path, side_file(path)):
        if target.resolve() in kept:
            raise InputError(
                f"{target} belongs to the model being read and would be overwritten; choose another output name."
            )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
