"""The main job: a pruned model in, a verified bundle out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparsedeploy import bundle
from sparsedeploy.bundle import Evidence, Manifest
from sparsedeploy.converters.fuse import ConvUnit, find_units
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import save
from sparsedeploy.converters.open_sizes import forget_nameless
from sparsedeploy.converters.operators import sidestep_misreadings, unsupported_operators
from sparsedeploy.converters.opset import compare_in_ort, export_hint, lower_opset
from sparsedeploy.converters.precision import to_fp16
from sparsedeploy.converters.rewrite import rewrite
from sparsedeploy.converters.shapes import fix_input_shapes, infer_shapes
from sparsedeploy.devices import Device
from sparsedeploy.errors import CheckFailed, InputError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.plan import (
    DENSE,
    LayerPlan,
    Plan,
    candidates,
    judge,
    load_plan,
    make_plan,
    nothing_to_convert,
    override,
    with_kernel,
)
from sparsedeploy.plugins.kernel import BuildOptions, Built, UnfitWeightsError
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.profile import DeviceProfile
from sparsedeploy.reading import Reading, read
from sparsedeploy.report import render
from sparsedeploy.roofline import format_us
from sparsedeploy.scan import Scan, scan
from sparsedeploy.verify import LAYERS, Subject, Verification, load_feeds, random_feeds, require, tolerance_for, verify

Floats = NDArray[np.float32]
LOWERING_TOLERANCE = 1e-5
"""Lowering changes no arithmetic; more than this share of the largest output is a bug in our table."""


@dataclass(frozen=True)
class Request:
    """What to convert, and how."""

    model: Path
    device: Device
    out: Path
    precision: Precision = "fp32"
    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    plan: Path | None = None
    layers: tuple[str, ...] = ()
    """`NAME=CHOICE` overrides, in order."""
    profile: DeviceProfile | None = None
    """Measured times of the device, to plan with."""
    decided: Plan | None = None
    """Carried out as it is, instead of `plan` and `layers`; those of `layers` then only say what to dequantise."""
    assemble: bool = False
    """Ship machine code besides PTX, where the compiler is at hand."""
    inputs: Path | None = None
    """An .npz to verify with, besides seeded random inputs."""
    seed: int = 0
    keep_going: bool = False
    """Convert although the target's TensorRT lacks operators of the model."""
    tell: Callable[[str], None] = lambda stage: None
    """Called with the name of each stage as it begins."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    out: Path
    manifest: Manifest
    scan: Scan
    plan: Plan
    verification: Verification
    nothing: str | None
    """Why no layer is sparse; None when one is."""
    notes: tuple[str, ...]


def convert(request: Request) -> Conversion:
    """Scan, plan, pack, rewrite, verify and write the bundle.

    Raises SparseDeployError; the output folder is then as it was before.
    """
    bundle.refuse_foreign(request.out, request.model)
    request.tell("reading the model")
    reading = read(
        request.model, request.device, request.precision, request.shapes, request.batch, _named_sparse(request.layers)
    )
    scanned = scan(reading, request.device)
    request.tell("planning")
    plan = _plan(request, scanned)
    request.tell("packing weights")
    weights = {entry.name: reading.weight(entry.name) for entry in plan.layers if entry.choice != DENSE}
    built, plan = _build(request, reading, plan, weights)
    scanned = judge(scanned, plan, str(request.model))
    if nothing_to_convert(scanned, plan) is None:
        scanned = scanned.model_copy(update={"next_command": "sparsedeploy verify ."})  # the same wherever it lies
    _fit_target(request, reading)
    with bundle.writing(request.out) as folder:
        request.tell("writing the models")
        units = _write_models(request, reading, folder, {name: item.node for name, item in built.items()})
        request.tell("verifying")
        verification = _verify(request, reading, folder, built, weights)
        require(verification)
        notes = (
            *dict.fromkeys(reading.model.notes),
            *(note for item in built.values() for note in item.notes),
            *_rounding(built),
            *_assembling(built),
        )
        manifest = _finish(request, reading, folder, scanned, plan, built, verification)
    assert units or not built
    return Conversion(request.out, manifest, scanned, plan, verification, nothing_to_convert(scanned, plan), notes)


def _named_sparse(choices: tuple[str, ...]) -> tuple[str, ...]:
    """Layers asked for by their full name: the only way to dequantise int8 weights."""
    pairs = [text.rpartition("=") for text in choices]
    return tuple(name for name, _, choice in pairs if choice != DENSE and "*" not in name and "?" not in name)


def _plan(request: Request, scanned: Scan) -> Plan:
    if request.decided:
        return request.decided
    if request.plan:
        plan = load_plan(request.plan, scanned, request.device, request.precision, request.profile)
    else:
        plan = make_plan(scanned, request.device, request.precision, request.profile)
    return override(plan, scanned, request.device, request.layers, request.profile)


def _build(
    request: Request, reading: Reading, plan: Plan, weights: Mapping[str, tuple[Floats, Floats | None]]
) -> tuple[dict[str, Built], Plan]:
    """A node per sparse layer; a layer whose weights fit no kernel becomes dense in the plan, with the reason."""
    layers = {layer.name: layer for layer in reading.layers}
    sparse = [entry for entry in plan.layers if entry.choice != DENSE]

    def make(entry: LayerPlan) -> tuple[Built | None, LayerPlan]:
        return _build_layer(request, plan, layers[entry.name], entry, *weights[entry.name])

    made = dict(zip((entry.name for entry in sparse), _in_order(make, sparse, request.assemble), strict=True))
    built = {name: item for name, (item, _) in made.items() if item is not None}
    entries = [made[entry.name][1] if entry.name in made else entry for entry in plan.layers]
    return built, plan.model_copy(update={"layers": tuple(entries)})


def _in_order(
    make: Callable[[LayerPlan], tuple[Built | None, LayerPlan]], entries: list[LayerPlan], abreast: bool
) -> list[tuple[Built | None, LayerPlan]]:
    """One after another, or, where most of the time is a compiler's, side by side."""
    if not abreast:
        return [make(entry) for entry in entries]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting = [pool.submit(make, entry) for entry in entries]
        try:
            return [future.result() for future in waiting]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _build_layer(
    request: Request, plan: Plan, layer: ConvLayer, entry: LayerPlan, weight: Floats, bias: Floats | None
) -> tuple[Built | None, LayerPlan]:
    """Try the chosen kernel, then the others in predicted order, until one can carry the weights.

    Another kernel is taken only where it is predicted to pay too, or where sparse was asked for.
    """
    options = candidates(layer, request.device, plan.precision, plan.batch, entry.choice, request.profile)
    options.sort(key=lambda option: option[0].name != entry.choice)
    build_options = BuildOptions(plan.precision, plan.batch, (request.device.sm,), request.assemble)
    dense = entry.predicted.us_dense if entry.predicted else 0.0
    why = []
    for kernel, best, prediction in options:
        chosen = kernel.name == entry.choice
        if not (chosen or entry.forced or prediction.us < dense):
            why.append(f"{kernel.name} would take {format_us(prediction.us)} us, dense {format_us(dense)} us")
            continue
        config = entry.config if chosen and entry.config else best
        try:
            item = kernel.build(layer, weight, bias, request.device, config, build_options)
        except UnfitWeightsError as error:
            why.append(f"{kernel.name} cannot carry its weights: {error}")
            continue
        except ValueError as error:
            if config is best:
                raise
            raise InputError(
                f"layer {layer.name}: the plan's config {config} is not one of kernel {kernel.name}'s: {error}. Set it to "
                "{} for the default."
            ) from error
        if not chosen:
            reason = "; ".join([*why, entry.reason])
            item = replace(item, notes=(f"{layer.name}: {'; '.join(why)}: {kernel.name} instead", *item.notes))
            entry = with_kernel(entry, kernel.name, config, prediction, reason, entry.forced)
        return item, entry
    return None, entry.model_copy(update={"choice": DENSE, "config": {}, "reason": "; ".join(why)})


