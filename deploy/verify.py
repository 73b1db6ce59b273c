"""Proof that what the sparse nodes carry is the user's model: weights read back, outputs compared, never a wider tolerance.

Each node is unpacked from its own words (or code) and turned back into a Conv; ONNX Runtime runs that graph and the user's
original file on the same inputs. A network may saturate and hide a wrong layer behind a right output, so every sparse layer's
output is compared too, with that of the dense model of the bundle. Outputs of functions with range 1 (sigmoid ...) may
besides differ by the absolute error that ONNX Runtime's own kernels of them have. Tolerances are shares of the tensor's largest magnitude
and are fixed: 1e-4 where weights and activations are fp32, 1e-2 where either is of 16 bits, here or in the user's file. Of
integers and booleans (classes, indices) that share of the elements may differ.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from sparsedeploy.code import CodeCheck, CubinCheck, check_code, check_cubins
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.precision import with_every_rounding
from sparsedeploy.converters.rewrite import read_nodes, restore
from sparsedeploy.errors import CheckFailed, InputError
from sparsedeploy.plugins import kernel_named
from sparsedeploy.plugins.epilogue import apply
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.reference import conv2d
from sparsedeploy.record import Document, Record

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Feeds = Mapping[str, Array]
Weights = tuple[Floats, Floats | None]

FP32_TOLERANCE = 1e-4
FP16_TOLERANCE = 1e-2
FP16_ROUNDING = 2.0**-11
"""Largest relative error of rounding a normal number to fp16."""
FP16_SMALLEST = 2.0**-24
"""The smallest number that fp16 holds: numbers near it round by up to half of it."""
RANGE_ONE = ("Sigmoid", "Softmax", "HardSigmoid", "Tanh")
RANGE_ONE_ERROR = 2.0**-21
"""Absolute error of ONNX Runtime's fp32 Sigmoid on the CPU, with room: 2e-7 measured, also where the value is 1e-5. A
detector's map on noise is all such values; a share of the largest of them is less than the function's own error."""
_PASSES_ON = ("Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")
LAYER_BYTES = 1 << 30
"""Bytes of layer outputs that one verification holds at most, twice."""
DENSE_NAME, SPARSE_NAME = "model.dense.onnx", "model.sparse.onnx"
LAYERS = f"{SPARSE_NAME}, layer by layer"
_EXACT_KERNELS = ("csr", "baked")
_EXACT_BIASES = ("csr", "packed")
"""Kernels that carry biases as fp32, whatever the precision."""
_ORIGINAL = "ONNX Runtime on "
_ORT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
_HALF_TYPES = ("fp16", "bf16")


class OutputCheck(Record):
    """One output of one comparison. All errors are against the reference."""

    name: str
    max_abs: float
    max_rel: float
    """Largest |a - b| / |b| over elements of at least 1 % of the largest magnitude."""
    cosine: float
    top1_agreement: float | None
    """Share of rows with the same argmax; None where the output is no [rows, classes]."""
    largest: float
    tolerance: float
    """Allowed max_abs as a share of largest."""
    floor: float = 0.0
    """Allowed max_abs besides: RANGE_ONE_ERROR for outputs of such functions."""
    margin: float
    """How many times the error would fit into the tolerance; below 1 fails."""
    passed: bool
    problem: str = ""
    """What is wrong where the values cannot be compared as numbers: a missing output, another shape, NaN."""


class Comparison(Record):
    """One model run against the reference on one set of inputs."""

    model: str
    reference: str
    inputs: str
    outputs: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every output is within tolerance."""
        return all(output.passed for output in self.outputs)


class WeightCheck(Record):
    """The weights one node carries, read back, against the model's own."""

    layer: str
    kernel: str
    nnz: int
    rounded: int
    """Weights that differ from the model's by rounding to fp16; 0 for exact formats."""
    max_rel: float
    passed: bool
    problem: str = ""
    """What is wrong where the weights cannot be read at all."""


