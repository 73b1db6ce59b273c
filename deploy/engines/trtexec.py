"""The folder that goes to the device: the sparse model, the plugin libraries, and build.sh with the exact trtexec lines."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL, Manifest
from sparsedeploy.engines.engine_build import Profile
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Precision

SCRIPT = "build.sh"
SMALL_WORKSPACE_MB = 256
"""For TensorRT 8.0 to 8.3, whose default of 16 MB makes it drop most of its convolutions."""
PLACES = (
    "trtexec",
    "/usr/src/tensorrt/bin/trtexec",
    "/usr/local/tensorrt/bin/trtexec",
    "/usr/local/TensorRT/bin/trtexec",
)
"""Where trtexec lies: on PATH, in JetPack and the Debian packages, in unpacked archives."""


@dataclass(frozen=True)
class Recipe:
    """What build.sh builds. File names are relative to the folder of the script."""

    precision: Precision
    profiles: Mapping[str, Profile]
    """Sizes of inputs with open dimensions, by name."""
    plugins: Mapping[int, str] = field(default_factory=dict)
    """Plugin library by the major version of TensorRT it was built for; empty for a model without sparse nodes."""
    majors: tuple[int, ...] = ()
    """Major versions that may build here; () takes those of `plugins`."""
    model: str = SPARSE_MODEL
    engine: str = "model.engine"
    dense_model: str = f"../{DENSE_MODEL}"
    tf32: bool = False
    workspace_mb: int | None = None


_LINES: tuple[tuple[str, tuple[int, int]], ...] = (
    ("8.[01]", (8, 0)),
    ("8.[23]", (8, 2)),
    ("8.[45]", (8, 4)),
    ("8.*", (8, 6)),
    ("10.*", (10, 0)),
    ("11.*", (11, 0)),
)
"""Shell patterns of versions that take the same line, with the oldest of each; tried in this order."""


def trtexec_arguments(recipe: Recipe, version: tuple[int, int], *, dense: bool = False) -> tuple[str, ...]:
    """The arguments of trtexec of a version (major, minor; the oldest of a line is enough) for this recipe.

    Source of every change between versions: samples/common/sampleOptions.cpp of TensorRT 8.0, 8.2, 8.4, 8.5, 8.6, 10.3,
    10.14 and 11.1. Raises InputError for an input name that trtexec cannot take.
    """
    model, engine = (recipe.dense_model, _dense_engine(recipe)) if dense else (recipe.model, recipe.engine)
    arguments = [f"--onnx={model}", f"--saveEngine={engine}"]
    if recipe.plugins and not dense:
        arguments += _plugin_arguments(f"./{recipe.plugins[version[0]]}", version)
    arguments += _shape_arguments(recipe.profiles)
    if version < (10, 0):
        # Weakly typed: an fp16 graph is taken at its word only with the flag.
        arguments += ["--fp16"] if recipe.precision == "fp16" else []
    elif version < (11, 0):
        arguments.append("--stronglyTyped")  # as the default of 11 does: the graph's own types, nothing else
    arguments += [] if recipe.tf32 else ["--noTF32"]
    arguments += _workspace_arguments(recipe.workspace_mb, version)
    arguments.append("--timingCacheFile=timing.cache")
    if version >= (8, 2):
        arguments.append("--profilingVerbosity=detailed")
    if version >= (8, 6):
        arguments.append(f"--exportLayerInfo={engine}.layers.json")
    arguments.append("--skipInference" if version >= (8, 6) else "--buildOnly")
    return tuple(arguments)


def _dense_engine(recipe: Recipe) -> str:
    stem, _, suffix = recipe.engine.rpartition(".")
    return f"{stem}.dense.{suffix}"


def _plugin_arguments(library: str, version: tuple[int, int]) -> list[str]:
    if version < (8, 6):
        return [f"--plugins={library}"]
    if version < (10, 0):
        return [f"--staticPlugins={library}"]
    return [f"--dynamicPlugins={library}"]


def _shape_arguments(profiles: Mapping[str, Profile]) -> list[str]:
    if not profiles:
        return []
    if bad := [name for name in profiles if "," in name or "'" in name]:
        raise InputError(
            f"input '{bad[0]}': trtexec cannot take a name with a comma or a quote in it. Rename the input in the model and "
            "convert it again."
        )
    rows = (
        ("min", {name: profile.minimum for name, profile in profiles.items()}),
        ("opt", {name: profile.optimum for name, profile in profiles.items()}),
        ("max", {name: profile.maximum for name, profile in profiles.items()}),
    )
    return [
        f"--{which}Shapes=" + ",".join(f"{name}:{'x'.join(map(str, sizes))}" for name, sizes in shapes.items())
        for which, shapes in rows
    ]


def _workspace_arguments(workspace_mb: int | None, version: tuple[int, int]) -> list[str]:
    if version < (8, 4):
        return [f"--workspace={workspace_mb or SMALL_WORKSPACE_MB}"]
    return [f"--memPoolSize=workspace:{workspace_mb}"] if workspace_mb else []


def trtexec_script(recipe: Recipe) -> str:
    """build.sh: finds trtexec, asks its version, and runs the line of that version. POSIX shell, any folder name."""
    majors = recipe.majors or tuple(sorted(recipe.plugins))
    if recipe.plugins and set(majors) - set(recipe.plugins):
        raise ValueError(f"no plugin library for the major versions {sorted(set(majors) - set(recipe.plugins))}")
    known = [(pattern, version) for pattern, version in _LINES if version[0] in majors]
    return _SCRIPT.format(
        model=recipe.model,
        engine=recipe.engine,
        dense_model=recipe.dense_model,
        dense_engine=_dense_engine(recipe),
        places=" ".join(PLACES),
        majors=" or ".join(map(str, majors)),
        sparse_cases=_cases(recipe, known, dense=False),
        dense_cases=_cases(recipe, known, dense=True),
    )


def _cases(recipe: Recipe, known: list[tuple[str, tuple[int, int]]], *, dense: bool) -> str:
    cases = []
    for pattern, version in known:
        words = [shlex.quote(word) for word in trtexec_arguments(recipe, version, dense=dense)]
        cases.append(f"    {pattern}) set -- {' '.join(words)} ;;")
    return "\n".join(cases)


_SCRIPT = r"""#!/bin/sh
# Builds an engine with the TensorRT of this machine, for the GPU of this machine.
#   ./build.sh          {model} -> {engine}
#   ./build.sh dense    {dense_model} -> {dense_engine}, to compare with
# TRTEXEC=/path/to/trtexec chooses another TensorRT. EMBED=1 puts the plugin library into the engine (TensorRT 10, 11).
set -eu
cd "$(dirname "$0")"
what=${{1:-sparse}}

