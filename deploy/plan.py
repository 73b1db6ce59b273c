"""Dense or sparse, per layer, with the numbers and the reason: an editable file between `scan` and `convert`."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Precision
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.kernel import Config, Kernel, Prediction
from sparsedeploy.profile import DeviceProfile
from sparsedeploy.record import Document, Record
from sparsedeploy.roofline import Bound, dense_us, format_us
from sparsedeploy.roofline import crossover as roofline_crossover
from sparsedeploy.scan import Scan

DENSE = "dense"
SPARSE = "sparse"
"""In `--layer NAME=sparse`: the kernel predicted fastest."""


class Predicted(Record):
    """Predicted times of one layer at the plan's batch, microseconds."""

    us_dense: float
    us_sparse: float
    kernel: str
    """The kernel that us_sparse is for."""
    bound: str
    """What binds the sparse kernel: compute, memory, l2, shared, fetch, launch."""
    source: str
    """Where the efficiencies come from."""


class Measured(Record):
    """Measured times of one layer on the device, microseconds, medians."""

    us_dense: float
    us_sparse: float
    """By the kernel and configuration chosen, else by the fastest tried."""
    spread_us: float
    """Half the interquartile range of the noisier of the two."""
    kernel: str = ""
    """The kernel that us_sparse is for."""
    gpu: str = ""
    """The device's own name."""


class LayerPlan(Record):
    """The decision for one convolution."""

    name: str
    choice: str
    """`dense` or the name of a kernel."""
    config: dict[str, int] = {}
    predicted: Predicted | None = None
    measured: Measured | None = None
    crossover: float | None = None
    """Sparsity above which the predicted sparse kernel is faster than dense; None: at no sparsity, or unknown."""
    roofline_crossover: float | None = None
    """The same by the roofline's bounds alone: no kernel can pay below it against a dense kernel at its bound."""
    measured_crossover: float | None = None
    """The same by measured times at two sparsities, where tune took them."""
    sparsity: float = 0.0
    forced: bool = False
    """Asked for with --layer: sparse although predicted slower, or dense although predicted faster."""
    reason: str = ""


class Plan(Document):
    """The answer of planning. Edit `choice` and pass the file to `convert --plan`."""

    TITLE = "a plan, as of `scan --save-plan`"

    model: str
    model_hash: str
    target: str
    precision: Precision
    batch: int
    layers: tuple[LayerPlan, ...]


def make_plan(
    scan: Scan, device: Device, precision: Precision, profile: DeviceProfile | None = None, crossovers: bool = True
) -> Plan:
    """Decide every layer by predicted times, or by a device's measured profile where one is given; forces nothing.

    Without `crossovers` these are left out, which saves most of the time.
    """
    return Plan(
        model=scan.model,
        model_hash=scan.model_hash,
        target=device.name,
        precision=precision,
        batch=scan.batch,
        layers=tuple(_decide(layer, device, precision, scan.batch, profile, crossovers) for layer in scan.layers),
    )


Candidate = tuple[Kernel, Config, Prediction]


def candidates(
    layer: ConvLayer,
    device: Device,
    precision: Precision,
    batch: int,
    named: str = "",
    profile: DeviceProfile | None = None,
) -> list[Candidate]:
    """Each kernel that supports the layer, with its best configuration, fastest predicted first.

    A kernel that is not automatic on the device is left out unless it is `named` or `profile` measured it there.
    """
    found = []
    for kernel in KERNELS:
        if not (kernel.automatic(device) or kernel.name == named or (profile and profile.fit(kernel.name, precision))):
            continue
        if layer.zeros and kernel.supports(layer, device, precision) is None:
            config, prediction = predictions(kernel, layer, device, precision, batch, profile)[0]
            found.append((kernel, config, prediction))
    if profile:  # where some kernels were measured on this layer, others would win by flattering predictions
        measured = [option for option in found if profile.knows(layer, precision, batch, option[0].name)]
        found = [option for option in found if option in measured or option[0].name == named] if measured else found
    return sorted(found, key=lambda candidate: candidate[2].us)


def predictions(
    kernel: Kernel,
    layer: ConvLayer,
    device: Device,
    precision: Precision,
    batch: int,
    profile: DeviceProfile | None = None,
) -> tuple[tuple[Config, Prediction], ...]:
    """The kernel's configurations for a layer it supports, fastest first, with the profile's times where it has them."""
    predicted = kernel.configs(layer, device, precision, batch)
    return profile.sparse_us(layer, precision, batch, kernel.name, predicted) if profile else predicted