class Verification(Document):
    """The content of verify.json."""

    sparse_nodes_verified: int
    weights: tuple[WeightCheck, ...]
    comparisons: tuple[Comparison, ...]
    code: tuple[CodeCheck, ...] = ()
    """The nodes' own code, interpreted; empty where they carry none."""
    cubins: tuple[CubinCheck, ...] = ()
    """What was assembled of that code; empty where nothing was."""
    first_diverging_layer: str | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether all weights, outputs and code are within tolerance."""
        groups: tuple[Iterable[WeightCheck | CodeCheck | Comparison], ...] = (self.weights, self.code, self.comparisons)
        assembled = all(check.passed for check in self.cubins if check.checked)
        return assembled and all(check.passed for group in groups for check in group)

    @property
    def code_proven(self) -> bool:
        """Whether there is code, it computes its layers, and every cubin is what ptxas makes of it."""
        return bool(self.code) and all(entry.passed for entry in self.code) and all(c.passed for c in self.cubins)

    @property
    def against_original(self) -> bool:
        """Whether outputs were compared with those of the user's file, run in ONNX Runtime, and are within tolerance."""
        ran = [entry for entry in self.comparisons if entry.reference.startswith(_ORIGINAL) and entry.outputs]
        return bool(ran) and self.passed


@dataclass(frozen=True)
class Subject:
    """What is to be verified: the sparse model, the model's own weights by layer, and the files around it."""

    sparse: Model
    weights: Mapping[str, Weights]
    """By SparseConv.layer."""
    dense_file: Path
    original: Path
    """The user's file."""
    tolerance: float
    rounded_biases: bool = False
    """Whether `weights` come from a graph that was made fp16, biases included."""


def tolerance_for(nodes: Sequence[SparseConv], precision: str, stored: Iterable[str] = ()) -> float:
    """The fixed tolerance: fp32 throughout, or 16 bits somewhere. `stored` are the types of the user's weights."""
    exact = precision == "fp32" and all(node.kernel in _EXACT_KERNELS for node in nodes)
    return FP32_TOLERANCE if exact and not set(stored) & set(_HALF_TYPES) else FP16_TOLERANCE


def check_weights(node: SparseConv, weight: Floats, bias: Floats | None, *, rounded_bias: bool = False) -> WeightCheck:
    """Unpack a node and compare: exact formats bit for bit, fp16 ones within 2^-11 relative, zeros exactly.

    `rounded_bias` says that `bias` itself went through fp16, so that even an exact format differs from it.
    """
    exact = node.kernel in _EXACT_KERNELS and node.precision == "fp32"
    allowed = 0.0 if exact else FP16_ROUNDING
    try:
        got, got_bias = kernel_named(node.kernel).unpack(node)
        if got.shape != weight.shape:
            raise ValueError(f"{node.layer}: carries a weight {got.shape}, the model's is {weight.shape}")
    except (ValueError, InputError) as problem:
        return WeightCheck(
            layer=node.layer, kernel=node.kernel, nnz=0, rounded=0, max_rel=float("inf"), passed=False,
            problem=str(problem),
        )  # fmt: skip
    differ = got != weight
    error = np.abs(got[differ].astype(np.float64) - weight[differ]) / np.maximum(np.abs(weight[differ]), 1e-45)
    max_rel = float(error.max(initial=0.0))
    zeros_kept = bool(np.array_equal(got != 0, weight != 0))
    bias_kept = _same_bias(got_bias, bias, (exact or node.kernel in _EXACT_BIASES) and not rounded_bias)
    return WeightCheck(
        layer=node.layer, kernel=node.kernel, nnz=int(np.count_nonzero(got)), rounded=int(np.count_nonzero(differ)),
        max_rel=max_rel, passed=zeros_kept and bias_kept and max_rel <= allowed,
        problem="" if bias_kept else "its bias differs",
    )  # fmt: skip


def _same_bias(got: Floats | None, bias: Floats | None, exact: bool) -> bool:
    if bias is None or got is None:
        return (got is None or not np.any(got)) and (bias is None or not np.any(bias))
    return got.shape == bias.shape and bool(
        np.allclose(got, bias, rtol=0 if exact else FP16_ROUNDING, atol=0 if exact else FP16_SMALLEST / 2)
    )


