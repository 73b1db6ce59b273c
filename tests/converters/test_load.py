"""Reading and writing model files: every odd form that is undone, and every bad file that is refused in words."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import OLD_ONNXRUNTIME, SHARED
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from sparsedeploy.converters.fold_constants import fold_constants
from sparsedeploy.converters.load import load, save, skeleton
from sparsedeploy.converters.shapes import infer_shapes, resolve_inputs
from sparsedeploy.errors import InputError, MachineError, SparseDeployError

RNG = np.random.default_rng(5)
WEIGHT = RNG.standard_normal((8, 8, 3, 3)).astype(np.float32) * (RNG.random((8, 8, 3, 3)) < 0.2)
WEIGHT = WEIGHT.astype(np.float32)
BIAS = RNG.standard_normal(8).astype(np.float32)
X = RNG.standard_normal((1, 8, 6, 6)).astype(np.float32)


def tensor(name: str, values: np.ndarray) -> TensorProto:
    return numpy_helper.from_array(values, name)


def build(
    nodes: list[NodeProto] | None = None, initializers: list[TensorProto] | None = None, **model: object
) -> ModelProto:
    """One Conv "y" of x, w, b unless nodes say otherwise; x and y are [1, 8, 6, 6]."""
    nodes = nodes or [helper.make_node("Conv", ["x", "w", "b"], ["y"], "conv1", pads=[1, 1, 1, 1])]
    initializers = [tensor("w", WEIGHT), tensor("b", BIAS)] if initializers is None else initializers
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, 6, 6]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    options = {"ir_version": 8, "opset_imports": [helper.make_opsetid("", 13)], **model}
    return helper.make_model(graph, **options)


def write(proto: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def write_external(folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    onnx.save(build(), path, save_as_external_data=True, location=f"{name}.data", size_threshold=0)
    return path


def run(path: Path) -> np.ndarray:
    return np.asarray(
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]
    )


def assert_same_after(path: Path, folder: Path) -> ModelProto:
    """Loading and saving keeps what the model computes (to 1e-5 of its largest output); returns the saved model."""
    model = load(path)
    (out,) = save(model, folder / "out.onnx")
    before, after = run(path), run(out)
    assert np.abs(before - after).max() <= 1e-5 * np.abs(before).max()
    assert np.abs(before).max() > 0
    onnx.checker.check_model(str(out))
    return onnx.load(out)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


# --- bad files


def test_not_a_file(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.onnx")
    assert "folder" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"hello, this is no model at all", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\x80\x02}q\x00.", "torch.onnx.export"),
        (b"PK\x03\x04archive/data.pkl", "torch.onnx.export"),
        (b"\x08\x08", "0 nodes"),
        (b"\x1c\x00\x00\x00TFL3", "TensorFlow Lite"),
    ],
)
def test_foreign_content(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert words in refusal(path)


def test_checkpoint_by_name(tmp_path: Path) -> None:
    path = tmp_path / "resnet.pth"
    path.write_bytes(b"anything")
    assert 'torch.onnx.export(model.eval(), (torch.zeros(1, 3, 224, 224),), "model.onnx")' in refusal(path)


def test_truncated(tmp_path: Path) -> None:
    data = build().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: len(data) // 2])
    assert "truncated" in refusal(path)


def test_no_opset(tmp_path: Path) -> None:
    proto = build()
    del proto.opset_import[:]
    assert "opset_import" in refusal(write(proto, tmp_path))


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = write(build(), tmp_path)
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(MachineError, match="Permission denied"):
        load(path)


# --- bad content


def broken_bias(proto: ModelProto) -> None:
    proto.graph.initializer[1].CopyFrom(tensor("b", BIAS[:7]))


def nan_weight(proto: ModelProto) -> None:
    weight = WEIGHT.copy()
    weight[1, 2, 0, 1] = np.nan
    weight[3, 0, 0, 0] = -np.inf
    proto.graph.initializer[0].CopyFrom(tensor("w", weight))


def short_data(proto: ModelProto) -> None:
    proto.graph.initializer[0].raw_data = proto.graph.initializer[0].raw_data[:-4]


def unknown_type(proto: ModelProto) -> None:
    proto.graph.initializer[0].data_type = 99


def kernel_shape(proto: ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("kernel_shape", [5, 5]))


def wrong_rank(proto: ModelProto) -> None:
    proto.graph.initializer[0].CopyFrom(tensor("w", WEIGHT.reshape(8, 72)))


def zero_stride(proto: ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("strides", [0, 1]))


def three_pads(proto: ModelProto) -> None:
    proto.graph.node[0].attribute[0].ints.pop()


def bad_group(proto: ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("group", 3))


def dangling(proto: ModelProto) -> None:
    proto.graph.node[0].input[2] = "lost"


def cycle(proto: ModelProto) -> None:
    proto.graph.node[0].input[0] = "z"
    proto.graph.node.append(helper.make_node("Relu", ["y"], ["z"], "loop"))


def lost_output(proto: ModelProto) -> None:
    proto.graph.output[0].name = "elsewhere"


def twice(proto: ModelProto) -> None:
    proto.graph.node.append(proto.graph.node[0])


def unknown_attribute(proto: ModelProto) -> None:
    proto.graph.node[0].attribute.append(helper.make_attribute("colour", 3))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (broken_bias, ["conv1", "[7]", "need [8]"]),
        (nan_weight, ["conv1", "weight 'w'", "2 values of 576", "[1, 2, 0, 1]"]),
        (short_data, ["'w'", "2300 bytes", "2304"]),
        (unknown_type, ["'w'", "99"]),
        (kernel_shape, ["conv1", "[5, 5]", "[3, 3] was needed"]),
        (wrong_rank, ["conv1", "[8, 72]"]),
        (zero_stride, ["conv1", "strides", "[0, 1]"]),
        (three_pads, ["conv1", "pads", "4 values"]),
        (bad_group, ["conv1", "group is 3", "8 output channels"]),
        (dangling, ["conv1", "'lost'"]),
        (cycle, ["cycle"]),
        (lost_output, ["'elsewhere'"]),
        (twice, ["single static assignment"]),
        (unknown_attribute, ["colour"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named(tmp_path: Path, damage, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    proto = build()
    damage(proto)
    text = refusal(write(proto, tmp_path))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_not_finite_in_every_float_type(tmp_path: Path, dtype: str) -> None:
    weight = WEIGHT.copy()
    weight[0, 0, 0, 0] = np.inf
    element = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}[dtype]
    stored = tensor("w", weight.astype(helper.tensor_dtype_to_np_dtype(element)))
    proto = build([helper.make_node("Conv", ["x", "w"], ["y"], "conv1", pads=[1, 1, 1, 1])], [stored])
    assert "1 values of 576" in refusal(write(proto, tmp_path))


def test_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(build().SerializeToString().replace(b"conv1", b"con\xff1"))
    assert "no text" in refusal(path)
    path.write_bytes(build().SerializeToString().replace(b"conv1", b"con\n1"))
    assert "no text" in refusal(path)


# --- what is let through


def test_unknown_operators_pass(tmp_path: Path) -> None:
    """Operators of a custom domain, without an import, and of no known set."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["h"], "conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Wonder", ["h"], ["i"], domain="com.example"),
        helper.make_node("EfficientNMS_TRT", ["i"], ["y"]),
    ]
    model = load(write(build(nodes), tmp_path))
    assert [node.op_type for node in model.proto.graph.node] == ["Conv", "Wonder", "EfficientNMS_TRT"]
    assert model.proto.graph.node[2].domain == ""


