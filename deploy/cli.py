"""The command line. Results on stdout, progress on stderr and only on a terminal, errors as one paragraph.

Exit codes: 0 ok, 1 a check failed, 2 usage or input, 3 the machine lacks something, 70 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from sparsedeploy import __version__, devices
from sparsedeploy.errors import CheckFailed, InputError, MachineError, SparseDeployError
from sparsedeploy.gpu import closest, first_gpu

if TYPE_CHECKING:
    from sparsedeploy.convert import Conversion
    from sparsedeploy.engines.engine import Backend
    from sparsedeploy.layer import ConvLayer, Precision
    from sparsedeploy.plan import Plan
    from sparsedeploy.plugins.plugin_build import Arch
    from sparsedeploy.profile import DeviceProfile
    from sparsedeploy.scan import Scan

BUG = 70


class _Group(TyperGroup):
    """Turns what commands raise into one paragraph on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; every way it can end badly has its own exit code."""
        try:
            return super().invoke(ctx)
        except SparseDeployError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("Interrupted. Nothing half-written was left behind.", 130)
        except BrokenPipeError:
            os._exit(0)  # the reader of our output has gone: nobody is left to tell
        except MemoryError:
            _fail("Out of memory. The model with its copies did not fit; use a machine with more memory.", 3)
        except OSError as error:
            _fail(
                f"{error.filename or 'A file'}: {error.strerror or error}. Check the path, the permissions and the free space.",
                3,
            )
        except Exception as error:
            if (
                isinstance(error, (typer.Exit, typer.Abort))
                or hasattr(error, "exit_code")
                or "SPARSEDEPLOY_TRACEBACK" in os.environ
            ):
                raise
            _fail(
                f"Unexpected {type(error).__name__}: {error}. Either the file is damaged in a way that was not foreseen or "
                "this is a bug in sparsedeploy. Run again with SPARSEDEPLOY_TRACEBACK=1 and report the traceback.",
                BUG,
            )


def _fail(message: str, code: int) -> None:
    text = " ".join(message.split())
    print(textwrap.fill(f"sparsedeploy: {text}", 100, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    raise typer.Exit(code)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make the zeros of a pruned CNN pay on NVIDIA devices. [bold]scan[/bold] tells, [bold]convert[/bold] makes a verified bundle.",
)

Target = Annotated[
    str | None,
    typer.Option("--target", "-t", help="Device: " + ", ".join(device.name for device in devices.DEVICES) + ".", show_default="the GPU here, else a100"),
]  # fmt: skip
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help="fp32 or fp16.", show_default="fp32, fp16 for an fp16 model")
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", min=1, max=65535, help="Images per inference where the model leaves it open.", show_default="1"
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="NAME=1x3x224x224 for an input with open dimensions; may be repeated."),
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--layer", help="NAME=dense|sparse|KERNEL, * and ? allowed: '*=sparse' forces all eligible layers."),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", help="Plan with times measured on the device: a file of tune --save-profile."),
]
ModelFile = Annotated[Path, typer.Argument(help="ONNX model.", show_default=False)]
NoEngine = Annotated[
    bool, typer.Option("--no-engine", help="Build no engine, also where a TensorRT is installed that could.")
]
Original = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="The original model.",
        show_default="the file of that name beside the bundle, else the bundle's dense model",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON, nothing else, on stdout.")]


def main() -> None:
    """Entry point of the `sparsedeploy` command."""
    app(prog_name="sparsedeploy")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sparsedeploy {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def scan(
    model: ModelFile,
    target: Target = None,
    precision: PrecisionOption = None,
    batch: Batch = None,
    shape: Shapes = None,
    as_json: Json = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write one row per convolution to this file.")] = None,
    save_plan: Annotated[
        Path | None, typer.Option("--save-plan", help="Also write the plan, to edit and pass to convert --plan.")
    ] = None,
    profile: ProfileFile = None,
    impose: Annotated[
        str | None,
        typer.Option(
            "--impose-sparsity",
            metavar="SHARE",
            help="What if: predict with at least this share of zeros in every eligible layer, as in 0.95.",
        ),
    ] = None,
) -> None:
    """Tell what a model holds: zeros per convolution, what can run sparse, whether it pays, and what to do next."""
    if impose is not None:
        _what_if(model, target, precision, batch, shape, profile, impose, as_json, csv or save_plan)
        return
    from sparsedeploy.plan import judge, make_plan
    from sparsedeploy.reading import read
    from sparsedeploy.scan import scan as scan_reading
    from sparsedeploy.scan import to_csv

    device, asked = _target(target), _precision(precision, model) if precision else None
    with _progress(as_json) as tell:
        tell("reading the model")
        reading = read(model, device, asked, _shapes(shape), batch)
        found = scan_reading(reading, device)
        plan = make_plan(found, device, reading.precision, _profile(profile, device))
        given = [word for text in shape or () for word in ("--shape", text)] + (
            ["--batch", str(batch)] if batch else []
        )
        given += ["--profile", str(profile)] if profile else []
        found = judge(found, plan, str(model), given)
    if csv:
        _write(csv, to_csv(found))
    if save_plan:
        _write(save_plan, plan.to_json())
    if as_json:
        sys.stdout.write(found.to_json())
        return
    _print_target(device, target)
    _print_scan(found, plan)


@app.command()
def convert(
    model: ModelFile,
    target: Target = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Output folder.", show_default="MODEL.sparsedeploy")
    ] = None,
    precision: PrecisionOption = None,
    batch: Batch = None,
    shape: Shapes = None,
    layer: Layers = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of planning.")] = None,
    profile: ProfileFile = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--input", help="Also verify with the arrays of this .npz, named as the model's inputs."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random verification inputs.")] = 0,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Convert although the target's TensorRT lacks operators.")
    ] = False,
    assemble: Annotated[
        bool | None,
        typer.Option(
            "--assemble/--no-assemble",
            help="Ship machine code besides PTX, or leave assembling to the device's driver.",
            show_default="assembled, but for the Jetson Nano",
        ),
    ] = None,
    no_engine: NoEngine = False,
    as_json: Json = False,
) -> None:
    """Make a verified bundle of a pruned model: dense and sparse ONNX, plan, proof and report. The main job.

    Where TensorRT or TensorRT-RTX is installed and can build for the target, the bundle also gets its engine.
    """
    from sparsedeploy.build import add_engine
    from sparsedeploy.bundle import default_path, read_manifest
    from sparsedeploy.convert import Request
    from sparsedeploy.convert import convert as run
    from sparsedeploy.plan import Plan

    if plan is not None and plan.is_file():
        saved = Plan.from_json(plan.read_bytes(), plan)
        target, precision, batch = target or saved.target, precision or saved.precision, batch or saved.batch
    device, chosen = _target(target), _precision(precision, model)
    if not as_json:
        _print_target(device, target)
    with _progress(as_json) as tell:
        done = run(
            Request(
                model=model,
                device=device,
                out=out or default_path(model),
                precision=chosen,
                batch=batch,
                shapes=_shapes(shape),
                plan=plan,
                layers=tuple(layer or ()),
                profile=_profile(profile, device),
                inputs=inputs,
                seed=seed,
                keep_going=keep_going,
                assemble=device.sm != 53 if assemble is None else assemble,
                tell=tell,
            )
        )
        lines = () if no_engine else add_engine(done.out, done.manifest, tell)
    if as_json:
        sys.stdout.write(read_manifest(done.out).to_json())
        return
    _print_conversion(done, lines)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="Bundle made by convert.", show_default=False)],
    model: Original = None,
    inputs: Annotated[
        Path | None, typer.Option("--input", help="Verify with the arrays of this .npz instead of random ones.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random inputs.")] = 0,
    hashes_only: Annotated[
        bool, typer.Option("--hashes-only", help="Only compare the files with the manifest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove a bundle again: files unchanged, weights read back, outputs equal to the original's."""
    from sparsedeploy.bundle import check_hashes
    from sparsedeploy.convert import verdict
    from sparsedeploy.reverify import verify_bundle
    from sparsedeploy.verify import require

    if hashes_only and as_json:
        raise InputError("--hashes-only makes no record for --json; its exit code says it: 0 unchanged, 1 changed.")
    count = check_hashes(bundle)
    if hashes_only:
        print(f"{bundle}: {count} files are as the manifest says")
        return
    with _progress(as_json) as tell:
        tell("verifying")
        result = verify_bundle(bundle, model, inputs, seed)
    if as_json:
        sys.stdout.write(result.to_json())
    else:
        print(f"{bundle}: {count} files are as the manifest says")
        print(f"{bundle}: {verdict(result)}" + (f" ({result.note})" if result.note else ""))
    require(result)


