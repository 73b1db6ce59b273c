"""Where a bench is written: results.json and the report's part into a bundle, all or nothing, or files of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparsedeploy import bundle
from sparsedeploy.devices import DEVICES, Device, find
from sparsedeploy.errors import InputError, MachineError
from sparsedeploy.layer import ConvLayer
from sparsedeploy.measure.bench_report import into_report, page, section
from sparsedeploy.measure.results import RESULTS, Machine, Results, read_results
from sparsedeploy.reading import read


def save_in_bundle(out: Path, results: Results) -> tuple[str, ...]:
    """Write results.json, the report with its pictures, and enter both in the manifest. Returns what is to be told.

    Where anything fails the bundle is as it was.
    """
    manifest = bundle.read_manifest(out)
    files, notes = {RESULTS: results.to_json()}, []
    report = (out / bundle.REPORT).read_text("utf-8")
    part = section(results, bundle_layers(out, manifest), device_row(results.machine))
    drawn = into_report(report, part)
    if drawn is None:
        notes.append("report.html was written by an older sparsedeploy: convert again to have the pictures in it")
    else:
        files[bundle.REPORT] = drawn
    # The target's own compute capability, not only the code's: an H200 that runs an A100's kit proves nothing of the A100.
    row = device_row(results.machine)
    on_target = row is not None and row.name == manifest.target
    evidence = manifest.evidence.model_copy(update={"device": manifest.evidence.device or on_target})
    _replace(out, files, manifest.model_copy(update={"evidence": evidence}))
    return tuple(notes)


def keep_other_part(out: Path, results: Results) -> Results:
    """The results with the bundle's earlier sweep, or its earlier cases beside a new sweep, where one GPU made both."""
    path = out / RESULTS
    if not path.is_file():
        return results
    before = read_results(path)
    if (before.machine, before.model_hash, before.precision) != (
        results.machine,
        results.model_hash,
        results.precision,
    ):
        return results
    if results.sweep:
        # Settings are those of the cases: compare reads them.
        kept = {"cases": before.cases, "settings": before.settings, "hashes": before.hashes, "kernels": before.kernels}
        return results.model_copy(update=kept) if before.cases else results
    return results.model_copy(update={"sweep": before.sweep})


def _replace(out: Path, files: Mapping[str, str], manifest: bundle.Manifest) -> None:
    before = {name: path.read_bytes() if (path := out / name).is_file() else None for name in (*files, bundle.MANIFEST)}
    try:
        for name, text in files.items():
            (out / f".{name}.partial").write_text(text, "utf-8")
        for name in files:
            (out / f".{name}.partial").replace(out / name)
        bundle.add_to_manifest(out, manifest, tuple(files))
    except BaseException as error:
        for name, content in before.items():
            (out / f".{name}.partial").unlink(missing_ok=True)
            if content is None:
                (out / name).unlink(missing_ok=True)
            else:
                (out / name).write_bytes(content)
        if isinstance(error, OSError):
            raise MachineError(
                f"{out}: cannot be written ({error.strerror}). The bundle is as it was; write the results elsewhere with -o FILE."
            ) from error
        raise


def save_to_file(path: Path, results: Results, layers: tuple[ConvLayer, ...]) -> tuple[Path, ...]:
    """Write the results and, beside them, a page with the pictures; returns both paths."""
    if path.is_dir():
        raise InputError(f"-o {path}: is a folder; name the JSON file to write.")
    html = path.with_suffix(".html") if path.suffix != ".html" else path.with_suffix(".page.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, text in ((path, results.to_json()), (html, page(results, layers, device_row(results.machine)))):
            partial = target.with_name(f".{target.name}.partial")
            partial.write_text(text, "utf-8")
            partial.replace(target)
    except OSError as error:
        raise MachineError(f"-o {path}: cannot be written ({error.strerror}). Choose a place you may write.") from error
    return path, html


def device_row(machine: Machine) -> Device | None:
    """The row of the device table for a machine's GPU: its compute capability, closest number of SMs."""
    rows = [device for device in DEVICES if device.sm == machine.sm]
    return min(rows, key=lambda device: abs(device.sm_count - machine.sm_count), default=None)


def bundle_layers(out: Path, manifest: bundle.Manifest) -> tuple[ConvLayer, ...]:
    """The convolutions of a bundle, with their zeros, from its dense model."""
    device = find(manifest.target)
    return read(out / bundle.DENSE_MODEL, device, manifest.precision, manifest.inputs).layers