def test_newer_versions_pass(tmp_path: Path) -> None:
    proto = build(
        ir_version=onnx.IR_VERSION + 1, opset_imports=[helper.make_opsetid("", onnx.defs.onnx_opset_version() + 1)]
    )
    model = load(write(proto, tmp_path))
    assert model.proto.ir_version == onnx.IR_VERSION + 1
    assert model.opset() == onnx.defs.onnx_opset_version() + 1


def test_input_without_rank_passes(tmp_path: Path) -> None:
    proto = build()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].ClearField("type")
    proto.graph.ClearField("name")
    assert load(write(proto, tmp_path)).proto.graph.input[0].name == "x"


def test_untouched_model_keeps_its_bytes(tmp_path: Path) -> None:
    path = write(build(), tmp_path)
    model = load(path)
    assert model.proto.SerializeToString(deterministic=True) == build().SerializeToString(deterministic=True)
    assert model.notes == []


# --- what is undone


def test_domain_spelled(tmp_path: Path) -> None:
    proto = build(opset_imports=[helper.make_opsetid("ai.onnx", 13), helper.make_opsetid("other", 2)])
    proto.graph.node[0].domain = "ai.onnx"
    saved = assert_same_after(write(proto, tmp_path), tmp_path)
    assert saved.graph.node[0].domain == ""
    assert [(entry.domain, entry.version) for entry in saved.opset_import] == [("", 13), ("other", 2)]


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_as_inputs(tmp_path: Path, ir_version: int) -> None:
    proto = build(ir_version=ir_version)
    for name, array in (("w", WEIGHT), ("b", BIAS)):
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    path = write(proto, tmp_path)
    model = load(path)
    assert [value.name for value in model.graph.inputs()] == ["x"]
    assert [value.name for value in model.proto.graph.input] == (["x", "w", "b"] if ir_version == 3 else ["x"])
    assert sum("2 initializers also listed as graph input" in note for note in model.notes) == 1
    assert_same_after(path, tmp_path)