def dense_time(
    layer: ConvLayer, device: Device, precision: Precision, batch: int, profile: DeviceProfile | None = None
) -> tuple[Bound, str]:
    """Predicted time of the dense layer and, from a profile, where it comes from (else ""). The geometry is known."""
    assert layer.geometry is not None, layer.name
    bound = dense_us(layer.geometry, device, precision, batch)
    if profile is None:
        return bound, ""
    return profile.dense_us(layer.geometry, precision, batch, layer.epilogue.residual != "none", bound)


def _decide(
    layer: ConvLayer, device: Device, precision: Precision, batch: int, profile: DeviceProfile | None, crossovers: bool
) -> LayerPlan:
    options = candidates(layer, device, precision, batch, profile=profile) if layer.eligible else []
    if not options or layer.geometry is None:
        why = "; ".join(dict.fromkeys(reason.text for reason in layer.ineligible)) or "no kernel supports it"
        return LayerPlan(name=layer.name, choice=DENSE, sparsity=layer.sparsity, reason=why)
    kernel, config, best = options[0]
    (dense, dense_bound), dense_source = dense_time(layer, device, precision, batch, profile)
    above = _crossover(layer, device, precision, batch, dense, profile) if crossovers else None
    # Without zeros only a measurement can say that generated code beats the library's: for a small first layer it may.
    some = layer.sparsity > 0 or (profile is not None and profile.knows(layer, precision, batch, kernel.name))
    pays = best.us < dense and some
    times = (
        f"predicted {format_us(best.us)} us sparse ({best.bound}) against {format_us(dense)} us dense ({dense_bound})"
    )
    if not some:
        reason = "0 % zeros"
    elif not crossovers:
        reason = times
    elif above is None:
        reason = f"{times}: no sparsity pays here"
    else:
        reason = f"{times}: pays above {above:.1%} zeros, has {layer.sparsity:.1%}"
    return LayerPlan(
        name=layer.name,
        choice=kernel.name if pays else DENSE,
        config=config if pays else {},
        predicted=Predicted(
            us_dense=dense,
            us_sparse=best.us,
            kernel=kernel.name,
            bound=best.bound,
            source=f"{best.source}; dense {dense_source}" if dense_source else best.source,
        ),
        crossover=above,
        roofline_crossover=roofline_crossover(layer.geometry, device, precision, batch),
        sparsity=layer.sparsity,
        reason=reason,
    )


def at_sparsity(layer: ConvLayer, sparsity: float) -> ConvLayer:
    """The layer with as many zeros as `sparsity` means, of its counts nnz alone changed: for predictions."""
    assert layer.zeros is not None
    nnz = round(layer.zeros.total * (1 - sparsity))
    zeros = layer.zeros.model_copy(update={"nnz": nnz, "sparsity": 1 - nnz / layer.zeros.total})
    return layer.model_copy(update={"zeros": zeros})


def _crossover(
    layer: ConvLayer, device: Device, precision: Precision, batch: int, dense: float, profile: DeviceProfile | None
) -> float | None:
    """The sparsity at which the best predicted kernel becomes faster than dense.

    By bisection to 0.1 % over the kernels that predict quickly; for the others along the line, in density, through the
    layer's own zeros and 98 %.
    """
    found = []
    for kernel in KERNELS:
        if kernel.automatic(device) and kernel.supports(layer, device, precision) is None:

            def us(sparsity: float, kernel: Kernel = kernel) -> float:
                there = at_sparsity(layer, sparsity)
                return predictions(kernel, there, device, precision, batch, profile)[0][1].us

            found.append(_bisected(us, dense) if kernel.quick else _interpolated(us, layer.sparsity, dense))
    return min((sparsity for sparsity in found if sparsity is not None), default=None)


def _bisected(us: Callable[[float], float], dense: float) -> float | None:
    low, high = 0.0, 0.999
    if not us(high) < dense:
        return None
    while high - low > 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if us(middle) < dense else (middle, high)
    return high