def verify(
    subject: Subject, feeds: Feeds, feeds_name: str, code: bool = True, assemble_again: bool = True
) -> Verification:
    """Weights of every node, its code, then the dense and the sparse model against the original.

    Raises nothing on a mismatch. Without `code` no code is interpreted: it does not depend on the inputs. Cubins are
    assembled again, unless who calls has just had them made: then the assembler's cache answers.
    """
    layers = read_nodes(subject.sparse)
    nodes = list(layers.values())
    weights = tuple(
        check_weights(node, *subject.weights[node.layer], rounded_bias=subject.rounded_biases) for node in nodes
    )
    readable = all(check.passed or check.max_rel < float("inf") for check in weights)
    interpreted = tuple(check_code(node) for node in nodes if node.executable) if readable and code else ()
    cubins = tuple(check for node in nodes for check in check_cubins(node, assemble_again)) if code else ()
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-") as folder:
        try:
            reference = run_file(subject.original, feeds)
        except RuntimeError as error:
            found = _without_runtime(subject, nodes if readable else [], weights, Path(folder), feeds, str(error))
            return found.model_copy(update={"code": interpreted, "cubins": cubins})
        name, bounded = f"{_ORIGINAL}{subject.original.name}", range_one(subject.sparse)
        try:
            dense = compare(reference, run_file(subject.dense_file, feeds), subject.tolerance, bounded)
            comparisons = [Comparison(model=DENSE_NAME, reference=name, inputs=feeds_name, outputs=dense)]
            diverging = next((check.layer for check in weights if check.max_rel == float("inf")), None)
            if nodes and readable:
                got = _run_restored(subject, Path(folder), feeds, lambda node: kernel_named(node.kernel).unpack(node))
                outputs = compare(reference, got, subject.tolerance, bounded)
                comparisons.append(Comparison(model=SPARSE_NAME, reference=name, inputs=feeds_name, outputs=outputs))
                comparisons.append(_layer_outputs(subject, Path(folder), feeds, feeds_name))
                diverging = _diverging(subject, layers, Path(folder), feeds, reference, comparisons)
        except RuntimeError as error:
            raise CheckFailed(
                f"verify: ONNX Runtime runs {subject.original.name} but not what was made of it: {error}. Nothing is proven "
                "about such a model; please report it."
            ) from error
        note = _really_rounded(subject, Path(folder), feeds, feeds_name, reference, comparisons)
    return Verification(
        sparse_nodes_verified=len(nodes),
        weights=weights,
        comparisons=tuple(comparisons),
        code=interpreted,
        cubins=cubins,
        first_diverging_layer=diverging,
        note=note,
    )


def _really_rounded(
    subject: Subject,
    folder: Path,
    feeds: Feeds,
    feeds_name: str,
    reference: Mapping[str, Array],
    comparisons: list[Comparison],
) -> str:
    """What the comparisons above cannot see in fp16: ONNX Runtime's CPU kernels keep fp16 values in fp32 between nodes.

    The dense model is run once more with every value rounded. An overflow there fails (it is added to `comparisons`); a
    difference is told, beyond the tolerance as a warning: it belongs to the model in fp16, not to our nodes. Returns what
    to tell, "" for a graph without fp16 values.
    """
    dense = load(subject.dense_file)
    rounded = Model(with_every_rounding(dense), dense.path)
    if len(rounded.proto.graph.node) == len(dense.proto.graph.node):
        return ""
    path = folder / "rounded.onnx"
    save(rounded, path)
    try:
        outputs = compare(
            reference, run_file(path, feeds, optimise=False), subject.tolerance, range_one(subject.sparse)
        )
    except RuntimeError as error:
        return f"not run with every value rounded to fp16: {error}"
    broken = tuple(output for output in outputs if output.problem)
    if broken:
        model = f"{DENSE_NAME} with every value rounded to fp16"
        comparisons.append(
            Comparison(model=model, reference=comparisons[0].reference, inputs=feeds_name, outputs=broken)
        )
        return "fp16 overflows in this model"
    worst = max((output.max_abs / output.largest for output in outputs if output.largest), default=0.0)
    text = f"with every value rounded to fp16, as a device stores it, the dense model differs by {worst:.2g} of its largest output"
    return f"warning: {text}, more than the {subject.tolerance:g} allowed" if worst > subject.tolerance else text


