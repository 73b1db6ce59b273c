"""One inference: a bundle, model or engine and its inputs in, outputs out, with what ran it said plainly."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.images import best_classes, load_images, read_labels
from sparsedeploy.record import Document, Record
from sparsedeploy.runtime import RUNNERS, Arithmetic, Binding, Runner, RunnerName, load

MOST_CLASSES, FEWEST_CLASSES = 100_000, 2
_RANDOM_SIDE = 224


class Output(Record):
    """One output: its shape, type, and what its numbers are like."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    mean: float | None
    """Of the finite elements; None where there is none."""
    not_finite: int
    """NaN and infinities."""


class Guess(Record):
    """One of the best classes of one picture."""

    index: int
    label: str
    """The class's number where no labels were given."""
    probability: float


class Ran(Document):
    """What `run` did."""

    model: str
    inputs: str
    """In words: the file, the pictures, or which random numbers."""
    runner: str
    arithmetic: str
    device: str
    sparse_layers: int
    notes: tuple[str, ...]
    outputs: tuple[Output, ...]
    best: tuple[tuple[Guess, ...], ...] = ()
    """Per picture, most probable first; empty where the first output is no [N, classes]."""
    written: str | None = None


@dataclass(frozen=True)
class Request:
    """What to run, and on what."""

    source: Path
    inputs: Path | None = None
    """An .npz with arrays named as the inputs, or an .npy for a model of one input."""
    images: tuple[Path, ...] = ()
    out: Path | None = None
    runner: RunnerName | None = None
    arithmetic: Arithmetic | None = None
    device: str | None = None
    labels: Path | None = None
    top: int = 5
    batch: int | None = None
    seed: int = 0
    tell: Callable[[str], None] = lambda stage: None


def run(request: Request) -> Ran:
    """Load, run once, and write the outputs where asked. Raises InputError, MachineError."""
    if request.inputs and request.images:
        raise InputError("--input and --image: both name the inputs. Leave one out.")
    if request.out is not None and request.out.suffix != ".npz":
        raise InputError(f"-o {request.out}: outputs are written as .npz. Give a name that ends so.")
    labels = read_labels(request.labels) if request.labels else ()
    request.tell("loading")
    runner = load(request.source, request.runner, request.arithmetic, request.device)
    try:
        if runner.device == "cpu" and runner.arithmetic == "tf32":
            raise MachineError("--precision tf32: it is an arithmetic of GPUs; on the CPU use fp32.")
        feeds, what = _feeds(request, runner)
        request.tell("running")
        results = runner.run(feeds)
        best = _best(results, labels, request.top) if request.images or request.labels else ()
        if request.out is not None:
            _write(request.out, results)
        return Ran(
            model=str(request.source),
            inputs=what,
            runner=runner.name,
            arithmetic=runner.arithmetic,
            device=runner.device,
            sparse_layers=runner.sparse_layers,
            notes=runner.notes,
            outputs=tuple(_describe(name, value) for name, value in results.items()),
            best=best,
            written=None if request.out is None else str(request.out),
        )
    finally:
        runner.close()


def _feeds(request: Request, runner: Runner) -> tuple[dict[str, NDArray[Any]], str]:
    if request.inputs is not None:
        return read_feeds(request.inputs, runner.inputs), str(request.inputs)
    if request.images:
        if len(runner.inputs) != 1:
            names = ", ".join(binding.name for binding in runner.inputs)
            raise InputError(
                f"--image: the model has {len(runner.inputs)} inputs ({names}), needed one. Give all with --input x.npz."
            )
        names = ", ".join(path.name for path in request.images)
        return {runner.inputs[0].name: load_images(request.images, runner.inputs[0])}, names
    return _random(request, runner), f"random numbers in 0..1, seed {request.seed}"


def _random(request: Request, runner: Runner) -> dict[str, NDArray[Any]]:
    rng, feeds = np.random.default_rng(request.seed), {}
    for binding in runner.inputs:
        shape = tuple(_size(binding, at, request.batch) for at in range(len(binding.shape)))
        dtype = np.dtype(binding.dtype)
        feeds[binding.name] = (rng.random(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)).astype(dtype)
    return feeds


def _size(binding: Binding, at: int, batch: int | None) -> int:
    size = binding.shape[at]
    if isinstance(size, int):
        if at == 0 and batch not in (None, size):
            raise InputError(f"--batch {batch}: the model fixes the batch at {size}. Leave --batch out.")
        return size
    if at == 0:
        return batch or 1
    if len(binding.shape) == 4:
        return _RANDOM_SIDE
    raise InputError(
        f"input {binding.name!r} is {'x'.join(map(str, binding.shape))}: its size {size} is open and nothing says what it is. Give "
        "the arrays with --input x.npz."
    )