@app.command()
def build(
    bundle: Annotated[
        Path | None,
        typer.Argument(
            help="Bundle made by convert. With --plugin-only the folder for the library.", show_default=False
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="tensorrt or tensorrt_rtx.", show_default="TensorRT on the target's GPU, else RTX"
        ),
    ] = None,
    embed_plugin: Annotated[bool, typer.Option("--embed-plugin", help="Put the plugin into the engine.")] = False,
    plugin: Annotated[
        Path | None, typer.Option("--plugin", help="Use this plugin library instead of compiling it.")
    ] = None,
    plugin_only: Annotated[
        bool, typer.Option("--plugin-only", help="Compile the plugin library, nothing else.")
    ] = False,
    include: Annotated[
        list[Path] | None,
        typer.Option(
            "--tensorrt-include",
            help="Folder of TensorRT's C++ headers; may be repeated, one per major version.",
            show_default="the system's, else those of 10.14, fetched once",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch", help="x86_64 or aarch64: processor the device's libraries are for.", show_default="the target's"
        ),
    ] = None,
    dense: Annotated[
        bool, typer.Option("--dense", help="Build the dense model's engine, to compare with the sparse one.")
    ] = False,
    max_batch: Annotated[
        int | None,
        typer.Option("--max-batch", min=1, max=65535, help="Largest batch.", show_default="the one converted for"),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option("--profile", help="NAME=MIN:OPT:MAX, sizes such as 1x3x224x224, of an input; may be repeated."),
    ] = None,
    workspace_mb: Annotated[
        int | None,
        typer.Option("--workspace-mb", min=1, help="Scratch memory allowed, in MB.", show_default="TensorRT's"),
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Let TensorRT round fp32 inputs of its own layers to TF32.")
    ] = False,
    log: Annotated[Path | None, typer.Option("--log", help="Keep the whole build log in this file.")] = None,
    triton: Annotated[
        Path | None, typer.Option("--triton", help="Also write the model into this Triton model repository.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Build a bundle's engine, and the folder that builds one on the device: model, plugin libraries, build.sh."""
    from sparsedeploy import build as builder
    from sparsedeploy.engines.engine import Build

    named = {
        "--embed-plugin": embed_plugin, "--plugin": plugin, "--dense": dense, "--max-batch": max_batch, "--profile": profile,
        "--workspace-mb": workspace_mb, "--tf32": tf32, "--log": log, "--triton": triton,
    }  # fmt: skip
    if plugin_only and (idle := [name for name, value in named.items() if value]):
        raise InputError(
            f"{idle[0]} says how an engine is built, and --plugin-only builds none. Leave one of them out."
        )
    if dense and triton:
        raise InputError("--dense with --triton: the repository is written for the bundle's own model. Leave one out.")
    if bundle is None and not plugin_only:
        raise InputError("build needs the bundle that convert made: `sparsedeploy build MODEL.sparsedeploy`.")
    chosen, processor = _backend(backend), _arch(arch)
    folder = bundle or Path()
    with _progress(as_json) as tell:
        if plugin_only:
            tell("compiling the plugin")
            report = builder.build_libraries(folder, chosen, include or (), processor)
        else:
            options = Build(
                backend=chosen,
                which="dense" if dense else None,
                plugin=plugin,
                headers=tuple(include or ()),
                embed_plugin=embed_plugin,
                tf32=tf32,
                profiles=dict(builder.parse_profile(text) for text in profile or ()),
                workspace_mb=workspace_mb,
                log=log,
                tell=tell,
            )
            report = builder.build_bundle(folder, builder.Options(options, max_batch, processor, triton))
    if as_json:
        sys.stdout.write(report.to_json())
        return
    for line in builder.lines_of(folder, report):
        print(line)


def _backend(name: str | None) -> Backend | None:
    if name is None or name == "tensorrt" or name == "tensorrt_rtx":
        return name  # type: ignore[return-value]
    raise InputError(
        f"--backend {name}: needed tensorrt (10 or 11, on the target's GPU) or tensorrt_rtx (no GPU needed)."
    )


def _arch(name: str | None) -> Arch | None:
    if name is None or name == "x86_64" or name == "aarch64":
        return name  # type: ignore[return-value]
    raise InputError(f"--arch {name}: needed x86_64 (servers, PCs) or aarch64 (Jetson, Grace).")


@app.command()
def run(
    source: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle, ONNX model or engine.", show_default=False)],
    inputs: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help=".npz with arrays named as the inputs, or .npy for one input.",
            show_default="random numbers",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            "--image", help="Picture for an ImageNet classifier; may be repeated, one per image of the batch."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the outputs to this .npz.")] = None,
    runner: Annotated[
        str | None,
        typer.Option(
            "--runner", help="torch, tensorrt, tensorrt_rtx or onnxruntime.", show_default="the best one here"
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, tf32 or fp16.", show_default="the model's own")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda:0, for torch and onnxruntime.", show_default="the GPU")
    ] = None,
    labels: Annotated[Path | None, typer.Option("--labels", help="Names of the classes, one a line.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the best classes to print.")] = 5,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            max=65535,
            help="Images of random numbers where the model leaves it open.",
            show_default="1",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random numbers.")] = 0,
    as_json: Json = False,
) -> None:
    """Run a bundle, model or engine once. Without a GPU the answer is the same, computed dense."""
    from sparsedeploy import run as runs

    with _progress(as_json) as tell:
        ran = runs.run(
            runs.Request(
                source=source,
                inputs=inputs,
                images=tuple(image or ()),
                out=out,
                runner=runs.runner_named(runner),
                arithmetic=runs.arithmetic_named(precision),
                device=runs.device_named(device),
                labels=labels,
                top=top,
                batch=batch,
                seed=seed,
                tell=tell,
            )
        )
    if as_json:
        sys.stdout.write(ran.to_json())
        return
    for line in runs.lines_of(ran):
        print(line)


@app.command()
def bench(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="BUNDLE", help="Bundle made by convert; with --sweep also a model file.", show_default=False
        ),
    ] = None,
    runners: Annotated[
        str | None,
        typer.Option(
            "--runners", help="torch, tensorrt, tensorrt_rtx, onnxruntime; with commas.", show_default="those installed"
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="Images per inference, as in 1,8,32.", show_default="the one converted for"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            help="Of the dense baselines: fp32, tf32, fp16. With --sweep: fp32 or fp16, of the conversion.",
            show_default="the bundle's and all looser ones",
        ),
    ] = None,
    duration: Annotated[float, typer.Option("--duration", min=0.01, max=3600, help="Seconds per variant.")] = 2.0,
    warmup: Annotated[float, typer.Option("--warmup", min=0, max=600, help="Seconds per variant before.")] = 0.5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random inputs.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Write the results (INVALID ones too) to this file, and a page beside it, not to the bundle.",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare", help="Measure nothing: hold two results.json against each other.", show_default=False
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", help="With --compare: exit 1 if so, as in 'p90_ms>+5%'; may be repeated."),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="With --compare: also results of different devices or settings.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="LOW:HIGH shares of zeros: prune, convert and measure at each, as in 0.8:0.99."),
    ] = None,
    shape: Shapes = None,
    layer: Layers = None,
    as_json: Json = False,
) -> None:
    """Measure dense and sparse side by side on this GPU: outputs checked first, then timed in turns, and judged."""
    from sparsedeploy.measure import bench_command

    asked = bench_command.Asked(
        source=source, runners=runners, batch=batch, precision=precision, duration_s=duration, warmup_s=warmup, seed=seed,
        out=out, compare=compare, fail_if=tuple(fail_if or ()), anyway=anyway, sweep=sweep, shapes=_shapes(shape),
        layers=tuple(layer or ()), as_json=as_json,
    )  # fmt: skip
    said = bench_command.run(asked, _stages(as_json))
    if as_json:
        sys.stdout.write(said.record.to_json())
    else:
        for part in said.parts:
            _print_part(part)
    if said.failed:
        raise CheckFailed(said.failed)


