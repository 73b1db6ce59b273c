"""What a bundle hands to the device: the target's folder for trtexec, and a Triton repository, with the right libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, Manifest, add_to_manifest, read_manifest
from sparsedeploy.devices import find
from sparsedeploy.engines.engine import Profile, check_model
from sparsedeploy.engines.engine_file import engine_name
from sparsedeploy.engines.triton import write_repository
from sparsedeploy.engines.trtexec import Recipe, recipe_for, write_target_folder
from sparsedeploy.errors import MachineError, SparseDeployError
from sparsedeploy.plugins.plugin_build import (
    Arch,
    Flavour,
    build_plugin,
    fetched_headers,
    header_version,
    plugin_file,
    system_headers,
)

_TEGRA = (53, 62, 72, 87)
"""Compute capabilities of devices with an ARM processor: their libraries are cross-built."""


@dataclass(frozen=True)
class TargetFolder:
    """What was written for the device."""

    files: tuple[Path, ...]
    libraries: dict[int, str]
    """Plugin library by the major version of TensorRT; empty for a model without sparse nodes."""
    notes: tuple[str, ...]
    """What is missing, and what brings it."""


def majors_of(target: str) -> tuple[int, ...]:
    """Major versions of TensorRT (not RTX) that run on a device."""
    numbers = (re.match(r"\d+", version) for version in find(target).tensorrt)
    return tuple(sorted({int(number[0]) for number in numbers if number}))


def make_target_folder(
    out: Path,
    *,
    headers: Sequence[Path] = (),
    batch: tuple[int, int, int] | None = None,
    profiles: Mapping[str, Profile] | None = None,
    tf32: bool = False,
    workspace_mb: int | None = None,
    arch: Arch | None = None,
) -> TargetFolder:
    """Write `out/TARGET/` (model, plugin libraries, build.sh) and enter it in the manifest.

    Only a model that is as it was verified and whose nodes carry code for the target goes in; raises CheckFailed else.
    profiles give the sizes of an input outright, arch the libraries' processor where it is not the target's usual one.
    headers are folders of TensorRT's C++ headers, one per major version; without one for version 10 those of 10.14 are
    fetched. A version without headers gets no library, which the notes say; raises MachineError when none is left.
    """
    manifest = read_manifest(out)
    sparse = manifest.sparse_layers > 0
    check_model(out, manifest, "sparse" if sparse else "dense")
    folder = out / manifest.target
    folder.mkdir(exist_ok=True)
    libraries, notes = _libraries(manifest, folder, headers, arch) if sparse else ({}, ())
    names = {major: path.name for major, path in libraries.items()}
    model = out / (SPARSE_MODEL if sparse else DENSE_MODEL)
    majors = tuple(names) or majors_of(manifest.target)
    recipe = recipe_for(manifest, model, names, majors=majors, batch=batch, tf32=tf32, workspace_mb=workspace_mb)
    recipe = replace(
        recipe, profiles={name: (profiles or {}).get(name, sizes) for name, sizes in recipe.profiles.items()}
    )
    files = write_target_folder(folder, model, recipe, libraries)
    made = [path.relative_to(out).as_posix() for path in files]
    _remove_old(out, manifest, made)
    kept = {name: digest for name, digest in manifest.files.items() if (out / name).is_file()}
    add_to_manifest(out, manifest.model_copy(update={"files": kept}), made)
    return TargetFolder(files, names, notes)


def _remove_old(out: Path, manifest: Manifest, made: Sequence[str]) -> None:
    """Files of an earlier folder of the target that this one does not have."""
    for name in manifest.files:
        if name.startswith(f"{manifest.target}/") and name not in made:
            (out / name).unlink(missing_ok=True)


def _libraries(
    manifest: Manifest, folder: Path, headers: Sequence[Path], arch: Arch | None
) -> tuple[dict[int, Path], tuple[str, ...]]:
    """A plugin library for every major version of the target that headers are at hand for, and what is missing."""
    arch = arch or ("aarch64" if manifest.sm in _TEGRA else "x86_64")
    found, notes = _headers(manifest, arch, headers)
    libraries: dict[int, Path] = {}
    for major, path in sorted(found.items()):
        flavour: Flavour = "v2" if major < 10 else "v3"
        try:
            libraries[major] = build_plugin(folder / plugin_file(flavour, major), path, flavour, arch)
        except SparseDeployError as error:
            notes.append(f"no plugin library for TensorRT {major}: {error}")
    if not libraries:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise MachineError(f"{manifest.target}: no plugin library could be built for it. {' '.join(notes)}")
    return libraries, tuple(notes)


def _headers(manifest: Manifest, arch: Arch, given: Sequence[Path]) -> tuple[dict[int, Path], list[str]]:
    wanted = majors_of(manifest.target)
    system = system_headers(arch)
    found = {header_version(path)[0]: path for path in ([system] if system else [])}
    found |= {header_version(path)[0]: path for path in given}
    notes: list[str] = []
    if 10 in wanted and 10 not in found:
        try:
            found[10] = fetched_headers()
        except SparseDeployError as error:
            notes.append(str(error))
    notes += [
        f"TensorRT {major} runs on {manifest.target} too; its plugin library needs its C++ headers: --tensorrt-include DIR."
        for major in wanted
        if major not in found
    ]
    return {major: path for major, path in found.items() if major in wanted}, notes


def make_triton_repository(
    out: Path, root: Path, name: str, *, batch: tuple[int, int, int] | None = None
) -> tuple[Path, ...]:
    """Write a Triton model repository of a bundle into `root`; the engine goes in where TensorRT has built one here.

    The library is taken from the target's folder, which must have been made for a bundle with sparse layers.
    """
    manifest = read_manifest(out)
    sparse = manifest.sparse_layers > 0
    model = out / (SPARSE_MODEL if sparse else DENSE_MODEL)
    recipe: Recipe = recipe_for(manifest, model, {}, batch=batch)
    libraries = sorted((out / manifest.target).glob("libsparsedeploy_trt*.so"))
    if sparse and not libraries:
        raise MachineError(
            f"{out}: holds no plugin library for TensorRT in {manifest.target}/, which Triton needs. Run `sparsedeploy build` "
            "for it first."
        )
    engine = out / engine_name("tensorrt", manifest.sm, "sparse" if sparse else "dense")
    return write_repository(
        root,
        name,
        model,
        recipe.profiles,
        engine=engine if engine.is_file() else None,
        plugin=libraries[0] if sparse else None,
    )