def read_feeds(path: Path, bindings: tuple[Binding, ...]) -> dict[str, NDArray[Any]]:
    """Inputs from an .npz whose arrays are named as the model's, or an .npy for a model of one input.

    Floats are cast to the model's type. Raises InputError on any mismatch.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise InputError(
            f"--input {path}: {what}. Make one with numpy.savez(path, NAME=array), named as the model's inputs."
        )
    try:
        if not path.read_bytes()[:6].startswith((b"PK", b"\x93NUMPY")):
            raise ValueError("it begins like no such file")  # numpy would speak of pickles
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            arrays: dict[str, NDArray[Any]] = {bindings[0].name: loaded} if len(bindings) == 1 else {}
        else:
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--input {path}: not a readable .npz file ({error}). Make one with numpy.savez(path, NAME=array)."
        ) from error
    if len(bindings) == 1 and len(arrays) == 1:
        arrays = {bindings[0].name: next(iter(arrays.values()))}  # one array, one input: its name says nothing more
    return {binding.name: _fitting(path, binding, arrays) for binding in bindings}


def _fitting(path: Path, binding: Binding, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    array = arrays.get(binding.name)
    if array is None:
        raise InputError(
            f"--input {path}: no array named {binding.name!r}; it holds {', '.join(arrays) or 'nothing'}. "
            f"Save it with numpy.savez(path, **{{{binding.name!r}: array}})."
        )
    pairs = zip(array.shape, binding.shape, strict=False)
    if len(array.shape) != len(binding.shape) or any(isinstance(want, int) and want != size for size, want in pairs):
        raise InputError(
            f"--input {path}: {binding.name} is {'x'.join(map(str, array.shape))}, the model takes "
            f"{'x'.join(map(str, binding.shape))}."
        )
    dtype = np.dtype(binding.dtype)
    if array.dtype.kind not in "fiub" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise InputError(
            f"--input {path}: {binding.name} holds {array.dtype}, the model takes {dtype}; save it as that type."
        )
    return array.astype(dtype)


def _best(results: Mapping[str, NDArray[Any]], labels: tuple[str, ...], top: int) -> tuple[tuple[Guess, ...], ...]:
    scores = next(iter(results.values()))
    classes = int(np.prod(scores.shape[1:])) if scores.ndim >= 2 else 0
    flat = scores.ndim >= 2 and scores.shape[1] == classes
    if (
        not flat
        or not FEWEST_CLASSES <= classes <= MOST_CLASSES
        or scores.dtype.kind != "f"
        or not np.isfinite(scores).all()
    ):
        return ()
    if labels and len(labels) != classes:
        raise InputError(
            f"--labels: {len(labels)} lines for {classes} classes. Give one line per class, in their order."
        )
    return tuple(
        tuple(Guess(index=at, label=labels[at] if labels else str(at), probability=share) for at, share in row)
        for row in best_classes(scores, top)
    )


def _describe(name: str, value: NDArray[Any]) -> Output:
    number = value.dtype.kind in "fiub" and value.size > 0
    finite = value[np.isfinite(value)].astype(np.float64) if number else np.zeros(0)
    some = finite.size > 0
    return Output(
        name=name,
        shape=tuple(int(size) for size in value.shape),
        dtype=str(value.dtype),
        low=float(finite.min()) if some else None,
        high=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
        not_finite=int(value.size - finite.size) if number else 0,
    )


def _write(path: Path, results: Mapping[str, NDArray[Any]]) -> None:
    partial = path.with_name(f".{path.stem}.partial.npz")
    try:
        np.savez(partial, **dict[str, Any](results))
        partial.replace(path)
    except OSError as error:
        raise MachineError(
            f"-o {path}: cannot be written ({error.strerror}). Choose a place you may write to."
        ) from error


def lines_of(ran: Ran) -> list[str]:
    """What to tell a person."""
    lines = [f"{ran.model} on {ran.inputs}: {ran.runner}, {ran.arithmetic}, {ran.device}, {_sparse(ran)}"]
    lines += [f"note: {note}" for note in ran.notes]
    for output in ran.outputs:
        shape = "x".join(map(str, output.shape)) or "scalar"
        range_ = f", {output.low:.6g} to {output.high:.6g}, mean {output.mean:.6g}" if output.low is not None else ""
        broken = f", {output.not_finite} elements are NaN or infinite" if output.not_finite else ""
        lines.append(f"{output.name}: {output.dtype} {shape}{range_}{broken}")
    for at, row in enumerate(ran.best):
        head = "classes" if len(ran.best) == 1 else f"classes of picture {at + 1}"
        named = (f"{guess.label} ({guess.index})" if guess.label != str(guess.index) else guess.label for guess in row)
        shares = ", ".join(f"{name} {guess.probability:.1%}" for name, guess in zip(named, row, strict=True))
        lines.append(f"best {head}: {shares}")
    if ran.written:
        lines.append(f"outputs written to {ran.written}")
    return lines


def _sparse(ran: Ran) -> str:
    if ran.sparse_layers:
        return f"{ran.sparse_layers} layer{'s' if ran.sparse_layers > 1 else ''} sparse"
    return "ran dense"


def runner_named(name: str | None) -> RunnerName | None:
    """The runner of that name; raises InputError listing the names."""
    if name is None:
        return None
    for known in RUNNERS:
        if name == known:
            return known
    raise InputError(f"--runner {name}: no such runner; this version has {', '.join(RUNNERS)}.")


def arithmetic_named(name: str | None) -> Arithmetic | None:
    """The arithmetic of that name; raises InputError listing the names."""
    if name is None or name == "fp32" or name == "tf32" or name == "fp16":
        return name  # type: ignore[return-value]
    raise InputError(f"--precision {name}: needed fp32, tf32 or fp16.")


def device_named(name: str | None) -> str | None:
    """The device of that name, `cuda` as `cuda:0`; raises InputError for what is none."""
    if name is None or re.fullmatch(r"cpu|cuda:[0-9]{1,3}", name):
        return name
    if name == "cuda":
        return "cuda:0"
    raise InputError(f"--device {name}: needed cpu, cuda or cuda:0.")