def _print_part(part: str | tuple[tuple[str, ...], ...]) -> None:
    """A line, or a table whose first row is its head."""
    if isinstance(part, str):
        print(part)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(part[0]):
        table.add_column(escape(name), justify="right" if i else "left", overflow="fold")
    for row in part[1:]:
        table.add_row(*map(escape, row))
    _console().print(table)


@app.command()
def prune(
    model: ModelFile,
    sparsity: Annotated[
        str, typer.Option("--sparsity", help="Share of zeros, 0 to below 1; or N:M with --method n:m.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Pruned model to write.", show_default=False)],
    method: Annotated[
        str, typer.Option("--method", help="magnitude-global, magnitude-layer, random or n:m.")
    ] = "magnitude-global",
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layers",
            help="Names of convolutions to prune, * and ? allowed; may be repeated.",
            show_default="every 2-D convolution of 8 or more input channels, group 1",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of --method random.")] = 0,
    as_json: Json = False,
) -> None:
    """Zero the weights of a dense model, to try the tool. Accuracy needs retraining: this makes test models."""
    from sparsedeploy.pruning import prune_file

    report = prune_file(model, out, sparsity, method, tuple(layers or ()), seed)
    if as_json:
        sys.stdout.write(report.to_json())
        return
    print(
        f"{out}: {len(report.pruned)} weights pruned by {report.method}: {report.sparsity:.2%} of their {report.total:,} "
        f"values are zero (before: {report.zeros_before / report.total if report.total else 0:.2%})"
    )
    for skipped in report.skipped:
        print(f"left as it is: {skipped.layer} ({skipped.reason})")
    print("For tests of speed and correctness only: pruned this way, a network needs retraining before it is accurate.")
    print(f"Next: sparsedeploy scan {shlex.quote(str(out))}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this machine has for converting, building and running, each with ok or the fix."""
    from sparsedeploy import doctor as examined

    with _progress(as_json) as tell:
        tell("looking")
        found = examined.diagnose()
    if as_json:
        sys.stdout.write(found.to_json())
    else:
        for line in examined.lines_of(found):
            print(line)
    if not found.can_convert:
        broken = ", ".join(
            check.what for check in found.checks if check.area == "converting" and check.state == "broken"
        )
        raise MachineError(f"something that converting needs is broken: {broken}. The table says how to mend each.")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to work in.")] = Path("sparsedeploy-demo"),
    target: Annotated[
        list[str] | None,
        typer.Option("--target", "-t", help="Device; may be repeated.", show_default="jetson-nano and a100"),
    ] = None,
    no_engine: NoEngine = False,
) -> None:
    """Make a pruned ResNet-18 and convert it for two devices, by plan and forced; with engines where they can be built."""
    from sparsedeploy import demo as demo_module

    targets = tuple(devices.find(name) for name in target) if target else demo_module.default_targets()
    with _progress(False) as tell:
        tell("making a ResNet-18 at 90 % zeros")
        model = demo_module.write_model(out)
        done = demo_module.runs(model, out, targets, tell, engines=not no_engine)
    print(
        f"{model}: ResNet-18, random He weights, pruned to {demo_module.SPARSITY:.0%} by skewed magnitude (no accuracy to speak of)"
    )
    for label, conversion, lines in done:
        print()
        print(f"== {conversion.manifest.target}, {conversion.manifest.precision}, {label}")
        _print_conversion(conversion, lines)
    print()
    print(f"Open {done[0][1].out / 'report.html'} in a browser. Your own model: sparsedeploy scan MODEL.onnx")


