"""The command `tune`: a bundle measured on this GPU, rewritten with what won, and what to print of it."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sparsedeploy import bundle
from sparsedeploy.build import add_engine
from sparsedeploy.convert import Conversion, Request, convert, verdict
from sparsedeploy.devices import Device, find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.gpu import first_gpu
from sparsedeploy.measure.tune import Settings, Tuned, gpu_device, tune_reading
from sparsedeploy.measure.tuning import TunedLayer, Tuning
from sparsedeploy.plan import DENSE, Plan
from sparsedeploy.plugins import KERNELS
from sparsedeploy.profile import DeviceProfile, load_profile, merged
from sparsedeploy.reading import file_hash, read
from sparsedeploy.roofline import format_us
from sparsedeploy.runtime import Arithmetic

TUNING = "tune.json"
Part = str | tuple[tuple[str, ...], ...]
"""A line, or a table whose first row is its head."""


@dataclass(frozen=True)
class Asked:
    """The command line."""

    bundle: Path
    model: Path | None = None
    arithmetic: str | None = None
    kernels: tuple[str, ...] = ()
    per_kernel: int = 3
    compile_s: float = 60.0
    save_profile: Path | None = None
    no_engine: bool = False


@dataclass(frozen=True)
class Said:
    """What to print."""

    record: Tuning
    parts: tuple[Part, ...]


def run(asked: Asked, tell: Callable[[str], None]) -> Said:
    """Tune the bundle and rewrite it.

    Raises InputError for what is no bundle, whose model is not at hand, or options that do not fit; MachineError without
    a GPU of the target's architecture, PyTorch or the assembler. The bundle is then as it was.
    """
    manifest = bundle.read_manifest(asked.bundle)
    device = find(manifest.target)
    _refuse_unknown_kernels(asked.kernels)
    _refuse_other_gpu(asked.bundle, device)
    arithmetic = _arithmetic(asked.arithmetic, manifest)
    known = _known_profile(asked.save_profile, device)
    bundle.check_hashes(asked.bundle)
    with tempfile.TemporaryDirectory(prefix="sparsedeploy-") as folder:
        original, note = _original(asked.bundle, manifest, asked.model, Path(folder))
        tuned, done, lines = _tune(asked, manifest, device, arithmetic, original, tell)
    if asked.save_profile:
        profile = merged(known, tuned.profile)
        _write(asked.save_profile, profile.to_json())
    return Said(tuned.tuning, tuple(_parts(asked, tuned, done, (*note, *lines))))


def _tune(
    asked: Asked, manifest: bundle.Manifest, device: Device, arithmetic: Arithmetic, original: Path, tell: Callable[[str], None]
) -> tuple[Tuned, Conversion, tuple[str, ...]]:  # fmt: skip
    before = Plan.from_json((asked.bundle / bundle.PLAN).read_bytes(), asked.bundle / bundle.PLAN)
    # What runs sparse although its weights are int8 was asked for by name when it was converted.
    sparse = tuple(entry.name for entry in before.layers if entry.choice != DENSE)
    reading = read(original, device, manifest.precision, manifest.inputs, None, sparse)
    settings = Settings(
        per_kernel=asked.per_kernel, kernels=asked.kernels, compile_s=asked.compile_s, ceilings=asked.save_profile is not None,
        tell=tell,
    )  # fmt: skip
    tuned = tune_reading(reading, device, manifest.precision, arithmetic, settings, before)
    tell("writing the bundle")
    request = Request(
        model=original, device=device, out=asked.bundle, precision=manifest.precision, shapes=manifest.inputs,
        layers=tuple(f"{name}=sparse" for name in sparse), decided=tuned.plan, assemble=True, keep_going=True, tell=tell,
    )  # fmt: skip
    done = convert(request)
    manifest = _as_the_original(done, manifest, tuned)
    (asked.bundle / TUNING).write_text(tuned.tuning.to_json(), "utf-8")
    bundle.add_to_manifest(asked.bundle, manifest, (TUNING,))
    done = replace(done, manifest=bundle.read_manifest(asked.bundle))
    lines = () if asked.no_engine else add_engine(done.out, done.manifest, tell)
    return tuned, done, lines


def _as_the_original(done: Conversion, before: bundle.Manifest, tuned: Tuned) -> bundle.Manifest:
    """The new manifest under the name and hash of the model that the bundle was first made of; and it ran on the device."""
    evidence = done.manifest.evidence.model_copy(update={"device": bool(tuned.built)})
    return done.manifest.model_copy(
        update={"model": before.model, "model_hash": before.model_hash, "evidence": evidence}
    )


def _refuse_unknown_kernels(names: tuple[str, ...]) -> None:
    known = tuple(kernel.name for kernel in KERNELS)
    if strange := [name for name in names if name not in known]:
        raise InputError(f"--kernel {strange[0]}: no such kernel. This version has {', '.join(known)}.")


def _refuse_other_gpu(out: Path, device: Device) -> None:
    gpu_device()
    gpu = first_gpu()
    if gpu is not None and gpu.sm != device.sm:
        raise MachineError(
            f"{out}: was made for {device.name} (sm_{device.sm}), and the GPU here is {gpu.name} (sm_{gpu.sm}). Run tune on that "
            "device, or convert the model again with a --target of this GPU's architecture."
        )


def _arithmetic(name: str | None, manifest: bundle.Manifest) -> Arithmetic:
    if name is None or name == manifest.precision:
        return manifest.precision
    if name == "tf32" and manifest.precision == "fp32":
        return "tf32"
    raise InputError(
        f"--arithmetic {name}: the bundle is {manifest.precision}; its dense layers compute in {manifest.precision}"
        f"{' or tf32' if manifest.precision == 'fp32' else ''}. Convert again for another precision."
    )


def _known_profile(path: Path | None, device: Device) -> DeviceProfile | None:
    """The profile that is there already and will be added to."""
    if path is None or not path.exists():
        return None
    return load_profile(path, device)


def _original(out: Path, manifest: bundle.Manifest, model: Path | None, folder: Path) -> tuple[Path, tuple[str, ...]]:
    """The model that was converted: the one given, the one beside the bundle, or else the bundle's own dense model."""
    if model is not None:
        if not model.is_file():
            raise InputError(f"--model {model}: no such file. Give the file that was converted, {manifest.model}.")
        if file_hash(model) != manifest.model_hash:
            raise InputError(
                f"--model {model}: is not the file this bundle was made of (its SHA-256 differs). Convert it again."
            )
        return model, ()
    beside = out.resolve().parent / manifest.model
    if beside.is_file() and file_hash(beside) == manifest.model_hash:
        return beside, ()
    # The bundle is replaced while it is read: its dense model must lie elsewhere.
    for name in (bundle.DENSE_MODEL, f"{bundle.DENSE_MODEL}.data"):
        if (out / name).is_file():
            shutil.copyfile(out / name, folder / name)
    dense = folder / bundle.DENSE_MODEL
    if not dense.is_file():
        raise InputError(f"{out}: {bundle.DENSE_MODEL} is missing. Copy the bundle again, or convert again.")
    return dense, (
        f"note: {manifest.model} is not here: tuned and verified against the bundle's own dense model; give the original with --model",
    )  # fmt: skip


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise MachineError(
            f"--save-profile {path}: cannot be written ({error.strerror}). Choose a place you may write."
        ) from error