def _interpolated(us: Callable[[float], float], here: float, dense: float) -> float | None:
    far = 0.98 if here < 0.97 else 0.9
    us_here, us_far = us(here), us(far)
    per_sparsity = (us_far - us_here) / (far - here)
    if per_sparsity >= 0:  # so few nonzeros that they do not show: faster or slower at any sparsity
        return 0.0 if us_here < dense else None
    crossing = here + (dense - us_here) / per_sparsity
    return max(crossing, 0.0) if crossing < 1 else None


def override(
    plan: Plan, scan: Scan, device: Device, choices: Sequence[str], profile: DeviceProfile | None = None
) -> Plan:
    """Apply `--layer PATTERN=CHOICE` in order; CHOICE is dense, sparse or a kernel's name.

    `*=sparse` forces every eligible layer; a layer named without a wildcard must be eligible. Raises InputError.
    """
    layers = {layer.name: layer for layer in scan.layers}
    before = {entry.name: entry for entry in plan.layers}
    decided = dict(before)
    for text in choices:
        pattern, _, choice = text.rpartition("=")
        if not pattern or choice not in _choices():
            raise InputError(
                f"--layer {text}: needed NAME=CHOICE with one of {', '.join(_choices())}; NAME may hold * and ?, as in '*=sparse'."
            )
        names = [pattern] if pattern in layers else [name for name in layers if _matches(name, pattern)]
        if not names:
            known = ", ".join(list(layers)[:8])
            raise InputError(f"--layer {text}: no convolution is named like {pattern!r}. The model has: {known} ...")
        for name in names:
            if name == pattern or choice == DENSE or _options(layers[name], device, plan, choice, profile):
                decided[name] = _forced(layers[name], before[name], device, plan, choice, profile)
    return plan.model_copy(update={"layers": tuple(decided[entry.name] for entry in plan.layers)})


def _matches(name: str, pattern: str) -> bool:
    """`*` and `?` are wildcards, brackets are what they are: exported names are full of them."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _options(
    layer: ConvLayer, device: Device, plan: Plan, choice: str, profile: DeviceProfile | None
) -> list[Candidate]:
    """The candidates that a choice other than dense allows, fastest first."""
    if not layer.eligible:
        return []
    found = candidates(layer, device, plan.precision, plan.batch, named=choice, profile=profile)
    return [option for option in found if choice in (SPARSE, option[0].name)]


def _choices() -> tuple[str, ...]:
    return (DENSE, SPARSE, *(kernel.name for kernel in KERNELS))


def _forced(
    layer: ConvLayer, entry: LayerPlan, device: Device, plan: Plan, choice: str, profile: DeviceProfile | None
) -> LayerPlan:
    if choice == DENSE:
        return entry.model_copy(update={"choice": DENSE, "config": {}, "forced": True, "reason": "dense as asked"})
    options = _options(layer, device, plan, choice, profile)
    if not options:
        reasons = [reason.text for reason in layer.ineligible] or [f"kernel {choice} does not support it"]
        raise InputError(
            f"layer {layer.name}: {choice} was asked for, but {'; '.join(dict.fromkeys(reasons))}. Leave it dense, or choose another kernel."
        )
    kernel, config, prediction = options[0]
    return with_kernel(entry, kernel.name, config, prediction, f"{choice} as asked; {entry.reason}", forced=True)


def with_kernel(
    entry: LayerPlan, kernel: str, config: Config, prediction: Prediction, reason: str, forced: bool
) -> LayerPlan:
    """The entry with another kernel, its predicted time, and why."""
    known = entry.predicted
    predicted = known and known.model_copy(
        update={"us_sparse": prediction.us, "kernel": kernel, "bound": prediction.bound, "source": prediction.source}
    )
    return entry.model_copy(
        update={"choice": kernel, "config": config, "predicted": predicted, "reason": reason, "forced": forced}
    )


def load_plan(
    path: Path, scan: Scan, device: Device, precision: Precision | None = None, profile: DeviceProfile | None = None
) -> Plan:
    """Read an edited plan for this model; raises InputError with the field's path.

    Choices, configurations and measured times are the file's; times, crossovers and sparsity are predicted anew, since
    the model's weights, the batch or `precision` (None: the plan's) may be others than those planned for. A plan of
    another file is taken where that has the same convolutions, as a checkpoint trained further does, and reasons say so.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--plan {path}: {error.strerror}. Make one with `sparsedeploy scan MODEL --save-plan {path}`."
        ) from error
    saved = Plan.from_json(text, path)
    if saved.target != device.name:
        raise InputError(
            f"{path}: target: the plan is for {saved.target}, --target says {device.name}. Use the same, or plan again."
        )
    entries: dict[str, tuple[int, LayerPlan]] = {}
    for i, entry in enumerate(saved.layers):
        if entry.name in entries:
            raise InputError(
                f"{path}: layers.{i}.name: {entry.name!r} has an entry already, layers.{entries[entry.name][0]}. Keep one."
            )
        entries[entry.name] = (i, entry)
    layers = {layer.name: layer for layer in scan.layers}
    if strange := [(i, name) for name, (i, _) in entries.items() if name not in layers]:
        raise InputError(
            f"{path}: layers.{strange[0][0]}.name: the model has no convolution {strange[0][1]!r}. Is the plan of another model?"
        )
    missing = [name for name in layers if name not in entries]
    if missing:
        raise InputError(
            f"{path}: layers: no entry for {missing[0]!r} ({len(missing)} missing). Plan this model again with --save-plan."
        )
    fresh = make_plan(scan, device, precision or saved.precision, profile)
    origin = path.name if saved.model_hash == scan.model_hash else f"{path.name} (made for another file, {saved.model})"
    taken = [_taken(path, *entries[now.name], now, layers[now.name], device, fresh, origin) for now in fresh.layers]
    return fresh.model_copy(update={"layers": tuple(taken)})


