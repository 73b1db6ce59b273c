"""Concrete input shapes from what the file leaves open and the user gives, and the shapes of all values from those."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto

from sparsedeploy.converters.graph import Array, Graph, Model
from sparsedeploy.converters.lean import lean_copy, skeleton, typed_input, write_lean
from sparsedeploy.errors import InputError, SparseDeployError

Shape = tuple[int | str, ...]
"""Sizes; a str is a size nobody knows, spelled as the file does ("?" where it has no name)."""
_LETTERS = {4: "NCHW", 3: "NCL"}
_RUN_LIMIT = 1 << 28
"""Elements that inputs together may have for one run of the model to learn shapes."""


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Split `name=1x3x224x224` at its last "="; raises InputError for anything else."""
    name, equals, dims = text.rpartition("=")
    words = dims.lower().split("x")
    if not equals or not name or not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise InputError(
            f"--shape {shlex.quote(text)} is not understood: needed is the input's name, =, and positive sizes with x "
            "between, "
            f"such as --shape images=1x3x224x224."
        )
    return name, tuple(int(word) for word in words)


# --- inputs -------------------------------------------------------------------------------------------------------


def resolve_inputs(model: Model, given: Mapping[str, tuple[int, ...]], batch: int | None) -> dict[str, tuple[int, ...]]:
    """The concrete shape of every input of a model.

    Open are named, -1, 0, "?" and absent dimensions. An input in `given` has that shape; a name that two open dimensions
    share has one size. The open first dimension of an input of two or more takes `batch`, else that of the given
    inputs, else 1. Raises InputError listing what is still open, and for given shapes or a batch that contradict the
    file.
    """
    inputs = {str(value.name): _dims(model, value) for value in model.graph.inputs()}
    sizes = _match_given(model, inputs, given)
    firsts = {given[name][0] for name, dims in inputs.items() if name in given and _takes_batch(dims)}
    size = batch if batch is not None else firsts.pop() if len(firsts) == 1 else 1
    _check_batch(model, inputs, given, batch)
    for name, dims in inputs.items():
        if name not in given and dims is not None and _takes_batch(dims) and _is_symbol(dims[0]):
            sizes.setdefault(str(dims[0]), size)
    resolved: dict[str, tuple[int, ...]] = {}
    missing: dict[str, list[int | str] | None] = {}
    for name, dims in inputs.items():
        if name in given:
            resolved[name] = given[name]
            continue
        known: list[int | str] = [sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in dims or ()]
        if _takes_batch(dims) and isinstance(known[0], str):
            known[0] = size
        whole = tuple(dim for dim in known if isinstance(dim, int))
        if dims is not None and len(whole) == len(known):
            resolved[name] = whole
        else:
            missing[name] = None if dims is None else known
    if missing:
        raise InputError(_ask_for(model, inputs, missing))
    return resolved


def _dims(model: Model, value: ValueInfoProto) -> tuple[int | str, ...] | None:
    """An input's dimensions, open ones as str; None without a rank."""
    if not value.type.HasField("tensor_type"):
        raise InputError(
            f"{model.path}: its input '{value.name}' is no tensor but a sequence, map or optional, which cannot be "
            "given here. "
            f"Export the model with tensor inputs only."
        )
    if not value.type.tensor_type.HasField("shape"):
        return None
    return _shape_of(value)