def _diverging(
    subject: Subject,
    layers: Mapping[str, SparseConv],
    folder: Path,
    feeds: Feeds,
    reference: Mapping[str, Array],
    comparisons: Sequence[Comparison],
) -> str | None:
    """The first layer that makes an output wrong, by bisection; else the first whose own output is; None if none is."""
    _, final, by_layer = comparisons
    if not final.passed:
        return _first_diverging(subject, list(layers.values()), folder, feeds, reference)
    return next((layers[output.name].layer for output in by_layer.outputs if not output.passed), None)


def _run_restored(
    subject: Subject, folder: Path, feeds: Feeds, unpack: Callable[[SparseConv], tuple[Array, Array | None]]
) -> dict[str, Array]:
    return _run_model(restore(subject.sparse, unpack), folder, feeds)


def _run_model(model: Model, folder: Path, feeds: Feeds, extra: Sequence[str] = ()) -> dict[str, Array]:
    """Run a model with some inner values as outputs too."""
    present = {output.name for output in model.proto.graph.output}
    model.proto.graph.output.extend([onnx.ValueInfoProto(name=name) for name in extra if name not in present])
    path = folder / "run.onnx"
    for old in folder.glob("run.onnx*"):
        old.unlink()
    save(model, path)
    return run_file(path, feeds)


def _layer_outputs(subject: Subject, folder: Path, feeds: Feeds, feeds_name: str) -> Comparison:
    """The output of every sparse layer, with the node's weights, against the same value of the dense model.

    Each layer reads the dense model's values, so that its error is its own and not that of the layers before it. Layers
    beyond LAYER_BYTES of values are left out; the record's length says how many were compared.
    """
    layers, budget = read_nodes(subject.sparse), LAYER_BYTES
    needed: dict[str, None] = {}
    reads = {node.output[0]: list(node.input) for node in subject.sparse.proto.graph.node if node.output[0] in layers}
    chosen: list[str] = []
    for name, node in layers.items():
        g, values = node.geometry, [*reads[name][: 1 + node.has_residual], name]
        budget -= 4 * _batch(feeds) * (g.ic * g.h * g.w * (values[0] not in needed) + g.oc * g.oh * g.ow)
        if budget < 0 and chosen:
            break
        chosen.append(name)
        needed.update(dict.fromkeys(values))
    dense = {
        **feeds,
        **_run_model(load(subject.dense_file), folder, feeds, [name for name in needed if name not in feeds]),
    }
    got = {}
    for name in chosen:
        alone = _alone(subject.sparse, name, dense)
        restored = restore(alone, lambda node: kernel_named(node.kernel).unpack(node))
        got.update(_run_model(restored, folder, {value.name: dense[value.name] for value in alone.graph.inputs()}))
    outputs = compare({name: dense[name] for name in chosen}, got, subject.tolerance)
    return Comparison(model=LAYERS, reference=DENSE_NAME, inputs=feeds_name, outputs=outputs)


def _batch(feeds: Feeds) -> int:
    return max((value.shape[0] for value in feeds.values() if value.ndim), default=1)


def _alone(model: Model, name: str, values: Mapping[str, Array]) -> Model:
    """A model of the one node that makes `name`; its inputs have the types and shapes of `values`."""
    graph = model.graph
    node = graph.producer(name)
    assert node is not None, name
    proto = onnx.ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
    proto.graph.name = "layer"
    proto.graph.node.append(node)
    for entry in dict.fromkeys(node.input):
        if entry in graph.initializers:
            proto.graph.initializer.append(graph.initializers[entry])
        elif (constant := graph.array(entry)) is not None:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(constant, entry))
        else:
            proto.graph.input.append(_value_info(entry, values[entry]))
    proto.graph.output.append(_value_info(name, values[name]))
    return Model(proto, model.path)