@app.command()
def tune(
    bundle: Annotated[Path, typer.Argument(help="Bundle made by convert.", show_default=False)],
    model: Original = None,
    arithmetic: Annotated[
        str | None,
        typer.Option(
            "--arithmetic",
            help="Of the dense layers: fp32 (no TF32), tf32, fp16.",
            show_default="the bundle's precision",
        ),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Try only this kernel; may be repeated.", show_default="every kernel"),
    ] = None,
    per_kernel: Annotated[
        int, typer.Option("--per-kernel", min=1, max=20, help="Configurations of each kernel to try per layer.")
    ] = 3,
    compile_seconds: Annotated[
        float, typer.Option("--compile-seconds", min=1, max=86400, help="What building one candidate may take.")
    ] = 60.0,
    save_profile: Annotated[
        Path | None,
        typer.Option(
            "--save-profile", help="Also write (or add to) a profile of this device, for scan and convert --profile."
        ),
    ] = None,
    no_engine: NoEngine = False,
    as_json: Json = False,
) -> None:
    """Measure every layer on this GPU, dense and with each kernel, keep what is faster, and rewrite the bundle.

    Never slower: the whole model decides, and where sparse does not win, everything stays dense.
    """
    from sparsedeploy.measure import tune_command

    asked = tune_command.Asked(
        bundle=bundle, model=model, arithmetic=arithmetic, kernels=tuple(kernel or ()), per_kernel=per_kernel,
        compile_s=compile_seconds, save_profile=save_profile, no_engine=no_engine,
    )  # fmt: skip
    with _progress(as_json) as tell:
        said = tune_command.run(asked, tell)
    if as_json:
        sys.stdout.write(said.record.to_json())
        return
    for part in said.parts:
        _print_part(part)


