"""The torch runner against ONNX Runtime: operators one by one, whole networks, sparse bundles; on a GPU the same and more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_models import network, saved, sparse_weight

from sparsedeploy.convert import Request, convert
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.models import networks
from sparsedeploy.verify import run_file

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from sparsedeploy.runners.torch_forms import settings  # noqa: E402
from sparsedeploy.runners.torch_operators import Call, build  # noqa: E402
from sparsedeploy.runners.torch_runner import TorchRunner, load_torch  # noqa: E402

Array = NDArray[Any]
RNG = np.random.default_rng(3)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


X = (2, 4, 9, 8)
# Operator, attributes, further inputs (constants), opset, shape of x.
CASES: list[tuple[str, dict[str, Any], list[Array | None], int, tuple[int, ...]]] = [
    *[(op, {}, [], 17, X) for op in ("Relu", "Sigmoid", "Tanh", "Exp", "Abs", "Neg", "Floor", "Ceil", "Round", "Erf",
                                     "Softplus", "Softsign", "HardSwish", "Sign", "Sin", "Cos", "Identity", "Elu", "Selu",
                                     "LeakyRelu", "HardSigmoid", "ThresholdedRelu", "GlobalAveragePool", "GlobalMaxPool")],
    ("Mish", {}, [], 18, X),
    ("Gelu", {}, [], 20, X),
    ("Gelu", {"approximate": "tanh"}, [], 20, X),
    ("LeakyRelu", {"alpha": 0.3}, [], 17, X),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, [], 17, X),
    ("PRelu", {}, [floats(4, 1, 1)], 17, X),
    ("Clip", {"min": -0.5, "max": 0.25}, [], 9, X),
    ("Clip", {}, [f32(-0.5).reshape(()), None], 17, X),
    ("Clip", {}, [None, f32(0.5).reshape(())], 17, X),
    ("Add", {}, [floats(4, 1, 1)], 17, X),
    ("Sub", {}, [floats(1)], 17, X),
    ("Mul", {}, [floats(2, 1, 9, 8)], 17, X),
    ("Div", {}, [floats(4, 1, 1) + 9], 17, X),
    ("Pow", {}, [f32(2.0)], 17, X),
    ("Min", {}, [floats(4, 1, 1), floats(1)], 17, X),
    ("Max", {}, [floats(4, 1, 1), floats(1)], 17, X),
    ("Sum", {}, [floats(4, 1, 1), floats(1)], 17, X),
    ("Mean", {}, [floats(4, 1, 1), floats(1)], 17, X),
    ("Softmax", {"axis": 1}, [], 17, X),
    ("Softmax", {"axis": 1}, [], 11, X),
    ("Softmax", {"axis": 2}, [], 11, X),
    ("LogSoftmax", {"axis": -1}, [], 17, X),
    ("Conv", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, [floats(6, 4, 3, 3), floats(6)], 17, X),
    ("Conv", {"strides": [2, 1], "dilations": [1, 2], "pads": [0, 1, 2, 3]}, [floats(6, 4, 3, 3)], 17, X),
    ("Conv", {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}, [floats(6, 2, 3, 3)], 17, X),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, [floats(6, 4, 2, 3)], 17, X),
    ("Conv", {"auto_pad": "VALID"}, [floats(6, 4, 2, 3)], 17, X),
    ("Conv", {"group": 4, "pads": [1, 1]}, [floats(4, 1, 3)], 17, (2, 4, 9)),
    ("Conv", {}, [floats(3, 2, 2, 2, 2)], 17, (1, 2, 4, 5, 6)),
    ("ConvTranspose", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}, [floats(4, 3, 3, 3), floats(3)], 17, X),
    ("ConvTranspose", {"group": 2}, [floats(4, 3, 2, 2)], 17, X),
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [], 17, X),
    ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, [], 17, X),
    ("MaxPool", {"kernel_shape": [3, 2], "strides": [1, 2], "pads": [0, 0, 1, 1]}, [], 17, X),
    ("MaxPool", {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]}, [], 17, X),
    ("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 2]}, [], 17, X),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [], 17, X),
    *[(op, {"kernel_shape": [2, 3], "strides": [3, 2], "pads": [0, 0, 1, 1], "ceil_mode": 1, **more}, [], 17, X)
      for op, more in [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1})]],
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}, [], 17, X),
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1], "strides": [2, 2]}, [], 17, X),
    ("AveragePool", {"kernel_shape": [3, 3], "pads": [0, 1, 1, 0], "count_include_pad": 1}, [], 17, X),
    ("BatchNormalization", {}, [floats(4), floats(4), floats(4), abs(floats(4)) + 0.1], 15, X),
    ("InstanceNormalization", {}, [floats(4), floats(4)], 17, X),
    ("LayerNormalization", {}, [floats(8), floats(8)], 17, X),
    ("LRN", {"size": 3, "alpha": 0.1}, [], 17, X),
    ("Gemm", {"transB": 1, "alpha": 0.5, "beta": 2.0}, [floats(5, 7), floats(5)], 17, (3, 7)),
    ("Gemm", {"transA": 1}, [floats(7, 5)], 17, (7, 3)),
    ("Gemm", {"alpha": 2.0}, [floats(7, 5)], 17, (3, 7)),
    ("MatMul", {}, [floats(8, 5)], 17, X),
    ("ReduceMean", {"axes": [2, 3]}, [], 13, X),
    ("ReduceMean", {"keepdims": 0}, [ints(-1, 1)], 18, X),
    ("ReduceSum", {}, [ints(1)], 13, X),
    ("ReduceSum", {"keepdims": 0}, [], 13, X),
    ("ReduceSum", {"noop_with_empty_axes": 1}, [], 13, X),
    ("ReduceMax", {"axes": [1]}, [], 13, X),
    ("ReduceMin", {"axes": [-2], "keepdims": 0}, [], 13, X),
    ("ReduceL2", {"axes": [1]}, [], 13, X),
    ("ReduceL1", {"axes": [1]}, [], 13, X),
    ("ReduceSumSquare", {"axes": [1]}, [], 13, X),
    ("ReduceLogSumExp", {"axes": [1]}, [], 13, X),
    ("ArgMax", {"axis": 1}, [], 13, X),
    ("ArgMin", {"axis": 3, "keepdims": 0}, [], 13, X),
    ("Flatten", {}, [], 17, X),
    ("Flatten", {"axis": -1}, [], 17, X),
    ("Flatten", {"axis": 0}, [], 17, X),
    ("Reshape", {}, [ints(0, -1, 8)], 17, X),
    ("Reshape", {"allowzero": 0}, [ints(2, 36, 8)], 17, X),
    ("Transpose", {"perm": [0, 2, 3, 1]}, [], 17, X),
    ("Transpose", {}, [], 17, X),
    ("Squeeze", {}, [ints(1)], 17, (2, 1, 5)),
    ("Squeeze", {"axes": [-2]}, [], 11, (2, 1, 5)),
    ("Squeeze", {}, [], 17, (1, 3, 1)),
    ("Unsqueeze", {}, [ints(0, -1)], 17, (2, 3)),
    ("Unsqueeze", {"axes": [1]}, [], 11, (2, 3)),
    ("Concat", {"axis": 1}, [floats(2, 3, 9, 8), floats(2, 1, 9, 8)], 17, X),
    ("Slice", {}, [ints(1, -3), ints(2**62, -1), ints(1, 3)], 17, X),
    ("Slice", {}, [ints(0), ints(9), ints(2), ints(2)], 17, X),
    ("Slice", {}, [ints(-1), ints(-(2**63)), ints(2), ints(-2)], 17, X),
    ("Slice", {}, [ints(5), ints(0), ints(-1), ints(-1)], 17, X),
    ("Slice", {"starts": [1], "ends": [3], "axes": [1]}, [], 9, X),
    ("Slice", {"starts": [0, 1], "ends": [2, 3]}, [], 9, X),
    ("Gather", {"axis": 1}, [np.array([[0, -1], [2, 1]], np.int64)], 17, X),
    ("Gather", {"axis": 2}, [np.array(3, np.int64)], 17, X),
    ("Expand", {}, [ints(2, 4, 3)], 17, (1, 4, 1)),
    ("Expand", {}, [ints(1, 1)], 17, (3, 2, 5)),
    ("Tile", {}, [ints(1, 2, 1, 3)], 17, X),
    ("Pad", {}, [ints(0, 1, 2, 0, 0, 0, 1, 3), f32(0.5).reshape(())], 17, X),
    ("Pad", {}, [ints(0, 0, 0, 0, 0, 0, 0, -1)], 17, X),
    ("Pad", {"mode": "reflect"}, [ints(0, 0, 2, 1, 0, 0, 1, 3)], 17, X),
    ("Pad", {"mode": "edge", "pads": [0, 0, 2, 1, 0, 0, 1, 3]}, [], 9, X),
    ("Pad", {}, [ints(1, 2), None, ints(3)], 18, X),
    ("DepthToSpace", {"blocksize": 2}, [], 17, X),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, [], 17, X),
    ("SpaceToDepth", {"blocksize": 2}, [], 17, (2, 3, 4, 8)),
    ("Cast", {"to": TensorProto.INT32}, [], 17, X),
    ("Dropout", {}, [], 17, X),
    ("Upsample", {"mode": "nearest"}, [f32(1, 1, 2, 2)], 9, X),
    ("Upsample", {"mode": "linear"}, [f32(1, 1, 2, 2)], 9, X),
    ("Resize", {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, [None, f32(1, 1, 2, 3)], 13, X),
    ("Resize", {"mode": "nearest"}, [None, f32(1, 1, 1.5, 0.6)], 13, X),
    ("Resize", {"mode": "nearest"}, [f32(1, 1, 1.5, 0.6)], 10, X),
    ("Resize", {"mode": "nearest", "nearest_mode": "ceil", "coordinate_transformation_mode": "align_corners"}, [None, f32(1, 1, 2, 2)], 13, X),
    ("Resize", {"mode": "nearest", "nearest_mode": "round_prefer_ceil"}, [None, None, ints(2, 4, 5, 20)], 13, X),
    ("Resize", {"mode": "linear"}, [None, f32(1, 1, 2, 2)], 13, X),
    ("Resize", {"mode": "linear"}, [None, None, ints(2, 4, 5, 13)], 13, X),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "align_corners"}, [None, None, ints(2, 4, 18, 1)], 13, X),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"}, [None, None, ints(2, 4, 1, 20)], 13, X),
    ("Resize", {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, [None, f32(1, 1, 2, 1.7)], 13, X),
    ("Resize", {"mode": "linear", "axes": [2, 3]}, [None, None, ints(18, 16)], 18, X),
    ("Equal", {}, [floats(1)], 17, X),
    ("Greater", {}, [floats(4, 1, 1)], 17, X),
    ("Less", {}, [floats(4, 1, 1)], 17, X),
    ("GreaterOrEqual", {}, [floats(4, 1, 1)], 17, X),
    ("LessOrEqual", {}, [floats(4, 1, 1)], 17, X),
]  # fmt: skip


def one_node(
    op: str, attributes: dict[str, Any], extra: Sequence[Array | None], opset: int, shape: Sequence[int]
) -> onnx.ModelProto:
    """One operator from x to y, further inputs as initializers."""
    names = [f"c{at}" if value is not None else "" for at, value in enumerate(extra)]
    node = helper.make_node(op, ["x", *names], ["y"], "it", **attributes)
    constants = [
        numpy_helper.from_array(value, name) for name, value in zip(names, extra, strict=True) if value is not None
    ]
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)], constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model)
    graph.output[0].CopyFrom(inferred.graph.output[0])
    model.graph.output[0].CopyFrom(inferred.graph.output[0])
    return model


def compare_with_ort(path: Path, feeds: dict[str, Array], tolerance: float = 1e-5, **options: Any) -> TorchRunner:
    """Run both; every output within `tolerance` of its largest magnitude, NaN fails."""
    expected = run_file(path, feeds)
    runner = load_torch(path, **options)
    got = runner.run(feeds)
    assert list(got) == list(expected)
    for name, want in expected.items():
        assert got[name].shape == want.shape
        assert got[name].dtype == want.dtype or options.get("arithmetic") == "fp16"
        error = np.abs(got[name].astype(np.float64) - want.astype(np.float64))
        assert error.max(initial=0) <= tolerance * max(1.0, np.abs(want.astype(np.float64)).max(initial=0)), name
    return runner


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[3]}")
def test_operator(case: tuple[str, dict[str, Any], list[Array | None], int, tuple[int, ...]], tmp_path: Path) -> None:
    op, attributes, extra, opset, shape = case
    path = saved(one_node(op, attributes, extra, opset, shape), tmp_path)
    compare_with_ort(path, {"x": floats(*shape)}, device="cpu")


@pytest.mark.parametrize(
    ("op", "attributes", "extra", "opset"),
    [
        ("Resize", {"mode": "cubic"}, [None, f32(1, 1, 2, 2)], 13),
        ("LRN", {"size": 2}, [], 17),
        ("MaxPool", {"kernel_shape": [2, 2]}, [], 17),
        ("Cast", {"to": TensorProto.STRING}, [], 17),
    ],
)
def test_forms_that_are_missing_are_named(
    op: str, attributes: dict[str, Any], extra: list[Array | None], opset: int, tmp_path: Path
) -> None:
    model = one_node(op, attributes, extra, opset, X)
    if op == "MaxPool":
        model.graph.node[0].output.append("indices")
        model.graph.output.append(helper.make_tensor_value_info("indices", TensorProto.INT64, None))
    path = tmp_path / "model.onnx"
    onnx.save_model(model, path)
    with pytest.raises(InputError, match=rf"{op} 'it'.*(--runner onnxruntime)"):
        load_torch(path, device="cpu").run({"x": floats(*X)})


def test_a_mean_of_integers_is_refused_in_words(tmp_path: Path) -> None:
    model = one_node("ReduceMean", {"axes": [1]}, [], 13, X)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.INT32
    with pytest.raises(InputError, match=r"ReduceMean 'it': .* of integers. Use --runner onnxruntime"):
        load_torch(saved(model, tmp_path), device="cpu").run({"x": np.ones(X, np.int32)})


def test_operators_that_are_missing_are_listed(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["a"], "first"), helper.make_node("Det", ["x"], ["y"], "second")]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    onnx.save_model(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx"
    )
    with pytest.raises(InputError, match=r"has no NonZero \('first'\), Det \('second'\)"):
        load_torch(tmp_path / "m.onnx", device="cpu")


@pytest.mark.parametrize(("name", "with_batchnorm"), [("resnet18", False), ("resnet18", True), ("mobilenet_v2", False)])
def test_networks(name: str, with_batchnorm: bool, tmp_path: Path) -> None:
    path = saved(networks.build(name, image_size=32, num_classes=10, with_batchnorm=with_batchnorm), tmp_path)
    runner = compare_with_ort(path, {"input": RNG.random((3, 3, 32, 32), np.float32)}, 1e-4, device="cpu")
    steps = [step for program in runner._programs.values() for step in program.steps]
    assert not any(step.form == "BatchNormalization" for step in steps)
    assert not any(step.form in ("Relu", "Clip", "Add") for step in steps), "every activation and addition is in a unit"


def shape_arithmetic() -> onnx.ModelProto:
    """Conv, then a Reshape whose shape is computed from the input's, as exporters write it."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Shape", ["c"], ["s"], "shape"),
        helper.make_node("Gather", ["s", "zero"], ["n"], "n", axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"], "n1"),
        helper.make_node("Concat", ["n1", "minus"], ["to"], "to", axis=0),
        helper.make_node("Reshape", ["c", "to"], ["y"], "reshape"),
    ]
    constants = {"w": sparse_weight((4, 3, 3, 3)), "zero": np.array(0, np.int64), "axes": ints(0), "minus": ints(-1)}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", "M"])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_shape_arithmetic_is_gone_from_the_program(tmp_path: Path) -> None:
    path = saved(shape_arithmetic(), tmp_path)
    runner = compare_with_ort(path, {"x": floats(3, 3, 8, 8)}, device="cpu")
    (program,) = runner._programs.values()
    assert [step.form for step in program.steps] == ["separate", "Reshape"]
    compare_with_ort(path, {"x": floats(1, 3, 8, 8)}, device="cpu")