def _value_info(name: str, value: Array) -> onnx.ValueInfoProto:
    kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return onnx.helper.make_tensor_value_info(name, kind, value.shape)


def _first_diverging(
    subject: Subject, nodes: Sequence[SparseConv], folder: Path, feeds: Feeds, reference: Mapping[str, Array]
) -> str:
    """Bisect: with the first k nodes as carried and the rest from the model's own weights, the smallest k that fails."""
    order = {node.layer: i for i, node in enumerate(nodes)}

    def fails(k: int) -> bool:
        def unpack(node: SparseConv) -> tuple[Array, Array | None]:
            return kernel_named(node.kernel).unpack(node) if order[node.layer] < k else subject.weights[node.layer]

        outputs = compare(
            reference, _run_restored(subject, folder, feeds, unpack), subject.tolerance, range_one(subject.sparse)
        )
        return not all(output.passed for output in outputs)

    if fails(0):
        return "none: the graph diverges with the model's own weights too"
    low, high = 0, len(nodes)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return nodes[high - 1].layer


def _without_runtime(
    subject: Subject,
    nodes: Sequence[SparseConv],
    weights: tuple[WeightCheck, ...],
    folder: Path,
    feeds: Feeds,
    why: str,
) -> Verification:
    """ONNX Runtime cannot run the original: each node's own format against a dense float64 convolution instead, and the
    sparse graph against the bundle's dense one where that can be run.
    """
    rng, outputs = np.random.default_rng(0), []
    for node in nodes:
        g = node.geometry
        x = rng.random((1, g.ic, g.h, g.w))
        weight, bias = subject.weights[node.layer]
        residual = rng.random((1, g.oc, g.oh, g.ow)) if node.has_residual else None
        expected = apply(node.epilogue, conv2d(x, weight, bias, g), residual)
        got = kernel_named(node.kernel).reference(node, x, residual)
        outputs.append(_check(node.layer, expected, got, subject.tolerance))
    comparisons = []
    if nodes:
        comparisons.append(
            Comparison(model=LAYERS, reference="float64 convolution", inputs="seed 0", outputs=tuple(outputs))
        )
        try:
            dense = run_file(subject.dense_file, feeds)
            restored = _run_restored(subject, folder, feeds, lambda node: kernel_named(node.kernel).unpack(node))
        except RuntimeError:
            note = "each sparse layer was checked by itself"
        else:
            outputs = list(compare(dense, restored, subject.tolerance, range_one(subject.sparse)))
            comparisons.append(
                Comparison(model=SPARSE_NAME, reference=DENSE_NAME, inputs="random", outputs=tuple(outputs))
            )
            note = f"each sparse layer was checked by itself, the whole against {DENSE_NAME}"
    else:
        note = "its outputs were compared with nothing"
    return Verification(
        sparse_nodes_verified=len(nodes), weights=weights, comparisons=tuple(comparisons),
        note=f"ONNX Runtime cannot run {subject.original.name} ({why}): {note}.",
    )  # fmt: skip


def range_one(model: Model) -> frozenset[str]:
    """The graph outputs that a function with range 1 makes, directly or through nodes that only pass values on."""
    graph, found = model.graph, set()
    for output in graph.outputs:
        node = graph.producer(output)
        while node is not None and node.op_type in _PASSES_ON and node.input:
            node = graph.producer(node.input[0])
        if node is not None and node.op_type in RANGE_ONE:
            found.add(output)
    return frozenset(found)


def compare(
    reference: Mapping[str, Array], got: Mapping[str, Array], tolerance: float, bounded: Collection[str] = ()
) -> tuple[OutputCheck, ...]:
    """Every output of the reference against the same output of another run; one that is missing there fails.

    `bounded` are the outputs of functions with range 1.
    """
    return tuple(
        _check(name, value, got[name], tolerance, RANGE_ONE_ERROR if name in bounded else 0.0)
        if name in got
        else _incomparable(name, tolerance, "it is missing")
        for name, value in reference.items()
    )