def test_old_file_that_lists_no_initializer(tmp_path: Path) -> None:
    """IR 3 demands initializers among the inputs; files that break the rule are mended, so that the checker passes."""
    saved = assert_same_after(write(build(ir_version=3), tmp_path), tmp_path)
    assert [value.name for value in saved.graph.input] == ["x", "w", "b"]


@pytest.mark.parametrize("form", ["linear", "coordinates"])
def test_sparse_initializer(tmp_path: Path, form: str) -> None:
    places = np.flatnonzero(WEIGHT)
    indices = places if form == "linear" else np.stack(np.unravel_index(places, WEIGHT.shape), axis=1)
    proto = build(initializers=[tensor("b", BIAS)])
    values = tensor("w", WEIGHT.reshape(-1)[places])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, tensor("i", indices), list(WEIGHT.shape)))
    model = load(write(proto, tmp_path))
    assert "1 sparse initializer read and made dense" in model.notes
    assert not model.proto.graph.sparse_initializer
    weight = model.graph.array("w")
    assert weight is not None
    np.testing.assert_array_equal(weight, WEIGHT)
    (out,) = save(model, tmp_path / "out.onnx")
    np.testing.assert_allclose(run(out), run(write(build(), tmp_path, "dense.onnx")), atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 576])
def test_sparse_initializer_outside_its_shape(tmp_path: Path, bad: int) -> None:
    proto = build(initializers=[tensor("b", BIAS)])
    indices = tensor("i", np.array([3, bad], np.int64))
    values = tensor("w", np.ones(2, np.float32))
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, list(WEIGHT.shape)))
    assert "not one position inside" in refusal(write(proto, tmp_path))


def function(domain: str, name: str, nodes: list[NodeProto], opset: int = 13) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_function(domain, name, ["a", "k"], ["c"], nodes, imports)


def with_functions(*functions: onnx.FunctionProto) -> ModelProto:
    nodes = [
        helper.make_node("Block", ["x", "w"], ["h"], domain="local"),
        helper.make_node("Block", ["h", "w"], ["y"], domain="local"),
    ]
    imports = [helper.make_opsetid("", 13), helper.make_opsetid("local", 1)]
    return build(nodes, [tensor("w", WEIGHT)], opset_imports=imports, functions=list(functions))