def test_a_value_read_twice_is_not_overwritten(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["a"], "a"),
        helper.make_node("Relu", ["a"], ["b"], "b"),
        helper.make_node("Reshape", ["b", "flat"], ["v"], "v"),
        helper.make_node("Sigmoid", ["b"], ["s"], "s"),
        helper.make_node("Add", ["v", "one"], ["w"], "w"),
        helper.make_node("Add", ["a", "s"], ["y"], "y"),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3]), helper.make_tensor_value_info("w", TensorProto.FLOAT, [6]),
         helper.make_tensor_value_info("b", TensorProto.FLOAT, [2, 3])],
        [numpy_helper.from_array(ints(6), "flat"), numpy_helper.from_array(f32(1), "one")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = floats(2, 3)
    x.flags.writeable = False
    before = x.copy()
    compare_with_ort(saved(model, tmp_path), {"x": x}, device="cpu")
    assert np.array_equal(x, before), "the caller's array is only read"


@pytest.mark.parametrize(
    ("op", "attributes", "extra"),
    [
        ("Sum", {}, []),
        ("Max", {}, []),
        ("Min", {}, []),
        ("Resize", {"mode": "linear"}, [None, f32(1, 1, 1, 1)]),
        ("Pad", {}, [ints(*[0] * 8)]),
        ("Tile", {}, [ints(1, 1, 1, 1)]),
        ("Concat", {"axis": 1}, []),
        ("Split", {"axis": 1}, []),
        ("Clip", {}, []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_operator_gives_back_is_not_overwritten(
    op: str, attributes: dict[str, Any], extra: list[Array | None], tmp_path: Path
) -> None:
    """The caller's array, and a value that is read again, by an operator that changes nothing and one in place."""
    model = one_node(op, attributes, extra, 17, X)
    model.graph.node[0].output[0] = "v"
    model.graph.node[0].input[0] = "a"
    twice = [helper.make_node("Sigmoid", ["v"], ["y"]), helper.make_node("Exp", ["a"], ["z"])]
    same = helper.make_node(op, ["x", *model.graph.node[0].input[1:]], ["u"], **attributes)
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        *model.graph.node,
        *twice,
        same,
        helper.make_node("Tanh", ["u"], ["w"]),
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    for name in "zw":
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, X))
    x = floats(*X)
    runner = compare_with_ort(saved(model, tmp_path), {"x": x}, device="cpu")
    array = torch.from_numpy(x.copy())
    runner.run({"x": array})
    assert np.array_equal(array.numpy(), x)


def test_outputs_are_the_callers_own(tmp_path: Path) -> None:
    """An output that is a constant, or the input itself: what its caller writes into it changes nothing else."""
    model = one_node("Identity", {}, [], 17, X)
    model.graph.initializer.append(numpy_helper.from_array(f32(1, 2), "k"))
    model.graph.node.append(helper.make_node("Neg", ["k"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2]))
    runner, x = load_torch(saved(model, tmp_path), device="cpu"), floats(*X)
    before = x.copy()
    for output in runner.run({"x": x}).values():
        output[:] = 7
    assert np.array_equal(x, before)
    assert runner.run({"x": x})["z"].tolist() == [-1, -2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network converted for an H200, every layer sparse."""
    folder = tmp_path_factory.mktemp("bundle")
    convert(Request(saved(network(), folder), find("h200"), folder / "out", layers=("*=baked",)))
    return folder / "out"


def inputs_of(runner: TorchRunner, batch: int = 2) -> dict[str, Array]:
    return {
        binding.name: RNG.random([batch if isinstance(size, str) else size for size in binding.shape]).astype(
            binding.dtype
        )
        for binding in runner.inputs
    }


def test_a_sparse_bundle_runs_dense_on_the_cpu_and_says_so(bundle: Path) -> None:
    runner = load_torch(bundle / "model.sparse.onnx", device="cpu")
    assert (runner.name, runner.device, runner.sparse_layers) == ("torch", "cpu", 0)
    assert any(note.startswith("ran dense: the 3 sparse layers were unpacked") for note in runner.notes)
    feeds = inputs_of(runner)
    expected = run_file(bundle / "model.dense.onnx", feeds)
    for name, value in runner.run(feeds).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-4 * np.abs(expected[name]).max())


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dense_layer_between_sparse_ones_keeps_its_addition(tmp_path: Path, batch: int) -> None:
    choices = ("c1=csr", "c2=dense", "c3=csr")
    convert(Request(saved(network(), tmp_path), find("h200"), tmp_path / "out", layers=choices))
    model = load(tmp_path / "out" / "model.sparse.onnx")
    before = model.proto.SerializeToString()
    runner = TorchRunner(model, "fp32", torch.device("cpu"), read_nodes(model), ())
    (unit,) = runner.units({"x": (batch, 16, 8, 8)})
    assert (unit.conv.name, unit.epilogue.describe(), unit.residual) == ("c2", "add+relu", "x")
    assert model.proto.SerializeToString() == before


class Bare:
    """An array on the device that says no more than where it lies, as PyCUDA's do."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = tuple(array.shape)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._array.__cuda_array_interface__


def test_an_array_that_only_says_where_it_lies(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_torch(bundle / "model.sparse.onnx", device="cpu")
    x, asked = torch.zeros(1, 16, 8, 8), []

    class Located:
        __cuda_array_interface__: dict[str, Any] = {}

    monkeypatch.setattr(torch, "as_tensor", lambda value, device: asked.append(value) or x)
    array = Located()
    assert runner._adopt(array, runner.inputs[0]) is x
    assert asked == [array]
    with pytest.raises(InputError, match="is a str, needed an array"):
        runner._adopt("text", runner.inputs[0])


def test_a_constant_on_the_device_is_that_constant() -> None:
    """A constant that a program made dies with it, and the next may get its id."""
    runner = load_torch(Model(shape_arithmetic(), Path("m.onnx")), device="cpu")
    runner.torch_device = torch.device("meta")
    for size in range(1, 50):
        constant = torch.zeros(size)
        assert runner.on_device(constant).shape == (size,)
        del constant


def test_a_session_copies_runs_and_copies_back(bundle: Path) -> None:
    runner = load_torch(bundle / "model.sparse.onnx", device="cpu")
    feeds = inputs_of(runner)
    session = runner.session({name: value.shape for name, value in feeds.items()})
    assert not session.device_clock
    with pytest.raises(InputError, match="enqueue before download"):
        session.download()
    for again in (feeds, inputs_of(runner)):
        session.upload(again)
        start = session.mark()
        session.enqueue()
        session.wait()
        assert session.elapsed_us(start, session.mark()) > 0
        got, expected = session.download(), run_file(bundle / "model.dense.onnx", again)
        for name, value in got.items():
            np.testing.assert_allclose(value, expected[name], atol=1e-4 * np.abs(expected[name]).max())
    with pytest.raises(InputError, match="the session takes"):
        session.upload({name: value[:1] for name, value in feeds.items()})
    session.close()
    with pytest.raises(MachineError, match="needs a GPU"):
        runner.session({name: value.shape for name, value in feeds.items()}, graph=True)
    with pytest.raises(InputError, match="was given for input"):
        runner.session({name: (1, *value.shape) for name, value in feeds.items()})
    runner.close()


def test_fp16_is_what_convert_makes_and_its_input_is_fp16(tmp_path: Path) -> None:
    path = saved(networks.build("resnet18", image_size=32, num_classes=10), tmp_path)
    feeds = {"input": RNG.random((2, 3, 32, 32), np.float32)}
    runner = compare_with_ort(path, feeds, 2e-2, arithmetic="fp16", device="cpu")
    assert [binding.dtype for binding in runner.inputs] == ["float16"]
    assert [binding.dtype for binding in runner.outputs] == ["float32"]


def test_fp16_of_a_sparse_fp32_model_is_refused(bundle: Path) -> None:
    with pytest.raises(InputError, match=r"compute in fp32 and fp16 was asked for.*--precision fp16"):
        load_torch(bundle / "model.sparse.onnx", "fp16", device="cpu")


def test_a_gpu_that_is_not_there_is_refused(bundle: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(MachineError, match=r"cuda:0: PyTorch .* finds no such GPU"):
        load_torch(bundle / "model.sparse.onnx", device="cuda:0")


def _interrupted(arithmetic: Any) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    with settings(arithmetic):
        assert (cudnn.allow_tf32, matmul.allow_tf32) == (arithmetic == "tf32",) * 2
        assert cudnn.benchmark
        raise KeyError


def test_switches_are_left_as_they_were() -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit)
    for arithmetic in ("fp32", "tf32", "fp16"):
        with pytest.raises(KeyError):
            _interrupted(arithmetic)
        assert (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit) == before


def test_a_missing_input_is_named(bundle: Path) -> None:
    with pytest.raises(InputError, match="no array for input"):
        load_torch(bundle / "model.sparse.onnx", device="cpu").run({})


# --- on a GPU -----------------------------------------------------------------------------------------------------


def check_session(
    runner: TorchRunner, feeds: dict[str, Array], expected: dict[str, Array], graph: bool, tolerance: float
) -> None:
    session = runner.session({name: value.shape for name, value in feeds.items()}, graph)
    assert session.device_clock
    assert session.graph == graph
    for factor in (1.0, 0.5, 1.0):  # a graph must read what was uploaded last
        session.upload({name: (factor * value).astype(value.dtype) for name, value in feeds.items()})
        start = session.mark()
        session.enqueue()
        assert session.elapsed_us(start, session.mark()) > 0
    for name, value in session.download().items():
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(value.astype(np.float32), expected[name], rtol=0, atol=tolerance * largest)
    session.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("arithmetic", "tolerance"), [("fp32", 1e-4), ("tf32", 1e-2), ("fp16", 1e-2)])
def test_dense_on_the_gpu(arithmetic: Any, tolerance: float, tmp_path: Path) -> None:
    path = saved(network(sparsity=0.0), tmp_path)
    feeds = {"x": RNG.random((2, 16, 8, 8), np.float32)}
    runner = load_torch(path, arithmetic)
    assert runner.device == "cuda:0"
    for graph in (False, True):
        check_session(runner, feeds, run_file(path, feeds), graph, tolerance)
    assert any(note.startswith("2x16x8x8: layout ") for note in runner.notes)
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_sparse_on_the_gpu(bundle: Path, graph: bool) -> None:
    runner = load_torch(bundle / "model.sparse.onnx")
    assert runner.sparse_layers == 3
    feeds = inputs_of(runner)
    check_session(runner, feeds, run_file(bundle / "model.dense.onnx", feeds), graph, 1e-4)
    session = runner.session({name: value.shape for name, value in feeds.items()}, True)
    times = session.step_times(3)
    assert sum(form.startswith("sparse baked") for _, form, _ in times) == 3
    assert all(us > 0 for _, _, us in times)
    runner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "bare", "cupy", "pycuda"])
def test_arrays_on_the_device_are_read_where_they_lie(bundle: Path, library: str) -> None:
    runner = load_torch(bundle / "model.sparse.onnx")
    feeds = inputs_of(runner)
    (name,) = feeds
    expected = run_file(bundle / "model.dense.onnx", feeds)["y"]
    if library in ("torch", "bare"):
        array = torch.from_numpy(feeds[name]).cuda()
        address = array.data_ptr()
        array = Bare(array) if library == "bare" else array
    elif library == "cupy":
        array = pytest.importorskip("cupy").asarray(feeds[name])
        address = array.data.ptr
    else:
        pytest.importorskip("pycuda.autoprimaryctx")
        array = pytest.importorskip("pycuda.gpuarray").to_gpu(feeds[name])
        address = int(array.gpudata)
    assert runner._adopt(array, runner.inputs[0]).data_ptr() == address
    output = runner.run({name: array})["y"]
    assert output.is_cuda
    np.testing.assert_allclose(output.cpu().numpy(), expected, atol=1e-4 * np.abs(expected).max())
    if library == "cupy":
        import cupy

        np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(output)), output.cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [2, 3], "strides": [2, 1], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "pads": [0, 2, 1, 0], "dilations": [2, 1]},
    ],
)
def test_our_max_pool(attributes: dict[str, Any], dtype: str, layout: Any, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 23, 17, device="cuda", dtype=getattr(torch, dtype))
    x[1, 2, 7, 7] = float("nan")
    node = helper.make_node("MaxPool", ["x"], ["y"], **attributes)
    runner = load_torch(saved(one_node("MaxPool", attributes, [], 17, x.shape), tmp_path))
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    call = Call(node, 17, (x,), (False,))
    expected = build(call)(x)
    (run,) = runner._our_pool(call, build(call)).values()
    got = run(x)
    assert got.stride() == expected.stride()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    runner.close()
