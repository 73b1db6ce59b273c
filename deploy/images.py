"""Pictures as network inputs, the way ImageNet classifiers are evaluated, and the classes that come out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.runtime import Binding

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images, RGB in 0..1: what torchvision's and timm's classifiers were trained with."""
CROP = 224 / 256
"""Share of the shorter side that the centre crop keeps: resized to 256, cropped to 224."""
SIDE = 224
"""Height and width where the model leaves them open."""


def load_images(files: Sequence[Path], binding: Binding) -> NDArray[Any]:
    """A batch of pictures for an input [N, 3, H, W] (or [N, H, W, 3]), in its type.

    The shorter side is resized to H / CROP (bilinear), the centre H x W cut out, RGB scaled to 0..1 and normalised by
    ImageNet's mean and deviation; an integer input gets the pixels as they are, 0..255. Raises InputError for an input
    that takes no pictures and for a file that is none, MachineError without Pillow.
    """
    last, height, width = _layout(binding)
    batch = binding.shape[0]
    if isinstance(batch, int) and len(files) not in (1, batch):
        raise InputError(
            f"--image was given {len(files)} times and the model takes {batch} pictures at once. Give one (it is repeated) or "
            f"{batch}."
        )
    rows = [_picture(file, height, width) for file in files]
    if isinstance(batch, int) and len(rows) == 1:
        rows = rows * batch
    pixels: NDArray[Any] = np.stack(rows)
    dtype = np.dtype(binding.dtype)
    scaled = pixels
    if dtype.kind == "f":
        scaled = (pixels.astype(np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
    return np.ascontiguousarray(scaled if last else scaled.transpose(0, 3, 1, 2)).astype(dtype)


def _layout(binding: Binding) -> tuple[bool, int, int]:
    """Whether channels come last, height and width."""
    shape = binding.shape
    last = len(shape) == 4 and shape[3] == 3 and shape[1] != 3
    if len(shape) != 4 or not (last or shape[1] == 3):
        raise InputError(
            f"--image: input {binding.name!r} is {'x'.join(map(str, shape))}, which is no batch of colour pictures "
            "(Nx3xHxW or NxHxWx3). Give its arrays with --input x.npz."
        )
    height, width = (shape[1], shape[2]) if last else (shape[2], shape[3])
    return last, height if isinstance(height, int) else SIDE, width if isinstance(width, int) else SIDE


def _picture(file: Path, height: int, width: int) -> NDArray[np.uint8]:
    """One picture as [height, width, 3] RGB."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError as error:
        raise MachineError(
            "--image needs Pillow to read pictures, which is not installed. Install it with `pip install pillow`, or give the "
            "pixels as an array with --input x.npz."
        ) from error
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise InputError(f"--image {file}: {what}. Give a JPEG or PNG; --image may be repeated.")
    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"--image {file}: is no picture that Pillow can read ({error}). Give a JPEG or PNG."
        ) from error
    # Resized so that the crop takes CROP of the side that is scarcer for the wanted shape.
    scale = max(height / picture.height, width / picture.width) / CROP
    size = max(round(picture.width * scale), width), max(round(picture.height * scale), height)
    picture = picture.resize(size, Image.Resampling.BILINEAR)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return np.asarray(picture.crop((left, top, left + width, top + height)), np.uint8)


def read_labels(file: Path) -> tuple[str, ...]:
    """One label a line; raises InputError where the file cannot be read as text."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--labels {file}: cannot be read ({error}). Give a text file with one label a line."
        ) from error
    return tuple(line.strip() for line in lines)


def best_classes(scores: NDArray[Any], count: int) -> tuple[list[tuple[int, float]], ...]:
    """Per row of [N, classes] (trailing axes of size 1 allowed) the best classes with their probabilities.

    Scores that are no probabilities already (not in 0..1 or not summing to 1) go through softmax.
    """
    rows = np.asarray(scores, np.float64).reshape(scores.shape[0], -1)
    if rows.min() < 0 or not np.allclose(rows.sum(1), 1, atol=1e-2):
        rows = np.exp(rows - rows.max(1, keepdims=True))
        rows /= rows.sum(1, keepdims=True)
    order = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    return tuple([(int(at), float(row[at])) for at in best] for row, best in zip(rows, order, strict=True))