trtexec=${{TRTEXEC:-}}
for place in {places}; do
    [ -n "$trtexec" ] || trtexec=$(command -v "$place" || true)
done
if [ -z "$trtexec" ]; then
    echo "build.sh: no trtexec found on PATH or in /usr/src/tensorrt/bin. Install TensorRT {majors}, or say where it is:" \
        "TRTEXEC=/path/to/trtexec ./build.sh" >&2
    exit 3
fi

# trtexec names its version in its first line: v8201 is 8.2.1, v101401 is 10.14.1.
number=$("$trtexec" --help 2>/dev/null | sed -n 's/.*\[TensorRT v\([0-9][0-9]*\)\].*/\1/p' | head -n 1)
if [ -z "$number" ]; then
    echo "build.sh: $trtexec does not say which TensorRT it is; its first line should hold '[TensorRT v...]'. Run" \
        "'$trtexec --help' to see why." >&2
    exit 3
fi
if [ "$number" -lt 10000 ]; then
    version=$((number / 1000)).$((number / 100 % 10))
else
    version=$((number / 10000)).$((number / 100 % 100))
fi

case $what in
sparse) case $version in
{sparse_cases}
    *) set -- ;;
    esac ;;
dense) case $version in
{dense_cases}
    *) set -- ;;
    esac ;;
*)
    echo "build.sh: '$what' is neither sparse nor dense." >&2
    exit 2
    ;;