def _what_if(
    model: Path, target: str | None, precision: str | None, batch: int | None, shape: list[str] | None, profile: Path | None,
    share: str, as_json: bool, file: Path | None,
) -> None:  # fmt: skip
    """`scan --impose-sparsity`: predictions for zeros that the model does not have, so no plan and no table of it as files."""
    from sparsedeploy import whatif
    from sparsedeploy.reading import read
    from sparsedeploy.scan import scan as scan_reading

    if file is not None:
        raise InputError(
            f"--impose-sparsity with {file}: --save-plan and --csv are about the model's own zeros. Leave one out, or prune "
            "the model with `sparsedeploy prune` and scan that."
        )
    sparsity, device = whatif.parse_sparsity(share), _target(target)
    measured = _profile(profile, device)
    with _progress(as_json) as tell:
        tell("reading the model")
        reading = read(model, device, _precision(precision, model) if precision else None, _shapes(shape), batch)
        tell("imposing zeros")
        found = whatif.what_if(reading, scan_reading(reading, device), device, reading.precision, sparsity, measured)
    if as_json:
        sys.stdout.write(found.to_json())
        return
    _print_target(device, target)
    for part in whatif.parts(found):
        _print_part(part)


def _profile(path: Path | None, device: devices.Device) -> DeviceProfile | None:
    if path is None:
        return None
    from sparsedeploy.profile import load_profile

    return load_profile(path, device)