def _incomparable(name: str, tolerance: float, problem: str) -> OutputCheck:
    return OutputCheck(
        name=name, max_abs=float("inf"), max_rel=float("inf"), cosine=0.0, top1_agreement=None, largest=0.0,
        tolerance=tolerance, margin=0.0, passed=False, problem=problem,
    )  # fmt: skip


def _check(name: str, expected: Array, got: Array, tolerance: float, floor: float = 0.0) -> OutputCheck:
    if got.shape != expected.shape:
        return _incomparable(name, tolerance, f"its shape is {list(got.shape)}, needed {list(expected.shape)}")
    if expected.dtype.kind not in "fV" or got.dtype.kind not in "fV":
        return _check_exact(name, expected, got, tolerance)
    a, b = got.astype(np.float64), expected.astype(np.float64)
    broken = int(np.isnan(a).sum() + np.isnan(b).sum())
    finite = np.isfinite(b) & np.isfinite(a)
    infinite = not np.array_equal(a[~finite], b[~finite])
    error, size = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    max_abs, largest = float(error.max(initial=0.0)), float(size.max(initial=0.0))
    relevant = size >= 0.01 * largest
    max_rel = float((error[relevant] / np.maximum(size[relevant], 1e-300)).max(initial=0.0))
    norm = float(np.linalg.norm(a[finite]) * np.linalg.norm(b[finite]))
    cosine = float(a[finite] @ b[finite]) / norm if norm else 1.0
    top1 = float(np.mean(a.argmax(1) == b.argmax(1))) if a.ndim == 2 and a.shape[0] and a.shape[1] > 1 else None
    problem = ""
    if broken:
        problem = f"NaN: {int(np.isnan(a).sum())} of {a.size} elements, {int(np.isnan(b).sum())} in the reference"
    elif infinite:
        problem = "its infinite elements are not those of the reference"
    allowed = tolerance * largest + floor
    margin = allowed / max_abs if max_abs else float("inf")
    return OutputCheck(
        name=name, max_abs=max_abs, max_rel=max_rel, cosine=cosine, top1_agreement=top1, largest=largest,
        tolerance=tolerance, floor=floor, margin=0.0 if problem else margin, passed=not problem and max_abs <= allowed,
        problem=problem,
    )  # fmt: skip


def _check_exact(name: str, expected: Array, got: Array, tolerance: float) -> OutputCheck:
    """Integers, booleans, texts: the share of elements that differ is held against the tolerance."""
    differ = np.asarray(got != expected)
    share = float(differ.mean()) if differ.size else 0.0
    numbers = expected.dtype.kind in "iub" and got.dtype.kind in "iub" and expected.size > 0
    a, b = (value.astype(np.float64) if numbers else np.zeros(0) for value in (got, expected))
    return OutputCheck(
        name=name, max_abs=float(np.abs(a - b).max(initial=0.0)), max_rel=share, cosine=1.0 - share, top1_agreement=None,
        largest=float(np.abs(b).max(initial=0.0)), tolerance=tolerance, margin=tolerance / share if share else float("inf"),
        passed=share <= tolerance,
        problem=f"{int(differ.sum())} of {differ.size} elements are not equal" if share > tolerance else "",
    )  # fmt: skip


def run_file(path: Path, feeds: Feeds, optimise: bool = True) -> dict[str, Array]:
    """Run a model in ONNX Runtime on the CPU; raises RuntimeError with ORT's message when it cannot.

    Feeds are cast to the types of the model's inputs, which differ between a double file and what was made of it. A
    sequence of tensors gives one entry per element, `name[0]`, `name[1]` ...
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Extended optimisers replace what is being checked and change rounding between the two runs.
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_BASIC if optimise else level.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        types = {entry.name: _ORT_TYPES.get(entry.type) for entry in session.get_inputs()}
        cast = {name: value.astype(types[name] or value.dtype) for name, value in feeds.items() if name in types}
        values = session.run(names, cast)
    except Exception as error:  # ORT raises its own types without a common base
        raise RuntimeError(" ".join(str(error).split())[:300]) from error
    results: dict[str, Array] = {}
    for name, value in zip(names, values, strict=True):
        if isinstance(value, list):
            results.update({f"{name}[{i}]": np.asarray(item) for i, item in enumerate(value)})
        elif value is not None:
            results[name] = np.asarray(value)
    return results


def random_feeds(model: Model, inputs: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    """Seeded inputs: floats uniform in [0, 1) as images are, integers 0 or 1, booleans either."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.inputs():
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = inputs[value.name]
        raw = rng.random(shape) if np.issubdtype(dtype, np.inexact) or dtype.kind == "V" else rng.integers(0, 2, shape)
        feeds[value.name] = np.asarray(raw).astype(dtype)
    return feeds


