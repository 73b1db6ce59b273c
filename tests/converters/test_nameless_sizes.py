"""Placeholder names of open sizes: gone from what is written, real names kept."""

from __future__ import annotations

from pathlib import Path

import onnx
from small_models import network, saved

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL
from sparsedeploy.convert import Request, convert
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.open_sizes import forget_nameless
from sparsedeploy.devices import find


def names(model: onnx.ModelProto) -> list[str]:
    """Names of open sizes of inputs and outputs."""
    values = (*model.graph.input, *model.graph.output)
    return [dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if not dim.dim_value]


def test_placeholders_go_and_names_stay() -> None:
    model = network()
    batch, _, height, width = model.graph.input[0].type.tensor_type.shape.dim
    batch.dim_param, height.dim_param, width.dim_param = "images", "?", "None"
    forget_nameless(Model(model, Path("m.onnx")))
    assert names(model)[:3] == ["images", "", ""]


def test_a_model_whose_sizes_all_have_one_placeholder(tmp_path: Path) -> None:
    """As Paddle exports them: batch, height and width are "?", and TensorRT took them for one size."""
    model = network(size=8)
    for axis in (0, 2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "?"
    request = Request(
        saved(model, tmp_path), find("a100"), tmp_path / "out", layers=("*=packed",), shapes={"x": (1, 16, 8, 12)}
    )
    convert(request)
    for name in (DENSE_MODEL, SPARSE_MODEL):
        assert "?" not in names(onnx.load(tmp_path / "out" / name))