def _target(name: str | None) -> devices.Device:
    if name is not None:
        return devices.find(name)
    gpu = first_gpu()
    return (closest(gpu) if gpu else None) or devices.find(devices.DEFAULT)


def _print_target(device: devices.Device, asked: str | None) -> None:
    if asked is None:
        gpu = first_gpu()
        why = f"closest to the GPU here, {gpu.name}" if gpu and closest(gpu) else "no known GPU here"
        others = ", ".join(row.name for row in devices.DEVICES if row is not device)
        print(f"target {device.name}: {device.title} ({why}; --target changes it: {others})")
    else:
        print(f"target {device.name}: {device.title}")


def _precision(name: str | None, model: Path) -> Precision:
    if name is None:
        from sparsedeploy.reading import stored_precision

        return stored_precision(model)
    if name == "fp32" or name == "fp16":
        return name  # type: ignore[return-value]
    raise InputError(f"--precision {name}: needed fp32 or fp16. (int8 is not supported: quantised layers stay dense.)")


def _shapes(texts: list[str] | None) -> dict[str, tuple[int, ...]]:
    from sparsedeploy.converters.shapes import parse_shape

    return dict(parse_shape(text) for text in texts or ())


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A callable that shows the current stage: a spinner on a terminal's stderr, nothing elsewhere."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda stage: None
        return
    with console.status("starting") as status:
        yield lambda stage: status.update(escape(stage))


def _stages(quiet: bool) -> Callable[[str], None]:
    """As _progress, a line a stage: a spinner's thread would wake up in the middle of what is being timed."""
    console = Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        return lambda stage: None
    return lambda stage: console.print(escape(stage), style="dim")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave as _Group does: rich's own way out is exit code 1, which here means that a check failed."""
        os._exit(0)


def _console() -> Console:
    """Tables keep their columns when piped: a file has no width."""
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=200)