esac
if [ $# -eq 0 ]; then
    echo "build.sh: $trtexec is TensorRT $version; this folder builds with TensorRT {majors}. Install one of these, or convert" \
        "for a target that has $version." >&2
    exit 3
fi
needs=
for word in "$@"; do
    case $word in
    --onnx=*) onnx=${{word#--onnx=}} ;;
    --saveEngine=*) engine=${{word#--saveEngine=}} ;;
    --dynamicPlugins=* | --staticPlugins=* | --plugins=*)
        library=${{word#*=}}
        needs=", after $library was loaded"
        case ${{EMBED:-0}}$word in
        1--dynamic*)
            set -- "$@" "--setPluginsToSerialize=$library"
            needs=", where engine_host_code_allowed is set: the plugin is inside"
            ;;
        esac
        ;;
    esac
done
if [ ! -f "$onnx" ]; then
    echo "build.sh: $onnx is not there. Copy it from the bundle." >&2
    exit 2
fi
printf '%s' "$trtexec"
printf " '%s'" "$@"
echo
rm -f "$engine" # a failed build must not leave an older engine that looks like its result
"$trtexec" "$@"
[ -s "$engine" ] || {{ echo "build.sh: trtexec ended without writing $engine; its last lines say why." >&2; exit 1; }}
echo "$engine was built by TensorRT $version and loads in that version, on this GPU$needs."
"""


def recipe_for(
    manifest: Manifest,
    model: Path,
    plugins: Mapping[int, str],
    *,
    majors: tuple[int, ...] = (),
    batch: tuple[int, int, int] | None = None,
    tf32: bool = False,
    workspace_mb: int | None = None,
) -> Recipe:
    """The recipe of a bundle's model: open dimensions of its inputs become the batch range (the first) or the manifest's."""
    smallest, usual, largest = batch or (1, manifest.batch, manifest.batch)
    profiles = {
        name: Profile(
            minimum=_filled(dims, manifest.inputs[name], smallest),
            optimum=_filled(dims, manifest.inputs[name], usual),
            maximum=_filled(dims, manifest.inputs[name], largest),
        )
        for name, dims in graph_shapes(model)[0].items()
        if -1 in dims and name in manifest.inputs
    }
    return Recipe(
        precision=manifest.precision,
        profiles=profiles,
        plugins=plugins,
        majors=majors,
        model=model.name,
        tf32=tf32,
        workspace_mb=workspace_mb,
    )


def _filled(dims: tuple[int, ...], known: tuple[int, ...], batch: int) -> tuple[int, ...]:
    return tuple(size if size != -1 else batch if axis == 0 else known[axis] for axis, size in enumerate(dims))


def graph_shapes(model: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...] | None]]:
    """Shapes of a model's inputs and outputs, -1 for an open dimension, None for an output of unknown rank."""
    graph = onnx.load(model, load_external_data=False).graph
    constant = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: _dims(value) for value in graph.input if value.name not in constant}
    return {name: dims or () for name, dims in inputs.items()}, {value.name: _dims(value) for value in graph.output}


def _dims(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.dim_value > 0 else -1 for dim in tensor.shape.dim)


def write_target_folder(folder: Path, model: Path, recipe: Recipe, plugins: Mapping[int, Path]) -> tuple[Path, ...]:
    """Fill the target's folder: the model with its side file, one plugin library per major version, build.sh.

    `recipe.plugins` names the libraries as `plugins` has them. Returns the files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (model, model.with_name(model.name + ".data")) if path.is_file()]
    written = [_link_or_copy(source, folder / source.name) for source in sources]
    written += [_copy(library, folder / library.name) for library in plugins.values()]
    script = folder / SCRIPT
    script.write_text(trtexec_script(recipe), "utf-8")
    script.chmod(0o755)
    return (*written, script)


def _copy(source: Path, target: Path) -> Path:
    return target if source == target else Path(shutil.copyfile(source, target))


def _link_or_copy(source: Path, target: Path) -> Path:
    """A hard link where the file system has them: the folder is complete by itself and costs no second copy."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