def _shape_of(value: ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(
        int(dim.dim_value)
        if dim.dim_value > 0
        else str(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?")
        for dim in value.type.tensor_type.shape.dim
    )


def _is_symbol(dim: int | str) -> bool:
    """Whether an open dimension has a name that means the same size wherever it stands."""
    return isinstance(dim, str) and dim not in ("?", "-1", "0") and not dim.lstrip("-").isdigit()


def _takes_batch(dims: tuple[int | str, ...] | None) -> bool:
    return dims is not None and len(dims) >= 2 and isinstance(dims[0], str)


def _match_given(
    model: Model, inputs: Mapping[str, tuple[int | str, ...] | None], given: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    """Check the given shapes against the file; returns the size of each named dimension they settle."""
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        if name not in inputs:
            known = ", ".join(f"'{entry}'" for entry in inputs) or "no inputs at all"
            raise InputError(f"--shape names '{name}', but {model.path.name} has {known}. Use one of its input names.")
        dims = inputs[name]
        if dims is None:
            continue
        agree = [isinstance(dim, str) or dim == size for dim, size in zip(dims, shape, strict=False)]
        fits = len(dims) == len(shape) and all(agree)
        if not fits or min(shape, default=1) < 1:
            raise InputError(
                f"--shape {name}={_joined(shape)} contradicts {model.path.name}, where input '{name}' is "
                f"{_spelled(dims)}: open "
                f"dimensions take any positive size, the others must be as in the file."
            )
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, str) and _is_symbol(dim) and sizes.setdefault(dim, size) != size:
                raise InputError(
                    f"--shape {name}={_joined(shape)} makes dimension '{dim}' {size}, but another place makes it "
                    f"{sizes[dim]}; "
                    f"{model.path.name} uses that name for one size. Give the same number in both places."
                )
    return sizes


def _check_batch(
    model: Model,
    inputs: Mapping[str, tuple[int | str, ...] | None],
    given: Mapping[str, tuple[int, ...]],
    batch: int | None,
) -> None:
    if batch is None:
        return
    if batch < 1:
        raise InputError(f"--batch {batch} is not a batch size; give a number of at least 1.")
    for name, dims in inputs.items():
        fixed = dims is not None and len(dims) >= 4 and isinstance(dims[0], int) and dims[0] != batch
        if name in given and (fixed or _takes_batch(dims)) and given[name][0] != batch:
            raise InputError(
                f"--batch {batch} contradicts --shape {name}={_joined(given[name])}; leave one out or make them agree."
            )
        if fixed and dims is not None:
            raise InputError(
                f"--batch {batch} contradicts {model.path.name}, where input '{name}' is {_spelled(dims)}: the file "
                "fixes the "
                f"batch at {dims[0]}. Leave --batch out, or export the model with a dynamic or another batch."
            )
    takes = [dims for dims in inputs.values() if dims is None or _takes_batch(dims) or (dims and dims[0] == batch)]
    if not takes:
        shapes = ", ".join(f"'{name}' {_spelled(dims)}" for name, dims in inputs.items() if dims is not None)
        raise InputError(
            f"--batch {batch} has nowhere to go: no input of {model.path.name} has an open first dimension ({shapes}). "
            "Leave "
            f"--batch out, or export the model with a dynamic batch."
        )


def _ask_for(
    model: Model,
    inputs: Mapping[str, tuple[int | str, ...] | None],
    missing: Mapping[str, list[int | str] | None],
) -> str:
    found, options, letters = [], [], []
    for name, known in missing.items():
        dims = inputs[name]
        if known is None or dims is None:
            found.append(f"'{name}' without any shape")
            options.append(f"--shape {shlex.quote(name + '=')}1x3xHxW")
            letters += ["H", "W"]
            continue
        names = _LETTERS.get(len(known)) or "".join("D" for _ in known)
        words = [
            str(dim) if isinstance(dim, int) else names[at] if len(known) in _LETTERS else f"D{at}"
            for at, dim in enumerate(known)
        ]
        letters += [word for word in words if not word.isdigit()]
        found.append(f"'{name}' {_spelled(dims)}")
        options.append(f"--shape {shlex.quote(f'{name}=' + 'x'.join(words))}")
    numbers = ", ".join(dict.fromkeys(letters))
    return (
        f"{model.path.name} leaves the size of {'an input' if len(found) == 1 else f'{len(found)} inputs'} open: "
        f"{'; '.join(found)}. Add {' '.join(options)} with numbers for {numbers}."
    )


def _spelled(dims: Iterable[int | str]) -> str:
    return "[" + ", ".join(str(dim) for dim in dims) + "]"


def _joined(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)


# --- all values ---------------------------------------------------------------------------------------------------


def infer_shapes(model: Model, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, Shape]:
    """The shape of every value of the main graph at these input shapes; a value of unknown rank is absent.

    By ONNX's inference, data propagation included. Where that leaves an input or output of a convolution open, the model
    runs once in ONNX Runtime on the CPU to learn it; where it does not run there, it stays open.
    """
    return {name: shape for name, (_, shape) in value_types(model, inputs).items()}


def value_types(model: Model, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Shape]]:
    """As `infer_shapes`, with each value's element type as ONNX names it: "FLOAT", "FLOAT16", "INT64" ..."""
    known = _infer(model, inputs)
    unknown = _open_conv_values(model.graph, known)
    if unknown:
        everything = [name for name in model.graph.producers if not _is_known(known.get(name))]
        known.update(_run_once(model, inputs, everything))
    return known


def _is_known(entry: tuple[str, Shape] | None) -> bool:
    return entry is not None and all(isinstance(dim, int) for dim in entry[1])


def _open_conv_values(graph: Graph, known: Mapping[str, tuple[str, Shape]]) -> list[str]:
    convs = [node for node in graph.proto.node if node.op_type in ("Conv", "ConvTranspose") and node.domain == ""]
    return [name for node in convs for name in (node.input[0], node.output[0]) if not _is_known(known.get(name))]


def _infer(model: Model, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Shape]]:
    lean = skeleton(model.proto)
    _fix_inputs(lean, inputs)
    _forget_shapes(lean)
    try:
        inferred = onnx.shape_inference.infer_shapes(lean, data_prop=True)
    except (
        Exception
    ):  # C++ exceptions on graphs whose shapes contradict each other; then nothing but the inputs is known
        inferred = lean
    graph = inferred.graph
    values = {tensor.name: typed_input(tensor) for tensor in (*model.proto.graph.initializer, *graph.initializer)}
    values |= {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
    return {
        str(name): (_type_name(value.type.tensor_type.elem_type), _shape_of(value))
        for name, value in values.items()
        if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape")
    }


def _type_name(elem_type: int) -> str:
    return str(TensorProto.DataType.Name(elem_type)) if elem_type in TensorProto.DataType.values() else "UNDEFINED"


def _fix_inputs(lean: ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> None:
    for value in lean.graph.input:
        if value.name in inputs:
            value.CopyFrom(
                onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, inputs[value.name])
            )


def _forget_shapes(lean: ModelProto) -> None:
    """Drop recorded shapes that inference can find itself: they may be of another batch than the inputs now."""
    graph = lean.graph
    foreign = {name for node in graph.node if not onnx.defs.has(node.op_type, node.domain) for name in node.output}
    for at in reversed([i for i, value in enumerate(graph.value_info) if value.name not in foreign]):
        del graph.value_info[at]
    for value in graph.output:
        if value.name not in foreign and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")


def _run_once(model: Model, inputs: Mapping[str, tuple[int, ...]], names: list[str]) -> dict[str, tuple[str, Shape]]:
    """Types and shapes of values as ONNX Runtime computes them; empty where it cannot run the model."""
    import onnxruntime

    if sum(int(np.prod(shape, dtype=np.float64)) for shape in inputs.values()) > _RUN_LIMIT:
        return {}
    lean, parked = lean_copy(model.proto, attributes=False)
    present = {value.name for value in lean.graph.output}
    lean.graph.output.extend(ValueInfoProto(name=name) for name in names if name and name not in present)
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-") as folder:
        try:
            path, _ = write_lean(lean, parked, model.base_dir, Path(folder) / "model.onnx")
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            results = session.run(names, _feeds(model, inputs))
        except SparseDeployError:
            raise
        except Exception:  # onnxruntime's own types, one per status code, for what it does not support
            return {}
    return {
        name: (_type_name(onnx.helper.np_dtype_to_tensor_dtype(result.dtype)), tuple(int(dim) for dim in result.shape))
        for name, result in zip(names, results, strict=True)
        if isinstance(result, np.ndarray) and result.dtype != object
    }


def _feeds(model: Model, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Seeded noise for floats, zeros for the rest (indices and flags, for which 0 is the value most often allowed)."""
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in model.graph.inputs():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = inputs[value.name]
        is_float = np.issubdtype(dtype, np.floating)
        feeds[value.name] = random.standard_normal(shape).astype(dtype) if is_float else np.zeros(shape, dtype)
    return feeds


def fix_input_shapes(model: Model, inputs: Mapping[str, tuple[int, ...]]) -> None:
    """Write the sizes a model is converted for into its inputs, the batch apart, for kernels that run one H x W.

    The first dimension stays as the file has it; intermediate shapes recorded with the old symbols are dropped.
    """
    changed = False
    for value in model.graph.inputs():
        tensor, sizes = value.type.tensor_type, inputs[value.name]
        if not tensor.HasField("shape"):
            tensor.shape.dim.extend([onnx.TensorShapeProto.Dimension(dim_value=size) for size in sizes])
            changed = True
            continue
        for dim, size in list(zip(tensor.shape.dim, sizes, strict=True))[1:]:
            if dim.dim_value != size:
                dim.dim_value, changed = size, True
    if changed:
        del model.proto.graph.value_info[:]