def _print_scan(found: Scan, plan: Plan) -> None:
    summary = found.summary
    print(
        f"{found.model}: opset {found.opset}, IR {found.ir_version}, {', '.join(_shape_text(n, s) for n, s in found.inputs.items())}"
    )
    for note in found.notes:
        print(f"note: {note}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("convolution", "weight", "conv", "input", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("zeros %", "nnz/oc min/med/max", "empty", "2:4"):
        table.add_column(name, justify="right")
    for name in ("fused", "eligible", "plan"):
        table.add_column(name, overflow="fold")
    decided = {entry.name: entry for entry in plan.layers}
    for layer in found.layers:
        entry = decided[layer.name]
        table.add_row(*(escape(cell) for cell in _cells(layer)), escape(entry.choice))
    _console().print(table)
    cap = f"capped at {summary.gain_cap:.2f}x by the rest" if summary.gain_cap else "not capped by the rest"
    print(
        f"eligible {summary.eligible} of {summary.convolutions} convolutions, {summary.eligible_macs_share:.1%} of "
        f"{_macs(summary.macs)} per image; end-to-end gain {cap} (Amdahl, in MACs); "
        f"zeros {summary.sparsity_by_macs:.1%} by MACs, {summary.sparsity_by_weights:.1%} by weights"
    )
    for hint in found.hints:
        print(f"hint: {hint}")
    print(found.verdict)
    print(f"Next: {found.next_command}")


def _cells(layer: ConvLayer) -> tuple[str, ...]:
    g, z = layer.geometry, layer.zeros
    conv = ""
    if g:
        pads = g.pads if g.pads[:2] != g.pads[2:] else g.pads[:2] if g.pads[0] != g.pads[1] else g.pads[:1]
        stride = g.stride[:1] if g.stride[0] == g.stride[1] else g.stride
        dilation = "" if g.dilation == (1, 1) else f" d{_joined(g.dilation)}"
        conv = f"{g.kh}x{g.kw} s{_joined(stride)} p{_joined(pads)} g{g.group}{dilation}"
    elif layer.op != "Conv":
        conv = layer.op
    spread = f"{z.nnz_per_channel[0]}/{z.nnz_per_channel[1]:g}/{z.nnz_per_channel[2]}" if z else "-"
    reasons = "; ".join(dict.fromkeys(reason.text for reason in layer.ineligible))
    return (
        layer.name,
        "x".join(map(str, layer.shape)) or "?",
        conv,
        "x".join(map(str, layer.input_shape[1:])) or "?",
        layer.dtype,
        f"{100 * z.sparsity:.1f}" if z else "-",
        spread,
        str(z.empty_filters) if z else "-",
        "no" if not z else "yes" if z.two_four else "permuted" if z.two_four_permuted else "no",
        layer.epilogue.describe(),
        f"no: {reasons}" if reasons else "yes",
    )


def _macs(count: int) -> str:
    return f"{count / 1e9:.2f} GMAC" if count >= 1e8 else f"{count / 1e6:.2f} MMAC"


def _joined(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _shape_text(name: str, shape: tuple[Any, ...]) -> str:
    return f"{name} {'x'.join(map(str, shape))}"


def _print_conversion(done: Conversion, engine: tuple[str, ...]) -> None:
    from sparsedeploy.convert import sizes, verdict
    from sparsedeploy.plan import DENSE, totals
    from sparsedeploy.roofline import format_us

    if done.nothing:
        print(f"nothing to convert: {done.nothing}")
    for note in done.notes:
        print(f"note: {note}")
    for hint in done.scan.hints:
        print(f"hint: {hint}")
    if not done.nothing:
        total = totals(done.plan.layers)
        used = [entry.choice for entry in done.plan.layers if entry.choice != DENSE]
        kernels = ", ".join(f"{used.count(name)} {name}" for name in sorted(set(used)))
        gain = total.dense_us / total.planned_us if total.planned_us else 1.0
        print(
            f"{len(used)} of {done.scan.summary.convolutions} convolutions sparse ({kernels}); predicted for all "
            f"convolutions, not measured: {format_us(total.dense_us)} us dense, {format_us(total.planned_us)} us as planned ({gain:.2f}x)"
        )
    note = f" ({done.verification.note})" if done.verification.note else ""
    print(f"verified: {verdict(done.verification)}{note}")
    print(f"{done.out}: {sizes(done.out)}, report.html")
    if not done.nothing:
        sm, kinds = done.manifest.sm, "PTX and machine code" if done.verification.cubins else "PTX"
        print(
            f"every sparse node carries its code for sm_{sm} ({kinds}) and how to launch it; nothing has run on a device yet"
            if done.manifest.executable
            else "weights verified; no kernel yet"
        )
    for line in engine:
        print(line)
    if done.nothing:
        print(f"Next: {done.scan.next_command}")
    else:
        print(
            f"Next: open {done.out / 'report.html'}; check the copy on another machine with `sparsedeploy verify {shlex.quote(str(done.out))}`"
        )


if __name__ == "__main__":
    main()