def load_feeds(path: Path, model: Model, inputs: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Inputs from an .npz whose arrays are named as the model's inputs; raises InputError on any mismatch."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--input {path}: not a readable .npz file ({error}). Make one with numpy.savez(path, NAME=array)."
        ) from error
    feeds = {}
    for value in model.graph.inputs():
        if value.name not in arrays:
            raise InputError(
                f"--input {path}: no array named {value.name!r}; it holds {', '.join(arrays) or 'nothing'}."
            )
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = arrays[value.name]
        if array.shape != inputs[value.name]:
            want = "x".join(map(str, inputs[value.name]))
            raise InputError(
                f"--input {path}: {value.name} is {array.shape}, the model is converted for {want}; match it or pass --shape."
            )
        if array.dtype.kind not in "fiubV" or (array.dtype.kind == "f" and dtype.kind in "iub"):
            raise InputError(
                f"--input {path}: {value.name} holds {array.dtype}, the model takes {dtype}; save it as that type."
            )
        feeds[value.name] = array.astype(dtype)
    return feeds


def require(verification: Verification) -> None:
    """Raise CheckFailed, in words, when a verification did not pass."""
    for check in verification.weights:
        if not check.passed:
            what = check.problem or f"largest relative error {check.max_rel:.3g}"
            raise CheckFailed(
                f"verify: layer {check.layer}: the weights its {check.kernel} node carries differ from the model's "
                f"({what}). Do not use this bundle: convert again, and if that fails too, leave the layer dense with "
                f"--layer '{check.layer}=dense' and report this model."
            )
    for found in verification.code:
        if not found.passed:
            what = found.problem or f"an output is off by {found.worst:.3g} times what rounding may cost"
            raise CheckFailed(
                f"verify: layer {found.layer}: its code for sm_{found.arch}, interpreted, does not compute the layer "
                f"({what}). Do not use this bundle: leave the layer dense with --layer '{found.layer}=dense' and report "
                "this model."
            )
    for cubin in verification.cubins:
        if cubin.checked and not cubin.passed:
            raise CheckFailed(
                f"verify: layer {cubin.layer}: its machine code for sm_{cubin.arch} {cubin.dtype} is not that of its PTX "
                f"({cubin.problem}). Do not use this bundle: convert again, with the compiler that sparsedeploy pins, or "
                "with --no-assemble."
            )
    for entry in verification.comparisons:
        for output in entry.outputs:
            if not output.passed:
                raise CheckFailed(_words(verification, entry, output))


def _words(verification: Verification, entry: Comparison, output: OutputCheck) -> str:
    layer = verification.first_diverging_layer
    where = f" First diverging layer: {layer}." if layer else ""
    extra = f" and {output.floor:.2g}" if output.floor else ""
    what = output.problem or f"{output.max_abs:.3g}, allowed {output.tolerance:g} of {output.largest:.3g}{extra}"
    if output.problem.startswith("NaN"):
        advice = "If the model makes NaN of these inputs itself, give it real ones with --input x.npz"
    elif layer and not layer.startswith("none"):
        advice = f"Try --precision fp32, or leave that layer dense with --layer '{layer}=dense'"
    else:
        advice = "Try --precision fp32"
    return (
        f"verify: output {output.name} of {entry.model} differs from {entry.reference} by more than allowed: {what}.{where} "
        f"{advice}."
    )