def _rounding(built: Mapping[str, Built]) -> tuple[str, ...]:
    """What carrying weights as fp16 cost, over all layers; nothing where every weight came through exactly."""
    records = [item.record for item in built.values() if item.record.get("rounded_weights")]
    if not records:
        return ()
    rounded, nnz = (int(sum(record[key] for record in records)) for key in ("rounded_weights", "nnz"))
    worst = max(record["largest_relative_error"] for record in records)
    layers = f"{len(records)} layers" if len(records) > 1 else "1 layer"
    return (
        f"{rounded:,} of {nnz:,} nonzero weights in {layers} rounded to fp16 to be packed, largest relative error "
        f"{worst:.2e} (at most 2^-11 = 4.88e-04); --layer NAME=csr keeps fp32",
    )


def _assembling(built: Mapping[str, Built]) -> tuple[str, ...]:
    """What making machine code took, apart from the conversion; nothing where none was made."""
    sizes = [sum(len(image.data) for image in item.node.images if image.kind == "cubin") for item in built.values()]
    count, seconds = sum(map(bool, sizes)), sum(item.record.get("assemble_s", 0.0) for item in built.values())
    if not count:
        return ()
    layers = f"{count} layers" if count > 1 else "1 layer"
    return (
        f"machine code of {layers} besides PTX: {sum(sizes) / 1e6:.2f} MB, assembled in {seconds:.1f} s of ptxas (kept: "
        "the same layer is not assembled again)",
    )