def test_functions_inlined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested functions, one with a large Constant in it; the inliner is never given the large data."""
    mask = (WEIGHT != 0).astype(np.float32)
    inner = function("local", "Inner", [helper.make_node("Conv", ["a", "k"], ["c"], "conv", pads=[1, 1, 1, 1])])
    body = [
        helper.make_node("Constant", [], ["m"], value=tensor("m", mask)),
        helper.make_node("Mul", ["k", "m"], ["km"]),
        helper.make_node("Inner", ["a", "km"], ["c"], domain="local"),
    ]
    path = write(with_functions(inner, function("local", "Block", body)), tmp_path)
    seen: list[int] = []
    inline = onnx.inliner.inline_local_functions

    def spy(proto: ModelProto) -> ModelProto:
        seen.append(proto.ByteSize())
        return inline(proto)

    monkeypatch.setattr(onnx.inliner, "inline_local_functions", spy)
    saved = assert_same_after(path, tmp_path)
    assert seen
    assert max(seen) < 1500 < mask.nbytes
    assert [node.op_type for node in saved.graph.node] == ["Constant", "Mul", "Conv"] * 2
    assert not saved.functions
    assert "2 model-local functions inlined" in load(path).notes


def test_function_that_calls_itself(tmp_path: Path) -> None:
    loop = function("local", "Block", [helper.make_node("Block", ["a", "k"], ["c"], domain="local")])
    assert "'Block' calls itself" in refusal(write(with_functions(loop), tmp_path))


def test_function_of_another_opset_stays(tmp_path: Path) -> None:
    other = function("local", "Block", [helper.make_node("Conv", ["a", "k"], ["c"], pads=[1, 1, 1, 1])], opset=18)
    model = load(write(with_functions(other), tmp_path))
    assert [node.op_type for node in model.proto.graph.node] == ["Block", "Block"]
    assert any("Block" in note and "not inlined" in note for note in model.notes)


def test_nodes_out_of_order(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["h"], ["y"]),
        helper.make_node("Conv", ["x", "w", "b"], ["h"], "conv1", pads=[1, 1, 1, 1]),
    ]
    saved = assert_same_after(write(build(nodes), tmp_path), tmp_path)
    assert [node.op_type for node in saved.graph.node] == ["Conv", "Relu"]
    assert any("order" in note for note in load(tmp_path / "model.onnx").notes)


# --- external data


def test_external_data_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_external(tmp_path / "models")
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = load(Path("../models/model.onnx"))
    monkeypatch.chdir(tmp_path)
    weight = model.graph.array("w")
    assert model.graph.initializers["w"].data_location == TensorProto.EXTERNAL
    assert model.graph.initializers["b"].data_location != TensorProto.EXTERNAL  # small ones are read in
    assert weight is not None
    np.testing.assert_array_equal(weight, WEIGHT)
    (out,) = save(model, tmp_path / "elsewhere" / "out.onnx")
    np.testing.assert_array_equal(run(out), run(tmp_path / "models" / "model.onnx"))


def test_both_files_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_external(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert_same_after(tmp_path / "b" / "model.onnx", tmp_path)


def test_side_file_missing(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    (tmp_path / "model.onnx.data").unlink()
    text = refusal(path)
    assert "'w'" in text
    assert str(tmp_path / "model.onnx.data") in text
    assert "does not exist" in text


def test_side_file_truncated(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    side = tmp_path / "model.onnx.data"
    side.write_bytes(side.read_bytes()[:2000])
    assert "needs 2304" in refusal(path)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "", "sub/../../secret", "link"])
def test_side_file_outside_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "secret").write_bytes(b"\0" * 5000)
    (tmp_path / "m" / "link").symlink_to(tmp_path / "secret")
    path = write_external(tmp_path / "m")
    proto = onnx.load(path, load_external_data=False)
    for entry in proto.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path = write(proto, tmp_path / "m")
    assert "refused" in refusal(path) or location == "link"
    if location == "link":
        assert "symbolic link" in refusal(path)


@pytest.mark.parametrize("key", ["offset", "length"])
def test_side_file_with_senseless_numbers(tmp_path: Path, key: str) -> None:
    path = write_external(tmp_path)
    for value in ("-5", "many", "99999999999999"):
        proto = onnx.load(path, load_external_data=False)
        for entry in proto.graph.initializer[0].external_data:
            if entry.key == key:
                entry.value = value
        assert "needs 2304" in refusal(write(proto, tmp_path, "changed.onnx"))


def test_side_file_gone_after_loading(tmp_path: Path) -> None:
    model = load(write_external(tmp_path))
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(InputError, match="cannot be read from its side file"):
        save(model, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


# --- writing


def test_side_file_written_above_the_limit(tmp_path: Path) -> None:
    """Several megabytes, half in the file and half beside it, a body's initializer included."""
    large = RNG.standard_normal((512, 512)).astype(np.float32)
    then = helper.make_graph(
        [helper.make_node("MatMul", ["r", "inside"], ["t"])],
        "then",
        [],
        [helper.make_empty_tensor_value_info("t")],
        [tensor("inside", large)],
    )
    other = helper.make_graph(
        [helper.make_node("MatMul", ["r", "outer"], ["e"])], "else", [], [helper.make_empty_tensor_value_info("e")]
    )
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["s"]),
        helper.make_node("Gather", ["s", "index"], ["r"], axis=1),
        helper.make_node("Constant", [], ["flag"], value=tensor("flag", np.array(True))),
        helper.make_node("If", ["flag"], ["m"], then_branch=then, else_branch=other),
        helper.make_node("Gather", ["m", "index"], ["n"], axis=1),
        helper.make_node("ReduceSum", ["n"], ["o"]),
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "o"], ["y"]),
    ]
    index = np.zeros(512, np.int64)
    constants = [
        tensor("w", WEIGHT),
        tensor("b", BIAS),
        tensor("outer", large),
        tensor("index", index),
        tensor("shape", np.array([1, -1])),
    ]
    path = tmp_path / "model.onnx"
    onnx.save(build(nodes, constants), path, save_as_external_data=True, location="user.data", size_threshold=1 << 20)
    model = load(path)
    before = model.proto.SerializeToString()
    first, second = tmp_path / "one", tmp_path / "two"
    for folder in (first, second):
        folder.mkdir()
        assert save(model, folder / "out.onnx", side_file_above=1_000_000) == (
            folder / "out.onnx",
            folder / "out.onnx.data",
        )
    assert model.proto.SerializeToString() == before
    assert (first / "out.onnx").stat().st_size < 5000
    for name in ("out.onnx", "out.onnx.data"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    onnx.checker.check_model(str(first / "out.onnx"))
    np.testing.assert_allclose(run(first / "out.onnx"), run(path), rtol=1e-5)
    assert save(load(first / "out.onnx"), tmp_path / "whole.onnx") == (tmp_path / "whole.onnx",)
    np.testing.assert_allclose(run(tmp_path / "whole.onnx"), run(path), rtol=1e-5)


def test_the_users_file_is_spared(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    model = load(path)
    with pytest.raises(InputError, match="overwritten"):
        save(model, path)
    with pytest.raises(InputError, match="overwritten"):
        save(model, tmp_path / "model.onnx.data")


def test_not_writable(tmp_path: Path) -> None:
    model = load(write(build(), tmp_path))
    with pytest.raises(MachineError, match="cannot be written"):
        save(model, tmp_path / "no" / "such" / "folder.onnx")


# --- lean copies


def test_skeleton_has_no_large_data(tmp_path: Path) -> None:
    """Initializers, Constant nodes and bodies give up their data, names in both branches included."""
    branches = {
        key: helper.make_graph(
            [helper.make_node("Conv", ["x", "v"], [key], pads=[1, 1, 1, 1])],
            key,
            [],
            [helper.make_empty_tensor_value_info(key)],
            [tensor("v", WEIGHT * scale)],
        )
        for key, scale in (("then_branch", 1), ("else_branch", 2))
    }
    nodes = [
        helper.make_node("Constant", [], ["k"], value=tensor("k", WEIGHT)),
        helper.make_node("Conv", ["x", "k", "b"], ["h"], pads=[1, 1, 1, 1]),
        helper.make_node("Constant", [], ["flag"], value=tensor("flag", np.array(True))),
        helper.make_node("If", ["flag"], ["i"], **branches),
        helper.make_node("Add", ["h", "i"], ["j"]),
        helper.make_node("Conv", ["j", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    model = load(write(build(nodes), tmp_path))
    lean = skeleton(model.proto)
    assert lean.ByteSize() < 1500 < WEIGHT.nbytes
    inputs = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in lean.graph.input}
    assert len(inputs) == 5
    assert inputs["w"] == inputs["k"] == [8, 8, 3, 3]
    onnx.checker.check_model(lean, full_check=True)
    assert model.proto.graph.node[0].op_type == "Constant"


def conv_cases() -> list[Path]:
    if SHARED is None:
        return []
    return sorted(path for folder in ("cases", "models") for path in (SHARED / folder).rglob("*.onnx"))


@pytest.mark.parametrize("path", conv_cases(), ids=lambda path: path.stem)
def test_real_files_load(path: Path, tmp_path: Path) -> None:
    model = load(path)
    original = onnx.load(path)
    assert [node.SerializeToString() for node in model.proto.graph.node] == [
        node.SerializeToString() for node in original.graph.node
    ]
    (out,) = save(model, tmp_path / "out.onnx")
    onnx.checker.check_model(str(out))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Flip, replace, drop or cut bytes, mostly near the ends, where the structure is and the weights are not."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        edge = rng.randrange(min(len(content), 600))
        place = rng.choice((edge, len(content) - 1 - edge, rng.randrange(len(content))))
        kind = rng.random()
        if kind < 0.5:
            content[place] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            content[place] = rng.randrange(256)
        elif kind < 0.9:
            del content[place : place + rng.choice((1, 2, 8))]
        else:
            del content[place:]
        if not content:
            break
    return bytes(content)


@pytest.mark.skipif(OLD_ONNXRUNTIME, reason="this ONNX Runtime aborts the process on one of these files")
@pytest.mark.parametrize("kind", ["plain", "mask", "function"])
def test_damaged_files_never_crash(tmp_path: Path, kind: str) -> None:
    """Whatever a few wrong bytes do to a model, it is either used or refused in one paragraph."""
    masked = [
        helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["w", "f"], ["wf"]),
        helper.make_node("Conv", ["x", "wf", "b"], ["y"], "conv1", pads=[1, 1, 1, 1]),
    ]
    conv = helper.make_node("Conv", ["a", "k"], ["c"], "conv", pads=[1, 1, 1, 1], strides=[1, 1])
    proto = {
        "plain": build(),
        "mask": build(masked, [tensor("w", WEIGHT), tensor("b", BIAS), tensor("m", WEIGHT != 0)]),
        "function": with_functions(function("local", "Block", [conv])),
    }[kind]
    data, rng, refusals = proto.SerializeToString(), random.Random(kind), []
    path = tmp_path / "model.onnx"
    for _ in range(150):
        path.write_bytes(damaged(data, rng))
        try:
            model = load(path)
            inputs = resolve_inputs(model, {}, None)
            fold_constants(model)
            infer_shapes(model, inputs)
            save(model, tmp_path / "out.onnx")
        except SparseDeployError as error:
            refusals.append(str(error))
    assert 30 < len(refusals) < 150
    assert not [text for text in refusals if "\n" in text]