def _taken(
    path: Path, i: int, entry: LayerPlan, now: LayerPlan, layer: ConvLayer, device: Device, plan: Plan, origin: str
) -> LayerPlan:
    """A saved entry's decision on today's prediction; raises InputError where it cannot be carried out."""
    now = now.model_copy(
        update={"measured": entry.measured, "measured_crossover": entry.measured_crossover, "forced": entry.forced}
    )
    if entry.choice == DENSE:
        if now.choice == DENSE:
            return now
        reason = f"dense as {origin} says; {now.reason}"
        return now.model_copy(update={"choice": DENSE, "config": {}, "forced": True, "reason": reason})
    kernels = {kernel.name: kernel for kernel in KERNELS}
    if entry.choice not in _choices():
        raise InputError(f"{path}: layers.{i}.choice: {entry.choice!r} is none of {', '.join(_choices())}.")
    options = _options(layer, device, plan, entry.choice, None)
    if not options:
        refusal = layer.ineligible[0] if layer.ineligible else None
        if refusal is None and entry.choice in kernels:
            refusal = kernels[entry.choice].supports(layer, device, plan.precision)
        why = refusal.text if refusal else "no kernel supports it"
        raise InputError(f"{path}: layers.{i}.choice: {entry.choice} cannot run {entry.name}: {why}. Set it to dense.")
    kernel, config, prediction = options[0]
    if entry.choice != SPARSE and entry.config:
        known = {key for each, _ in kernel.configs(layer, device, plan.precision, plan.batch) for key in each}
        if unknown := sorted(set(entry.config) - known):
            raise InputError(
                f"{path}: layers.{i}.config.{unknown[0]}: kernel {kernel.name} has no such parameter; it has "
                f"{', '.join(sorted(known)) or 'none'}. Set config to {{}} for the default."
            )
        config = entry.config
    if kernel.name == now.choice:
        return now.model_copy(update={"config": config})
    reason = f"{entry.choice} as {origin} says; {now.reason}"
    return with_kernel(now, kernel.name, config, prediction, reason, forced=True)


class Totals(Record):
    """Predicted time of all convolutions whose times are known, microseconds."""

    dense_us: float
    planned_us: float
    sparse_layers: int


def totals(layers: Iterable[LayerPlan]) -> Totals:
    """Sum a plan's predicted times: all dense, and as planned."""
    layers = tuple(layers)
    known = [(entry, entry.predicted) for entry in layers if entry.predicted]
    return Totals(
        dense_us=sum(predicted.us_dense for _, predicted in known),
        planned_us=sum(p.us_dense if entry.choice == DENSE else p.us_sparse for entry, p in known),
        sparse_layers=sum(entry.choice != DENSE for entry in layers),
    )