def _fit_target(request: Request, reading: Reading) -> None:
    """Bring the graph to the target's opset, and to fp16 where asked."""
    if request.device.max_opset is not None:
        _lower(request, reading, request.device.max_opset)
    if request.precision == "fp16":
        request.tell("making the fp16 graph")
        to_fp16(reading.model)


def _respell(request: Request, model: Model) -> None:
    """Last of all: what TensorRT 8.0's parser misreads is spelled another way, what it lacks is refused.

    Later than the rewriting, because it takes apart activations that a convolution could have fused.
    """
    device = request.device
    if not device.tensorrt[0].startswith("8.0"):
        return
    sidestep_misreadings(model)
    missing = unsupported_operators(model)
    if missing and not request.keep_going:
        shown = ", ".join(f"{operator} ('{node}')" for operator, node in missing[:4])
        raise InputError(
            f"{request.model}: TensorRT {device.tensorrt[0]} on {device.name} has no {shown}"
            f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}. Replace them in the model, export with "
            f"an older opset ({export_hint(model)}), or pass --keep-going if a plugin of yours provides them."
        )


def _lower(request: Request, reading: Reading, newest: int) -> None:
    model = reading.model
    if model.opset() <= newest:
        return
    request.tell(f"lowering opset {model.opset()} to {newest}")
    before = type(model.proto)()
    before.CopyFrom(model.proto)
    was = model.opset()
    lower_opset(model, newest)
    feeds = random_feeds(model, reading.inputs, request.seed)
    try:
        difference = compare_in_ort(before, model.proto, feeds, model.base_dir)
    except CheckFailed as error:
        if "the first graph" not in str(error):
            raise
        model.notes.append(f"opset {was} lowered to {newest} and not compared: ONNX Runtime cannot run this model")
        return
    if not difference <= LOWERING_TOLERANCE:
        raise CheckFailed(
            f"{request.model}: lowering opset {was} to {newest} changed an output by {difference:.3g} of its largest value. "
            f"Nothing was written; export with {export_hint(model)} instead, and please report this model."
        )
    model.notes.append(
        f"opset {was} lowered to {newest} for TensorRT {request.device.tensorrt[0]}; outputs equal in ONNX Runtime"
    )


def _write_models(
    request: Request, reading: Reading, folder: Path, nodes: Mapping[str, SparseConv]
) -> tuple[ConvUnit, ...]:
    """model.dense.onnx, and model.sparse.onnx where a layer is sparse; the reading's model becomes the sparse one."""
    model = reading.model
    forget_nameless(model)
    dense = Model(type(model.proto)(), model.path, model.notes)
    dense.proto.CopyFrom(model.proto)
    _respell(request, dense)
    save(dense, folder / bundle.DENSE_MODEL)
    del dense
    if not nodes:
        return ()
    # Lowering and fp16 changed the graph and may have renamed values, but neither the convolutions nor their order.
    units = find_units(model, infer_shapes(model, reading.inputs))
    if len(units) != len(reading.unit_of):
        raise AssertionError(f"{len(reading.unit_of)} convolutions were read, {len(units)} are left")
    pairs = zip(reading.unit_of, units, strict=True)
    by_output = {unit.conv.output[0]: nodes[name] for name, unit in pairs if name in nodes}
    if any(node.fixed_hw for node in nodes.values()):
        fix_input_shapes(model, reading.inputs)
    rewrite(model, by_output, units)
    _respell(request, model)
    save(model, folder / bundle.SPARSE_MODEL)
    return units


def _verify(
    request: Request,
    reading: Reading,
    folder: Path,
    built: Mapping[str, Built],
    weights: Mapping[str, tuple[Floats, Floats | None]],
) -> Verification:
    nodes = [item.node for item in built.values()]
    subject = Subject(
        sparse=reading.model,
        weights=weights,
        dense_file=folder / bundle.DENSE_MODEL,
        original=request.model,
        tolerance=tolerance_for(nodes, request.precision, (layer.dtype for layer in reading.layers)),
    )
    feeds = random_feeds(reading.model, reading.inputs, request.seed)
    result = verify(subject, feeds, f"seed {request.seed}", assemble_again=False)
    if request.inputs:
        feeds = load_feeds(request.inputs, reading.model, reading.inputs)
        more = verify(subject, feeds, request.inputs.name, code=False)
        kept = {"comparisons": result.comparisons + more.comparisons, "code": result.code, "cubins": result.cubins}
        result = more.model_copy(update=kept)
    return result


