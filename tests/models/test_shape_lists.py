"""The shape lists hold what they say: they agree with the networks and with the published tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sparsedeploy.converters.graph import attribute
from sparsedeploy.errors import InputError
from sparsedeploy.models.networks import build
from sparsedeploy.models.shapes import LISTS, Work, pruned_weight, real_work, work


def convolutions(name: str, kernel: int) -> set[tuple[int, int, int, int]]:
    """(oc, ic, input side, stride) of a network's ungrouped square convolutions at 224x224."""
    model = build(name)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
    graph = onnx.shape_inference.infer_shapes(model).graph
    sides = {v.name: v.type.tensor_type.shape.dim[2].dim_value for v in (*graph.input, *graph.value_info)
             if len(v.type.tensor_type.shape.dim) == 4}  # fmt: skip
    found = set()
    for node in model.graph.node:
        if node.op_type == "Conv" and attribute(node, "group") == 1:
            oc, ic, kh, _ = shapes[node.input[1]]
            if kh == kernel:
                found.add((oc, ic, sides[node.input[0]], attribute(node, "strides")[0]))
    return found


def listed(name: str) -> set[tuple[int, int, int, int]]:
    return {(w.geometry.oc, w.geometry.ic, w.geometry.h, w.geometry.stride[0]) for w in LISTS[name]}


def test_resnet50_lists_are_the_networks_layers() -> None:
    assert listed("resnet50_1x1") == convolutions("resnet50", 1)
    assert listed("resnet50_3x3") == {shape for shape in convolutions("resnet50", 3) if shape[3] == 1}


def test_mobilenet_list_is_the_networks_layers() -> None:
    assert listed("mobilenet_v1_1x1") == convolutions("mobilenet_v1", 1)


def test_im2win_table() -> None:
    """Output sides and GFLOP at batch 128 as its authors print them."""
    published = [
        (55, 26.99), (56, 27.98), (111, 29.67), (109, 610.45), (20, 62.91), (10, 30.20), (222, 21.80), (110, 228.38),
        (54, 27.52), (26, 25.52), (12, 21.74), (5, 15.10),
    ]  # fmt: skip
    computed = [(w.geometry.oh, round(2 * w.geometry.macs * 128 / 1e9, 2)) for w in LISTS["im2win"]]
    assert computed == published


def test_escoin_keeps_its_maps_and_its_resnet_macs() -> None:
    assert all((w.geometry.oh, w.geometry.ow) == (w.geometry.h, w.geometry.w) for w in LISTS["escoin"])
    assert all(0.8 <= share < 0.99 for w in LISTS["escoin"] for share in w.sparsities)
    resnet = [w for w in LISTS["escoin"] if w.name.startswith("resnet50")]
    assert len(resnet) == 16
    assert {round(w.geometry.macs / 1e6, 1) for w in resnet} == {115.6}


def test_paper_settings() -> None:
    large = {(w.geometry.ic, w.geometry.h, w.batches) for w in work("paper/32-*")}
    assert large == {(32, 256, (32,))}
    assert sorted(w.geometry.oc for w in work("paper/32-*")) == [48, 64, 80, 96, 112, 128]
    assert sorted(w.geometry.oc for w in work("paper/16-*@128")) == [32, 40, 48]


def test_small_covers_every_property() -> None:
    shapes = [w.geometry for w in LISTS["small"]]
    assert any(g.stride[0] != g.stride[1] for g in shapes)
    assert any(g.dilation != (1, 1) and g.stride != (1, 1) for g in shapes)
    assert any(1 < g.group < g.ic for g in shapes)
    assert any(g.group == g.ic > 1 for g in shapes)
    assert any(g.pads[0] != g.pads[2] for g in shapes)
    assert any((g.h, g.w) == (1, 1) for g in shapes)
    assert any(g.ic > 256 for g in shapes)
    assert {(g.kh, g.kw) for g in shapes} >= {(1, 1), (1, 3), (3, 1), (2, 2), (3, 3), (5, 5), (7, 7)}
    assert max(g.macs for g in shapes) < 2e6


@pytest.mark.parametrize("entry", work(), ids=lambda entry: entry.name)
def test_geometry_is_a_valid_convolution(entry: Work) -> None:
    g = entry.geometry
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], group=g.group, strides=g.stride, pads=g.pads, dilations=g.dilation
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, g.ic, g.h, g.w]),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, g.weight_shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, g.oc, g.oh, g.ow])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    assert g.oh > 0
    assert g.ow > 0
    assert g.oc % g.group == g.ic % g.group == 0


def test_names_are_unique_and_selectable() -> None:
    for name, entries in LISTS.items():
        assert len({entry.name for entry in entries}) == len(entries), name
    assert work() == tuple(entry for entries in LISTS.values() for entry in entries)
    assert work("small") == LISTS["small"]
    assert [entry.name for entry in work("resnet50_3x3/64*", "small/map1*")] == ["64@56", "map1", "map1_1x1"]
    with pytest.raises(InputError, match="resnet50_3x3"):
        work("resnet51")


def test_pruned_weights_are_exact_in_fp16_and_as_sparse_as_asked() -> None:
    for entry in work("small/group2", "small/1x1", "resnet50_3x3/64@56"):
        weight = pruned_weight(entry.geometry, 0.9)
        assert weight.shape == entry.geometry.weight_shape
        assert weight.dtype == np.float32
        assert np.count_nonzero(weight) == weight.size - round(0.9 * weight.size)
        assert np.array_equal(weight, weight.astype(np.float16))
        assert np.array_equal(weight, pruned_weight(entry.geometry, 0.9))


def test_trained_filters_are_read_from_a_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = np.where(rng.random((64, 64, 3, 3)) < 0.1, rng.standard_normal((64, 64, 3, 3)), 0).astype(np.float32)
    np.savez(
        tmp_path / "resnet50_3x3_90.npz",
        bg1__64x64x3x3__s90=array,
        bg2__8x8x3x3__s90=array[:8, :8],
        bg3__8x8x3x3__s90=array[:8, :8],
    )
    np.savez(
        tmp_path / "mobilenetv1_1x1_90.npz",
        **dict.fromkeys(
            ("pw00_bias__16", *(f"pw{k:02}__16x8__s90" for k in (0, 1, 2, 3, 4, 5, 6, 11))), array[:16, :8, 0, 0]
        ),
    )
    found = {entry.name: (entry, weight) for entry, weight in real_work(tmp_path)}
    entry, weight = found["resnet50_3x3_90 bg1 64@56"]
    assert np.array_equal(weight, array.astype(np.float16))
    assert entry.geometry.weight_shape == weight.shape
    assert entry.sparsities == (round(1 - np.count_nonzero(weight) / weight.size, 4),)
    entry, weight = found["mobilenetv1_1x1_90 pw00 8-16@112"]
    assert weight.shape == entry.geometry.weight_shape == (16, 8, 1, 1)
    assert len(found) == 3 + 8


def test_a_folder_without_filters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of the files resnet50_3x3_90\.npz"):
        real_work(tmp_path)
