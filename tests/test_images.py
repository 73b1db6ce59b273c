"""Pictures as inputs: the numbers against their definition, layouts, and what is refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.images import DEVIATION, MEAN, best_classes, load_images, read_labels
from sparsedeploy.runtime import Binding

NCHW = Binding("x", ("N", 3, 32, 32), "float32")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Left half red, right half blue, twice as wide as high."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, :60, 0], pixels[:, 60:, 2] = 255, 255
    image.fromarray(pixels).save(tmp_path / "red blue.png")
    return tmp_path / "red blue.png"


def test_pixels_are_cropped_scaled_and_normalised(picture: Path) -> None:
    x = load_images([picture], NCHW)
    assert (x.shape, x.dtype) == ((1, 3, 32, 32), np.float32)
    red = (np.array([1, 0, 0]) - MEAN) / DEVIATION
    blue = (np.array([0, 0, 1]) - MEAN) / DEVIATION
    np.testing.assert_allclose(x[0, :, 16, 2], red, rtol=1e-6)
    np.testing.assert_allclose(x[0, :, 16, -3], blue, rtol=1e-6)
    assert x.flags.c_contiguous


def test_the_centre_is_cut_out(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((256, 256, 3), np.uint8)
    pixels[16:240, 16:240] = 255  # exactly what 256 cropped to 224 keeps
    image.fromarray(pixels).save(tmp_path / "frame.png")
    x = load_images([tmp_path / "frame.png"], Binding("x", (1, 3, "H", "W"), "uint8"))
    assert x.shape == (1, 3, 224, 224)
    assert x.min() == 255


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
def test_layouts_and_types(picture: Path, dtype: str) -> None:
    first = load_images([picture, picture], Binding("x", ("N", 3, 32, 48), dtype))
    last = load_images([picture], Binding("x", (2, 32, 48, 3), dtype))
    assert (first.shape, last.shape) == ((2, 3, 32, 48), (2, 32, 48, 3))
    assert first.dtype == last.dtype == dtype
    np.testing.assert_array_equal(first.transpose(0, 2, 3, 1), last)


@pytest.mark.parametrize("shape", [("N", 1, 32, 32), ("N", 3), ("N", 3, 32, 32, 32)])
def test_inputs_that_take_no_pictures(picture: Path, shape: Any) -> None:
    with pytest.raises(InputError, match="no batch of colour pictures"):
        load_images([picture], Binding("x", shape, "float32"))


def test_what_is_no_picture(picture: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    half = picture.read_bytes()
    (tmp_path / "half.png").write_bytes(half[: len(half) // 2])
    for name, told in (
        ("notes.txt", "is no picture"),
        ("half.png", "is no picture"),
        ("absent.png", "no such file"),
        ("", "is a folder"),
    ):
        with pytest.raises(InputError, match=told):
            load_images([tmp_path / name], NCHW)
    with pytest.raises(InputError, match="given 2 times and the model takes 3"):
        load_images([picture, picture], Binding("x", (3, 3, 32, 32), "float32"))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "PIL":
            raise ModuleNotFoundError("No module named 'PIL'", name="PIL")
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="pip install pillow"):
        load_images([tmp_path / "cat.jpg"], NCHW)


def test_the_best_classes() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 3.0], [5.0, 0.0, 0.0, 0.0]])
    first, second = best_classes(logits, 2)
    assert [at for at, _ in first] == [1, 3]
    total = np.exp(logits[1]).sum()
    assert second[0] == (0, pytest.approx(np.exp(5.0) / total))
    shares = np.array([[[[0.25]], [[0.75]]]])
    assert best_classes(shares, 5) == ([(1, 0.75), (0, 0.25)],), "probabilities stay as they are"


def test_labels(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\n dog \n")
    assert read_labels(tmp_path / "labels.txt") == ("cat", "dog")
    with pytest.raises(InputError, match="one label a line"):
        read_labels(tmp_path)