def _finish(
    request: Request,
    reading: Reading,
    folder: Path,
    scanned: Scan,
    plan: Plan,
    built: Mapping[str, Built],
    verification: Verification,
) -> Manifest:
    """Write plan, verification, report and, last, the manifest over all of them."""
    request.tell("writing the report")
    (folder / bundle.PLAN).write_text(plan.to_json(), "utf-8")
    (folder / bundle.VERIFY).write_text(verification.to_json(), "utf-8")
    facts = {"Verified": verdict(verification), "Size": sizes(folder)}
    (folder / bundle.REPORT).write_text(render(scanned, plan, request.device, facts), "utf-8")
    manifest = Manifest(
        model=request.model.name,
        model_hash=reading.model_hash,
        target=request.device.name,
        sm=request.device.sm,
        precision=request.precision,
        batch=reading.batch,
        inputs=reading.inputs,
        sparse_layers=len(built),
        executable=bool(built) and all(item.node.executable for item in built.values()),
        evidence=Evidence(
            weights=all(check.passed for check in verification.weights) and bool(built),
            outputs=verification.against_original,
            code=verification.code_proven,
        ),
        files=bundle.hashes(folder),
    )
    (folder / bundle.MANIFEST).write_text(manifest.to_json(), "utf-8")
    return manifest


def verdict(verification: Verification) -> str:
    """One line: how many nodes were verified and how close the outputs are."""
    if not verification.sparse_nodes_verified:
        subject = "nothing was converted; the dense graph"
    else:
        count = verification.sparse_nodes_verified
        subject = f"{count} sparse node{'s' if count > 1 else ''} read back and"
    outputs = [output for comparison in verification.comparisons for output in comparison.outputs]
    if not outputs:
        return f"{subject} compared with nothing: no output could be run"
    finals = [entry for entry in verification.comparisons if entry.model == bundle.SPARSE_MODEL]
    finals = finals or list(verification.comparisons)
    shown = [output for entry in finals for output in entry.outputs]
    worst = min(shown, key=lambda output: output.margin)
    top1 = [output.top1_agreement for output in shown if output.top1_agreement is not None]
    agree = f", top-1 agreement {min(top1):.0%}" if top1 else ""
    layers = [output for entry in verification.comparisons if entry.model == LAYERS for output in entry.outputs]
    used = max((1 / output.margin if output.margin else float("inf") for output in layers), default=0.0)
    each = f"; outputs of {len(layers)} sparse layers use at most {used:.1%} of the same tolerance" if layers else ""
    each += _interpreted(verification)
    return (
        f"{subject} run against {finals[0].reference}: worst output {worst.name}, max abs {worst.max_abs:.2g} of largest "
        f"{worst.largest:.3g} (allowed {worst.tolerance:g}), cosine {worst.cosine:.7f}{agree}{each}"
    )


def _interpreted(verification: Verification) -> str:
    """How much of the nodes' code was run on the CPU; nothing where they carry none."""
    if not verification.code:
        return ""
    share = sum(check.pixels for check in verification.code) / sum(check.of for check in verification.code)
    worst = max(check.worst for check in verification.code)
    cubins, compilers = verification.cubins, sorted({check.compiler for check in verification.cubins if check.passed})
    again = f"; {' and '.join(compilers)} makes the same machine code of it" if compilers else ""
    if unknown := sum(not check.checked for check in cubins):
        again += f"; {unknown} cubins not verified: no ptxas is here"
    return (
        f"; code of {len(verification.code)} layers interpreted for {share:.0%} of their outputs, errors at most "
        f"{worst:.1%} of what rounding may cost{again}"
    )


def sizes(folder: Path) -> str:
    """Size of the dense and the sparse model file, side files included."""
    parts = []
    for name in (bundle.DENSE_MODEL, bundle.SPARSE_MODEL):
        files = [path for path in (folder / name, folder / f"{name}.data") if path.is_file()]
        if files:
            parts.append(f"{name} {sum(path.stat().st_size for path in files) / 1e6:.2f} MB")
    return ", ".join(parts)
