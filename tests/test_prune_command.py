"""`sparsedeploy prune`: test models with zeros, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from small_models import network, saved
from typer.testing import CliRunner, Result

from sparsedeploy.cli import app
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.pruning import METHODS, prune_file
from sparsedeploy.reading import count_zeros, read


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(network(sparsity=0.0), tmp_path)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def weights(path: Path) -> dict[str, NDArray[np.float32]]:
    return {t.name: numpy_helper.to_array(t).astype(np.float32) for t in onnx.load(path).graph.initializer}


def test_nine_tenths_are_zero_and_the_rest_is_as_it_was(model: Path, tmp_path: Path) -> None:
    result = call("prune", model, "--sparsity", "0.9", "-o", tmp_path / "p.onnx")
    assert result.exit_code == 0
    before, after = weights(model), weights(tmp_path / "p.onnx")
    convolutions = ("w1", "w2", "w3")
    zeros = sum(int((after[name] == 0).sum()) for name in convolutions)
    assert zeros == round(0.9 * sum(after[name].size for name in convolutions))
    for name, values in after.items():
        kept = values != 0 if name in convolutions else np.ones(values.shape, bool)
        np.testing.assert_array_equal(values[kept], before[name][kept])
    least_kept = min(float(np.abs(after[n][after[n] != 0]).min()) for n in convolutions)
    most_gone = max(float(np.abs(before[n][after[n] == 0]).max()) for n in convolutions)
    assert least_kept >= most_gone  # global magnitude
    assert "needs retraining" in result.stdout
    assert result.stdout.splitlines()[-1] == f"Next: sparsedeploy scan {tmp_path / 'p.onnx'}"


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.onnx"
    report = prune_file(model, out, "2:4" if method == "n:m" else "0.5", method, (), 0)
    assert report.sparsity == pytest.approx(0.5, abs=1e-3)
    layers = read(out, find("a100")).layers
    counted = [layer.zeros for layer in layers if layer.zeros]
    assert sum(zeros.nnz for zeros in counted) == report.total - report.zeros_after
    if method == "n:m":
        assert all(zeros.two_four for zeros in counted)
    if method == "magnitude-layer":
        assert all(zeros.sparsity == pytest.approx(0.5, abs=1e-3) for zeros in counted)


def test_random_follows_its_seed(model: Path, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.onnx" for name in "abc"]
    for path, seed in zip(files, (1, 1, 2), strict=True):
        prune_file(model, path, "0.5", "random", (), seed)
    a, b, c = (path.read_bytes() for path in files)
    assert a == b
    assert a != c


def test_chosen_layers_alone(model: Path, tmp_path: Path) -> None:
    report = prune_file(model, tmp_path / "p.onnx", "0.8", "magnitude-layer", ("c3",), 0)
    assert [weight.layers for weight in report.pruned] == [("c3",)]
    assert count_zeros(weights(tmp_path / "p.onnx")["w1"], 1).nnz == weights(model)["w1"].size


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_types_are_kept(kind: int, tmp_path: Path) -> None:
    model = saved(network(kind, sparsity=0.0), tmp_path)
    prune_file(model, tmp_path / "p.onnx", "0.75", "magnitude-global", (), 0)
    assert {t.data_type for t in onnx.load(tmp_path / "p.onnx").graph.initializer} == {kind}
    layers = read(tmp_path / "p.onnx", find("a100")).layers
    assert np.mean([layer.sparsity for layer in layers]) == pytest.approx(0.75, abs=1e-3)


def test_external_data_is_read_and_the_original_kept(tmp_path: Path) -> None:
    onnx.save(
        network(sparsity=0.0), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    before = (tmp_path / "w.bin").read_bytes()
    prune_file(tmp_path / "m.onnx", tmp_path / "deep" / "p.onnx", "0.5", "magnitude-global", (), 0)
    assert (tmp_path / "w.bin").read_bytes() == before
    onnx.checker.check_model(str(tmp_path / "deep" / "p.onnx"))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.onnx"]


def test_an_existing_file_is_replaced_only_on_success(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "p.onnx"
    out.write_text("old")
    with pytest.raises(InputError, match="nope"):
        prune_file(model, out, "0.5", "random", ("nope",), 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sparsedeploy.pruning.save", full)
        with pytest.raises(MachineError, match="No space left"):
            prune_file(model, out, "0.5", "random", (), 0)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "p.onnx"]
    prune_file(model, out, "0.5", "random", (), 0)
    onnx.checker.check_model(str(out))


@pytest.mark.parametrize(
    ("sparsity", "method", "text"),
    [
        ("0.5", "magic", "--method magic: needed one of magnitude-global"),
        ("4:2", "n:m", "0 < N < M"),
        ("0:4", "n:m", "0 < N < M"),
        ("0.5", "n:m", "it is N:M"),
        ("²:4", "n:m", "it is N:M"),
        ("50%", "random", "from 0 to below 1"),
        ("inf", "random", "from 0 to below 1"),
    ],
)
def test_what_is_refused(sparsity: str, method: str, text: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        prune_file(model, tmp_path / "p.onnx", sparsity, method, (), 0)
    assert text in str(error.value)
    assert not (tmp_path / "p.onnx").exists()


def test_a_link_to_the_input_is_the_input(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(model)
    with pytest.raises(InputError, match="is the input itself"):
        prune_file(model, tmp_path / "link.onnx", "0.5", "random", (), 0)