def basis(plan: Plan) -> str:
    """What the plan's times rest on, to end a sentence with."""
    sources = [entry.predicted.source for entry in plan.layers if entry.predicted]
    if any("(profile)" in source for source in sources):
        return "Predicted from a measured profile, this model not measured"
    return "Predicted, not measured"


def nothing_to_convert(scan: Scan, plan: Plan) -> str | None:
    """Why no layer is sparse in this plan, in words; None when one is."""
    if any(entry.choice != DENSE for entry in plan.layers):
        return None
    summary = scan.summary
    share = f"eligible layers hold {summary.eligible_macs_share:.1%} of all convolution MACs"
    if not summary.eligible:
        return f"none of {summary.convolutions} convolutions can run sparse ({_common_reason(scan)})"
    eligible = [layer for layer in scan.layers if layer.eligible]
    counts = [layer.zeros for layer in eligible if layer.zeros]
    if sum(zeros.nnz for zeros in counts) > 0.995 * sum(zeros.total for zeros in counts):
        return f"0 % zeros ({share})"  # a few exact zeros turn up in any network
    decided = {entry.name: entry for entry in plan.layers}
    if all(decided[layer.name].forced for layer in eligible):
        return "every layer is dense as asked"
    if gpu := next((entry.measured.gpu for entry in plan.layers if entry.measured), ""):
        return f"no layer makes the model faster sparse, as measured on {gpu} ({share})"
    zeros = [layer.sparsity for layer in eligible if layer.sparsity > 0]
    needed = [decided[layer.name].crossover for layer in eligible]
    above = [value for value in needed if value is not None]
    need = f"the lowest crossover is {min(above):.1%}" if above else "no sparsity pays"
    return (
        f"no layer is predicted to be faster sparse on {plan.target}: zeros reach {max(zeros):.1%}, {need} "
        f"({share}; predicted, not measured)"
    )


def _common_reason(scan: Scan) -> str:
    texts = [reason.text for layer in scan.layers for reason in layer.ineligible]
    return max(texts, key=texts.count) if texts else "no reason recorded"


def judge(scan: Scan, plan: Plan, model: str, options: Sequence[str] = ()) -> Scan:
    """The scan with its verdict and the next command, ready to paste: `options` are what reading this model needed."""
    why, model = nothing_to_convert(scan, plan), shlex.quote(model)
    given = " ".join(["", *(shlex.quote(word) for word in options)])
    target = f"--target {plan.target}" + (f" --precision {plan.precision}" if plan.precision != "fp32" else "") + given
    if why:
        zeros = any(layer.eligible and layer.sparsity > 0 for layer in scan.layers)
        verdict = f"nothing to convert: {why}."
        command = (
            f"sparsedeploy convert {model} {target} --layer '*=sparse'"
            if zeros
            else f"sparsedeploy prune {model} --sparsity 0.9"
        )
        return scan.model_copy(update={"verdict": verdict, "next_command": command})
    total = totals(plan.layers)
    tuned = [(entry, entry.measured) for entry in plan.layers if entry.measured]
    if {entry.name for entry in plan.layers if entry.choice != DENSE} <= {entry.name for entry, _ in tuned}:
        dense = sum(times.us_dense for _, times in tuned)
        chosen = sum(times.us_dense if entry.choice == DENSE else times.us_sparse for entry, times in tuned)
        verdict = (
            f"convert: {total.sparse_layers} of {scan.summary.convolutions} convolutions sparse, as measured on "
            f"{tuned[0][1].gpu} ({plan.precision}, batch {plan.batch}): the {len(tuned)} layers measured take "
            f"{format_us(dense)} us dense, {format_us(chosen)} us as chosen ({dense / (chosen or 1.0):.2f}x)."
        )
        return scan.model_copy(update={"verdict": verdict, "next_command": f"sparsedeploy convert {model} {target}"})
    verdict = (
        f"convert: {total.sparse_layers} of {scan.summary.convolutions} convolutions are predicted faster sparse on "
        f"{plan.target} ({plan.precision}, batch {plan.batch}): all convolutions {format_us(total.dense_us)} us dense, "
        f"{format_us(total.planned_us)} us as planned ({total.dense_us / (total.planned_us or 1.0):.2f}x). {basis(plan)}."
    )
    return scan.model_copy(update={"verdict": verdict, "next_command": f"sparsedeploy convert {model} {target}"})