# --- words --------------------------------------------------------------------------------------------------------

_HEAD = (
    "convolution",
    "shape",
    "zeros %",
    "dense us",
    "sparse us",
    "+-",
    "kernel",
    "chosen",
    "crossover %",
    "roofline %",
)


def _parts(asked: Asked, tuned: Tuned, done: Conversion, lines: tuple[str, ...]) -> list[Part]:
    tuning = tuned.tuning
    found: list[Part] = [
        f"{tuning.gpu} (sm_{tuning.sm}), {tuning.precision}, dense layers in {tuning.arithmetic}, batch {tuning.batch}; "
        + ", ".join(f"{name} {version}" for name, version in tuning.versions.items()),
        f"times: {tuning.conditions}",
        (_HEAD, *(_row(layer) for layer in tuning.layers)),
    ]
    found += [f"{layer.name}: {layer.reason}" for layer in tuning.layers if layer.choice == DENSE and layer.reason]
    found += [f"note: {text}" for text in (*tuning.notes, *done.notes)]
    found += [
        f"whole model, {step.what}: {step.ratio.estimate:.3f}x [{step.ratio.low:.3f}, {step.ratio.high:.3f}] of the speed before"
        f"{': taken' if step.taken else ''}"
        for step in tuning.steps
    ]
    found += fit_lines(tuning)
    found += crossover_lines(tuning)
    found.append(tuning.verdict)
    found.append(f"verified: {verdict(done.verification)}")
    found += lines
    if asked.save_profile:
        found.append(
            f"{asked.save_profile}: times of {tuning.gpu}; plan with them elsewhere by `sparsedeploy scan MODEL --target {tuning.target} "
            f"--profile {asked.save_profile}`"
        )
    found.append(f"{asked.bundle}: rewritten with the winners; every measurement is in {TUNING}")
    if tuning.sparse_layers:
        found.append(
            f"Next: sparsedeploy bench {shlex.quote(str(asked.bundle))} (against TF32 and fp16 too, with percentiles and copies)"
        )
    return found


def fit_lines(tuning: Tuning) -> list[str]:
    """How far the predictions were off, one line per kernel and for dense layers."""
    return [
        f"cost model of {fit.kernel} ({fit.precision}): mean |ln(measured / predicted)| {fit.mean_abs_log:.2f} over {fit.points} "
        f"points, measured {fit.factor:.2f} of predicted on average; worst {fit.worst}"
        for fit in tuning.fits
    ]


def crossover_lines(tuning: Tuning) -> list[str]:
    """How far the roofline's crossovers were off, where measured ones lie between two measured sparsities or near them."""
    pairs = [
        (layer.crossover, layer.roofline_crossover, layer.name)
        for layer in tuning.layers
        if not layer.like and layer.crossover is not None and layer.roofline_crossover is not None
    ]
    if not pairs:
        return []
    mean = sum(abs(roofline - measured) for measured, roofline, _ in pairs) / len(pairs)
    worst = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
    return [
        f"roofline's crossovers: off by {100 * mean:.1f} points of sparsity on average over {len(pairs)} layers that differ; worst "
        f"{worst[2]}: measured {100 * worst[0]:.1f} %, roofline {100 * worst[1]:.1f} %"
    ]


def _row(layer: TunedLayer) -> tuple[str, ...]:
    g = layer.geometry
    shape = f"{g.ic}->{g.oc} {g.kh}x{g.kw} s{g.stride[0]} @{g.h}x{g.w}" if g else "?"
    return (
        layer.name, shape, f"{100 * layer.sparsity:.1f}", _us(layer.us_dense), _us(layer.us_sparse), _us(layer.spread_us or None),
        layer.kernel or "-", layer.choice, _percent(layer.crossover, layer.crossover_how), _percent(layer.roofline_crossover, ""),
    )  # fmt: skip


def _us(value: float | None) -> str:
    return "-" if value is None else format_us(value)


def _percent(value: float | None, how: str) -> str:
    if value is None:
        return "none" if how.startswith("slower") else "-"
    return f"{100 * value:.1f}{' (line)' if how == 'extrapolated' else ''}"
