"""Verification of a bundle on disk, without converting again."""

from __future__ import annotations

from pathlib import Path

from sparsedeploy import bundle
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load
from sparsedeploy.converters.rewrite import read_nodes
from sparsedeploy.devices import find
from sparsedeploy.errors import CheckFailed, InputError
from sparsedeploy.plan import DENSE, Plan
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.reading import file_hash, read
from sparsedeploy.verify import Subject, Verification, load_feeds, random_feeds, tolerance_for, verify


def verify_bundle(out: Path, model: Path | None, inputs: Path | None, seed: int) -> Verification:
    """Weights and outputs of a bundle against the original, or against its own dense model where that is gone.

    Raises InputError when `model` is given and is not the file that was converted.
    """
    manifest = bundle.read_manifest(out)
    original = _original(out, manifest, model)
    plan = Plan.from_json((out / bundle.PLAN).read_bytes(), out / bundle.PLAN)
    sparse, nodes = _sparse(out)
    quantized = tuple(entry.name for entry in plan.layers if entry.choice != DENSE)
    reading = read(original, find(manifest.target), manifest.precision, manifest.inputs, None, quantized)
    if strange := [node.layer for node in nodes if node.layer not in reading.unit_of]:
        raise CheckFailed(
            f"verify: {out / bundle.SPARSE_MODEL} holds a node for layer {strange[0]!r}, and {original.name} has no such "
            "convolution. The bundle is damaged: convert again."
        )
    weights = {node.layer: reading.weight(node.layer) for node in nodes}
    feeds = (
        load_feeds(inputs, reading.model, manifest.inputs)
        if inputs
        else random_feeds(reading.model, manifest.inputs, seed)
    )
    tolerance = tolerance_for(nodes, manifest.precision, (layer.dtype for layer in reading.layers))
    rounded = original == out / bundle.DENSE_MODEL and manifest.precision == "fp16"
    subject = Subject(sparse, weights, out / bundle.DENSE_MODEL, original, tolerance, rounded)
    result = verify(subject, feeds, inputs.name if inputs else f"seed {seed}")
    if original == out / bundle.DENSE_MODEL:
        note = (
            f"{manifest.model} is not here: compared with the bundle's own dense model; give the original with --model"
        )
        earlier = result.note.removesuffix(".")
        result = result.model_copy(update={"note": f"{earlier}; {note}" if earlier else note})
    return result


def _sparse(out: Path) -> tuple[Model, list[SparseConv]]:
    """The sparse model (the dense one where nothing was converted) and its nodes; CheckFailed where they are damaged."""
    file = out / bundle.SPARSE_MODEL
    try:
        model = load(file if file.is_file() else out / bundle.DENSE_MODEL)
        return model, list(read_nodes(model).values())
    except InputError as error:
        raise CheckFailed(f"verify: the bundle is damaged. {error}") from error


def _original(out: Path, manifest: bundle.Manifest, model: Path | None) -> Path:
    if model is not None:
        if not model.is_file():
            raise InputError(f"--model {model}: no such file. Give the file that was converted, {manifest.model}.")
        if file_hash(model) != manifest.model_hash:
            raise InputError(
                f"--model {model}: is not the file this bundle was made of (its SHA-256 differs). Convert it again."
            )
        return model
    beside = out.resolve().parent / manifest.model
    if beside.is_file() and file_hash(beside) == manifest.model_hash:
        return beside
    return out / bundle.DENSE_MODEL
