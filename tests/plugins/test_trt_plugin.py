"""The real plugin library, driven through TensorRT's C++ interfaces in its order, on a driver that only records.

What it launches must be what plugins/host.py launches. SPARSEDEPLOY_TENSORRT_INCLUDE names further header folders
(8.0, 8.2, 8.6, 11.1, separated by colons) whose forms are then compiled and run as well. SPARSEDEPLOY_TENSORRT_LIBRARY
names real libraries with a registry (libnvinfer.so.10, libnvinfer_lean.so.11): the plugin must be found in them too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trt_native import HOST, PLUGIN, compile_native, node_file, write_fields

from sparsedeploy.errors import MachineError
from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.host import Call, Runner
from sparsedeploy.plugins.launch import Arg, ArgKind, Expr, Launch, Memset, Op, Variant, const, var
from sparsedeploy.plugins.node import OP_TYPE, PLUGIN_NAMESPACE, PLUGIN_VERSION, FieldValue, Image, SparseConv
from sparsedeploy.plugins.plugin_build import Arch, Flavour, build_plugin, fetched_headers, header_version

INCLUDE, LIBRARY = "SPARSEDEPLOY_TENSORRT_INCLUDE", "SPARSEDEPLOY_TENSORRT_LIBRARY"
OUTPUT, WORKSPACE = 0x90000000, 0xA0000000
"""Where host.cpp puts them; input k is at 0x100000 * (k + 1)."""

GEOMETRY = Geometry(oc=4, ic=3, kh=3, kw=3, h=6, w=5, pads=(1, 1, 1, 1))
ARGS = (
    Arg("input"), Arg("residual"), Arg("constant", 1), Arg("constant"), Arg("N"), Arg("output"), Arg("workspace", 32),
    Arg("W"), Arg("H"),
)  # fmt: skip
IMAGE = b"conv 8 8 8 8 4 8 8 4 4\nlast 8\n"
LAUNCH = Launch("conv", (var("N") * 2, var("OH").ceil_div(4), const(1)), (64, 2, 1), ARGS, 100_000, 2, True)
LAST = Launch("last", (var("N"), const(1), const(3)), (32, 1, 1), (Arg("output"),))
NODE = SparseConv(
    layer="stage1.conv",
    kernel="csr",
    geometry=GEOMETRY,
    epilogue=Epilogue(activation="relu", residual="before_activation"),
    precision="fp32",
    constants=(np.arange(5, dtype=np.int32), np.arange(7, dtype=np.int32)),
    plan=(
        Variant("fp32", (Memset(32, var("N") * 8), LAUNCH, LAST), (const(9) - var("N")) * 64 + 32, max_n=8),
        Variant("fp32", (LAST,), min_n=9, max_n=16),
        Variant("fp16", (replace(LAST, entry="half"),)),
    ),
    images=(
        Image(53, "fp32", "ptx", IMAGE),
        Image(90, "fp32", "cubin", IMAGE),
        Image(70, "fp16", "ptx", b"half 8\n"),
    ),
)
TENSORS = "tensors N,3,6,5;N,4,6,5;5;7|N,4,6,5"


@dataclass(frozen=True)
class Built:
    """One form of the plugin and the host that drives it."""

    flavour: Flavour
    plugin: Path
    host: Path
    driver: Path

    def run(self, folder: Path, commands: list[str], **env: str | None) -> Answers:
        """The commands' answers, from a fresh process."""
        log = folder / "calls.jsonl"
        log.unlink(missing_ok=True)
        variables = {**os.environ, "LD_LIBRARY_PATH": str(self.driver.parent), "FAKE_CUDA_LOG": str(log), **env}
        result = subprocess.run(
            [str(self.host), str(self.plugin)],
            input="\n".join(commands) + "\n",
            capture_output=True,
            text=True,
            check=False,
            env={name: value for name, value in variables.items() if value is not None},
        )
        assert result.returncode == 0, result.stderr
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return Answers([json.loads(line) for line in result.stdout.splitlines()], result.stderr, calls)


@dataclass(frozen=True)
class Answers:
    """What the host said, what the plugin said, and what the driver was asked."""

    said: list[dict[str, Any]]
    errors: str
    calls: list[dict[str, Any]]

    def called(self, *kinds: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["call"] in kinds]


def headers() -> Path:
    try:
        return fetched_headers()
    except MachineError as error:
        pytest.skip(str(error))


def forms() -> list[tuple[Flavour, str]]:
    given = list(filter(None, os.environ.get(INCLUDE, "").split(os.pathsep)))
    flavours: list[Flavour] = ["v2" if header_version(Path(folder))[0] < 10 else "v3" for folder in given]
    return [("v3", ""), ("v2", ""), *zip(flavours, given, strict=True)]


def library(out: Path, flavour: Flavour, folder: Path) -> Path:
    arch: Arch = "aarch64" if os.uname().machine == "aarch64" else "x86_64"
    try:
        return build_plugin(out, folder, flavour, arch, "system")
    except MachineError as error:
        pytest.skip(str(error))


def host_program(name: str, source: str, folder: Path, *flags: str) -> Path:
    includes = ("-isystem", str(folder), f"-I{PLUGIN / 'cuda_shim'}")
    return compile_native(name, [HOST / source], *includes, *flags, hashed=tuple(sorted(folder.glob("NvInfer*.h"))))


@pytest.fixture(scope="module", params=forms(), ids=lambda form: f"{form[0]}-{Path(form[1]).name or '10.14'}")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    flavour, given = request.param
    folder = Path(given) if given else headers()
    plugin = library(tmp_path_factory.mktemp("plugin") / "plugin.so", flavour, folder)
    adapter = f"-DSPARSEDEPLOY_ADAPTER={flavour[1]}"
    host = host_program("host", "host.cpp", folder, adapter, "-rdynamic")
    return Built(flavour, plugin, host, compile_native("libcuda.so.1", [HOST / "fake_cuda.cpp"], "-fPIC", "-shared"))


class Recorder:
    """A driver for plugins/host.py with the addresses of host.cpp."""

    def __init__(self, capability: int, node: SparseConv) -> None:
        self.arch, self.log = capability, list[dict[str, Any]]()
        first = 3 if node.has_residual else 2
        self.addresses = [*(0x100000 * (first + i) for i in range(len(node.constants))), WORKSPACE]

    def capability(self, device: int) -> int:
        return self.arch

    def activate(self, device: int) -> None:
        pass

    def load(self, image: bytes) -> int:
        return 1

    def unload(self, module: int) -> None:
        pass

    def function(self, module: int, name: str, shared_bytes: int, cluster: int) -> int:
        return 1

    def alloc(self, size: int) -> int:
        return self.addresses.pop(0)

    def free(self, address: int) -> None:
        pass

    def upload(self, address: int, data: bytes) -> None:
        pass

    def download(self, address: int, size: int) -> bytes:
        return bytes(size)

    def capturing(self, stream: int) -> bool:
        return False

    def zero(self, address: int, size: int, stream: int) -> None:
        self.log.append({"call": "memset", "address": address, "value": 0, "bytes": size, "stream": stream})

    def launch(self, function: int, call: Call, stream: int) -> None:
        self.log.append(
            {
                "call": "launch",
                "entry": call.entry,
                "grid": list(call.grid),
                "block": list(call.block),
                "shared": call.shared_bytes,
                "stream": stream,
                "cluster": call.cluster,
                "dependent": int(call.dependent),
                "args": [value for value, _ in call.values],
            }
        )


class At:
    """An array at a known address."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4" if dtype == "fp32" else "<f2", "data": (address, False), "strides": None,
            "version": 3,
        }  # fmt: skip


def python_calls(node: SparseConv, dtype: str, n: int, stream: int, capability: int = 90) -> list[dict[str, Any]]:
    """What the Python runner asks of the driver for the same node and addresses."""
    recorder, g = Recorder(capability, node), node.geometry
    runner = Runner(node, 0, recorder)
    output = (n, g.oc, g.oh, g.ow)
    residual = At(0x200000, output, dtype) if node.has_residual else None
    runner.run(
        At(0x100000, (n, g.ic, g.h, g.w), dtype), residual=residual, out=At(OUTPUT, output, dtype), stream=stream
    )
    return recorder.log


def test_creator_asks_for_every_field(built: Built, tmp_path: Path) -> None:
    (said,) = built.run(tmp_path, ["fields"]).said
    names = [name for name in NODE.fields() if not name.startswith("plugin_")]
    assert said == {"name": OP_TYPE, "version": PLUGIN_VERSION, "namespace": PLUGIN_NAMESPACE, "fields": names}


def test_whole_life_in_tensorrts_order(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    build = [
        TENSORS, f"create {node}", "clone 0", "shape 1 -1", "types 1 fp32 1", "formats 1", "clone 1",
        "configure 2 fp32 1 16", "workspace 2 fp32 16", "clone 2", f"save 2 {tmp_path / 'original'}",
        f"save 3 {tmp_path / 'clone'}", "destroy 0", "destroy 1", "destroy 2", "destroy 3",
    ]  # fmt: skip
    answers = built.run(tmp_path, build, LD_LIBRARY_PATH=None)
    assert answers.errors == ""
    assert answers.said[3] == {"status": 0, "shape": [-1, 4, 6, 5]}
    assert answers.said[4] == {"type": 0}
    assert answers.said[5] == {"formats": [[0, 0], [1, 0]]}
    assert answers.said[7] == {"status": 0}
    assert answers.said[8] == {"bytes": 8 * 64 + 32}  # N=1 takes most
    assert (tmp_path / "original").read_bytes() == (tmp_path / "clone").read_bytes()
    run = [
        TENSORS, f"restore {tmp_path / 'clone'}", f"save 0 {tmp_path / 'again'}", "attach 0", "change 1 fp32 3",
        "enqueue 1 fp32 3 41", "change 1 fp32 8", "enqueue 1 fp32 8 42", "enqueue 1 fp32 12 43", "destroy 1",
        "destroy 0", "loaded",
    ]  # fmt: skip
    answers = built.run(tmp_path, run)
    assert answers.errors == ""
    assert [answer["status"] for answer in answers.said if "status" in answer] == [0] * 5
    assert (tmp_path / "again").read_bytes() == (tmp_path / "clone").read_bytes()
    wanted = [call for n, stream in ((3, 41), (8, 42), (12, 43)) for call in python_calls(NODE, "fp32", n, stream)]
    assert answers.called("launch", "memset") == wanted
    assert answers.said[-1] == {"loaded": 0}


def test_enqueue_only_launches(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    commands = [TENSORS, f"create {node}", "configure 0 fp32 1 8", "attach 0", "change 1 fp32 8"]
    answers = built.run(tmp_path, [*commands, *(f"enqueue 1 fp32 {n} 7" for n in (1, 8, 3))])
    assert [answer["allocations"] for answer in answers.said[5:]] == [0, 0, 0]
    first = next(i for i, call in enumerate(answers.calls) if call["call"] == "memset")
    assert {call["call"] for call in answers.calls[first:]} == {"memset", "launch"}
    assert {call["stream"] for call in answers.calls[first:]} == {7}
    assert not answers.called("unwanted")


def test_the_launchers_own_time_is_small(built: Built, tmp_path: Path) -> None:
    """The bound is 5 us a layer on the host; a driver that does nothing leaves the launcher's own share."""
    node = replace(NODE, plan=(replace(NODE.plan[0], ops=(LAUNCH,)), NODE.plan[2]))
    commands = [TENSORS, f"create {node_file(tmp_path / 'node', node)}", "attach 0", *["time 1 fp32 4 20000"] * 5]
    answers = built.run(tmp_path, commands, FAKE_CUDA_LOG=None)
    assert min(answer["ns"] for answer in answers.said[-5:]) < 5000


def test_entries_are_configured_when_attached(built: Built, tmp_path: Path) -> None:
    wide = replace(LAUNCH, cluster=16, shared_bytes=60_000)
    node = replace(NODE, plan=(Variant("fp32", (LAUNCH, wide, LAST), const(64)),))
    answers = built.run(tmp_path, [TENSORS, f"create {node_file(tmp_path / 'node', node)}", "attach 0"])
    settings = {(call["entry"], call["attribute"], call["value"]) for call in answers.called("attribute")}
    # 8: dynamic shared memory, the most that any launch of the entry takes; 14: clusters of more than 8 blocks.
    assert settings == {("conv", 8, 100_000), ("conv", 14, 1)}


def test_half_runs_its_own_variant_and_image(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    commands = [TENSORS, f"create {node}", "configure 0 fp16 1 4", "attach 0", "change 1 fp16 4", "enqueue 1 fp16 4 1"]
    answers = built.run(tmp_path, commands)
    assert [call["image"] for call in answers.called("load")] == ["half"]
    assert answers.called("launch", "memset") == python_calls(NODE, "fp16", 4, 1)


def test_fields_as_other_parsers_pass_them(built: Built, tmp_path: Path) -> None:
    for name, options in (("a", {}), ("b", {"text_end": b"\0"}), ("c", {"wide": built.flavour == "v3"})):
        node_file(tmp_path / name, NODE, **options)
    creates = [f"create {tmp_path / name}" for name in "abc"]
    saves = [f"save {i} {tmp_path / f'saved{i}'}" for i in range(3)]
    assert built.run(tmp_path, [*creates, *saves]).errors == ""
    assert len({(tmp_path / f"saved{i}").read_bytes() for i in range(3)}) == 1


def random_node(rng: random.Random) -> SparseConv:
    def expression(depth: int = 2) -> Expr:
        if depth == 0:
            return var(rng.choice(("N", "H", "W", "OH", "OW"))) if rng.random() < 0.7 else const(rng.randint(1, 9))
        a, b = expression(depth - 1), expression(depth - 1)
        return rng.choice((a + b, a - b, a * b, a // b.at_least(1), a.ceil_div(b.at_least(2)), a.at_most(b)))

    def size() -> Expr:
        return expression().at_least(1).at_most(60_000)

    def args() -> tuple[Arg, ...]:
        kinds: tuple[ArgKind, ...] = ("input", "output", "constant", "workspace", "N", "H", "W")
        chosen = [rng.choice(kinds) for _ in range(rng.randint(0, 9))]
        return tuple(Arg(k, rng.randint(0, 1) if k == "constant" else 64 * (k == "workspace")) for k in chosen)

    ops: list[Op] = []
    image = ""
    for i in range(rng.randint(1, 4)):
        launch = Launch(
            f"k{i}", (size(), size(), size()), (rng.randint(1, 64), 2, 1), args(), rng.randint(0, 99_999),
            rng.choice((1, 1, 2, 4)), rng.random() < 0.3,
        )  # fmt: skip
        widths = ["4" if arg.kind in ("N", "H", "W") else "8" for arg in launch.args]
        image += " ".join([f"k{i}", *widths]) + "\n"
        ops += [Memset(64 * i, size()), launch] if rng.random() < 0.5 else [launch]
    geometry = Geometry(oc=rng.randint(1, 9), ic=rng.randint(1, 9), kh=2, kw=3, h=rng.randint(5, 30), w=7)
    plan = (
        Variant("fp32", tuple(ops), const(100_000), max_n=rng.choice((0, 3))),
        Variant("fp32", tuple(ops[-1:]), const(64)),
    )
    return replace(
        NODE,
        geometry=replace_geometry(geometry, stride=(rng.randint(1, 3), rng.randint(1, 2))),
        epilogue=Epilogue(),
        plan=plan,
        images=(Image(90, "fp32", "ptx", image.encode()),),
    )


def replace_geometry(geometry: Geometry, **changes: Any) -> Geometry:
    return geometry.model_copy(update=changes)


def shapes(node: SparseConv) -> str:
    g = node.geometry
    constants = ";".join(str(table.size) for table in node.constants)
    return f"tensors N,{g.ic},{g.h},{g.w};{constants}|N,{g.oc},{g.oh},{g.ow}"


def test_random_plans_launch_what_the_python_runner_launches(built: Built, tmp_path: Path) -> None:
    rng = random.Random(8)
    commands, wanted = [], []
    for i in range(40):
        node = random_node(rng)
        made = node_file(tmp_path / f"node{i}", node)
        commands += [shapes(node), f"create {made}", f"attach {2 * i}"]
        for n in (1, 3, 5):
            commands += [f"change {2 * i + 1} fp32 {n}", f"enqueue {2 * i + 1} fp32 {n} {n}"]
            wanted += python_calls(node, "fp32", n, n)
    answers = built.run(tmp_path, commands)
    assert answers.errors == ""
    assert answers.called("launch", "memset") == wanted
    assert len(wanted) > 200


def test_batch_zero_returns_at_once(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    answers = built.run(tmp_path, [TENSORS, f"create {node}", "attach 0", "change 1 fp32 0", "enqueue 1 fp32 0 1"])
    assert answers.said[-2:] == [{"status": 0}, {"status": 0, "allocations": 0}]
    assert answers.called("launch", "memset") == []


def test_an_image_is_loaded_once_per_context(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    other = node_file(tmp_path / "other", replace(NODE, layer="stage2.conv"))
    commands = [
        TENSORS, f"create {node}", f"create {other}", "configure 0 fp32 1 8", "configure 1 fp32 1 8", "attach 0",
        "attach 0", "attach 1", "loaded", "context 120", "attach 0", "loaded", "destroy 2", "destroy 3", "loaded",
        "destroy 4", "loaded", "destroy 5", "loaded",
    ]  # fmt: skip
    answers = built.run(tmp_path, commands)
    assert [answer["loaded"] for answer in answers.said if "loaded" in answer] == [1, 2, 2, 1, 0]
    assert [call["context"] for call in answers.called("load")] == [0x77, 120]


def test_threads_and_contexts_do_not_disturb_each_other(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    commands = [TENSORS, f"create {node}", "configure 0 fp32 1 8", "attach 0", "attach 0", "context 120", "attach 0"]
    answers = built.run(tmp_path, [*commands, "attach 0", "threads 1,2,3,4,1,2 fp32 5 300"])
    assert answers.said[-1] == {"failures": 0}
    calls = answers.called("launch", "memset")
    assert len(calls) == 6 * 300 * 3
    for stream in range(1, 7):
        own = [call for call in calls if call["stream"] == stream]
        assert own == python_calls(NODE, "fp32", 5, stream) * 300


def test_leaving_with_everything_alive_is_quiet(built: Built, tmp_path: Path) -> None:
    node = node_file(tmp_path / "node", NODE)
    assert built.run(tmp_path, [TENSORS, f"create {node}", "attach 0", "enqueue 1 fp32 1 1", "leave"]).errors == ""


def failing(
    built: Built, folder: Path, node: SparseConv | dict[str, FieldValue], commands: list[str], **env: str | None
) -> str:
    """The plugin's words after commands on a node, the first of which are TENSORS and create."""
    fields = node if isinstance(node, dict) else node.fields()
    made = write_fields(folder / "node", fields)
    answers = built.run(folder, [TENSORS, f"create {made}", *commands], **env)
    said = answers.said[-1]
    assert said.get("status", 1) != 0
    assert said.get("object") is None
    return answers.errors


def test_no_driver(built: Built, tmp_path: Path) -> None:
    words = failing(built, tmp_path, NODE, ["attach 0"], LD_LIBRARY_PATH=None)
    assert "SparseConv2d stage1.conv: no CUDA driver: libcuda.so.1 cannot be loaded" in words


@pytest.mark.parametrize(
    ("change", "capability", "words"),
    [
        ({}, "50", "compute capability 5.0, the node's fp32 images are sm_53 ptx, sm_90 cubin"),
        ({}, "80", "clusters of 2 blocks, which need compute capability 9.0"),
        ({"images": (Image(90, "fp32", "ptx", b"bad ptx"),)}, "90", "(ptxas: unknown opcode) failed: a PTX JIT"),
        ({"images": (Image(90, "fp32", "ptx", b"other 8\n"),)}, "90", "looking up kernel conv failed: named symbol"),
        ({"images": ()}, "90", "it carries no code"),
    ],
)
def test_a_device_that_cannot_run_it(
    built: Built, tmp_path: Path, change: dict[str, Any], capability: str, words: str
) -> None:
    node = replace(NODE, **{"plan": NODE.plan[:2], "images": NODE.images[:2], **change})
    said = failing(built, tmp_path, node, ["attach 0"], FAKE_CUDA_CAPABILITY=capability)
    assert "SparseConv2d stage1.conv: " in said
    assert words in said


def test_older_devices_take_ptx_and_no_dependent_launch(built: Built, tmp_path: Path) -> None:
    node = replace(NODE, plan=(Variant("fp32", (replace(LAUNCH, cluster=1),), const(64)),))
    made = node_file(tmp_path / "node", node)
    commands = [TENSORS, f"create {made}", "attach 0", "enqueue 1 fp32 2 3"]
    answers = built.run(tmp_path, commands, FAKE_CUDA_CAPABILITY="53")
    assert answers.called("launch") == python_calls(node, "fp32", 2, 3, 53)
    assert answers.called("launch")[0]["dependent"] == 0


def test_wrong_abi_and_damaged_fields(built: Built, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, FieldValue], str], ...] = (
        ({"abi": 2}, "field abi is 2, this plugin reads 1"),
        ({"launch_plan": (1, 0)}, "field launch_plan: the launch plan ends early"),
        ({"constants": (1, 2)}, "field constants has 2 integers, needed 1"),
        ({"geometry": "text"}, "field geometry has type 6, needed integers"),
    )
    for change, words in cases:
        assert f"SparseConv2d node: {words}" in failing(built, tmp_path, {**NODE.fields(), **change}, [])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ("N,3,6,5;N,4,6,1;5;7|N,4,6,5", "the residual that it adds is [{n}, 4, 6, 1], its output [{n}, 4, 6, 5]"),
        ("N,3,6,5;1,4,6,5;5;7|N,4,6,5", "the residual that it adds is [1, 4, 6, 5], its output [8, 4, 6, 5]"),
        ("N,3,7,5;N,4,6,5;5;7|N,4,6,5", "its input is [{n}, 3, 7, 5], needed [N, 3, 6, 5]"),
        ("N,2,6,5;N,4,6,5;5;7|N,4,6,5", "its input is [{n}, 2, 6, 5], needed [N, 3, 6, 5]"),
        ("N,3,6,5;N,4,6,5;5|N,4,6,5", "the node has 3 inputs and 1 outputs, its fields say 4 and 1"),
    ],
)
def test_wrong_shapes_are_refused_while_building(built: Built, tmp_path: Path, tensors: str, words: str) -> None:
    made = node_file(tmp_path / "node", NODE)
    commands = [f"tensors {tensors}", f"create {made}", "formats 0", "configure 0 fp32 8 8"]
    answers = built.run(tmp_path, commands)
    if built.flavour == "v3":
        assert answers.said[-1]["status"] != 0
    elif "[1, 4" not in words:  # -1 and 1 may be one size until it runs: below
        assert answers.said[-2] == {"formats": []}
    if built.flavour == "v3" or "[1, 4" not in words:
        assert "SparseConv2d stage1.conv: " in answers.errors
        assert any(words.format(n=n) in answers.errors for n in (-1, 8))


def test_wrong_shapes_are_refused_while_running(built: Built, tmp_path: Path) -> None:
    made = node_file(tmp_path / "node", NODE)
    wrong = "tensors N,3,6,5;1,4,6,5;5;7|N,4,6,5"
    last = "change 1 fp32 8" if built.flavour == "v3" else "enqueue 1 fp32 8 1"
    answers = built.run(tmp_path, [TENSORS, f"create {made}", "attach 0", wrong, last])
    assert answers.said[-1]["status"] != 0
    assert "the residual that it adds is [1, 4, 6, 5], its output [8, 4, 6, 5]" in answers.errors
    assert answers.called("launch") == []


def test_height_and_width_are_refused_before_anything_is_built(built: Built, tmp_path: Path) -> None:
    made = node_file(tmp_path / "node", NODE)
    wide = "tensors N,3,6,9;N,4,6,9;5;7|N,4,6,9"
    answers = built.run(tmp_path, [wide, f"create {made}", "shape 0 -1"])
    assert "its input is [-1, 3, 6, 9], needed [N, 3, 6, 5]: the kernel was made for that height" in answers.errors
    assert answers.said[-1]["status"] == (1 if built.flavour == "v3" else 0)


def test_open_height_and_width_follow_the_input(built: Built, tmp_path: Path) -> None:
    g = replace_geometry(GEOMETRY, stride=(2, 1), dilation=(1, 2), pads=(1, 0, 0, 3))
    launch = Launch("size", (var("H") * 100 + var("W"), var("OH") * 100 + var("OW"), const(1)), (1, 1, 1), (Arg("W"),))
    node = replace(
        NODE, geometry=g, fixed_hw=False, epilogue=Epilogue(), plan=(Variant("fp32", (launch,), var("OW") * 10),),
        images=(Image(80, "fp32", "ptx", b"size 4\n"),),
    )  # fmt: skip
    other = replace_geometry(g, h=13, w=11)
    made = node_file(tmp_path / "node", node)
    tensors = f"tensors N,3,13,11;5;7|N,4,{other.oh},{other.ow}"
    commands = [tensors, f"create {made}", "shape 0 -1", "workspace 0 fp32 4", "attach 0", "enqueue 1 fp32 2 1"]
    answers = built.run(tmp_path, commands)
    assert answers.said[2] == {"status": 0, "shape": [-1, 4, other.oh, other.ow]}
    assert answers.said[3] == {"bytes": other.ow * 10}
    (call,) = answers.called("launch")
    assert call["grid"] == [1311, other.oh * 100 + other.ow, 1]
    assert call["args"] == [11]


def test_a_batch_that_no_variant_runs_is_refused(built: Built, tmp_path: Path) -> None:
    words = "nothing in its plan runs fp32 with N=17; it has fp32 N=1..8, fp32 N=9..16, fp16 N=1..any"
    made = node_file(tmp_path / "node", NODE)
    answers = built.run(tmp_path, [TENSORS, f"create {made}", "configure 0 fp32 1 32"])
    assert words in answers.errors
    assert words in failing(built, tmp_path, NODE, ["attach 0", "enqueue 1 fp32 17 1"])


def test_running_unattached_is_refused(built: Built, tmp_path: Path) -> None:
    assert "before it was attached" in failing(built, tmp_path, NODE, ["enqueue 0 fp32 1 1"])


def test_a_grid_beyond_the_device_is_refused(built: Built, tmp_path: Path) -> None:
    node = replace(NODE, plan=(Variant("fp32", (replace(LAST, grid=(const(1), var("N") * 40_000, const(1))),)),))
    words = failing(built, tmp_path, node, ["attach 0", "enqueue 1 fp32 2 1"])
    assert "launches last with a grid of 80000 along axis 1" in words


def test_truncated_engine_data_is_refused(built: Built, tmp_path: Path) -> None:
    made = node_file(tmp_path / "node", NODE)
    built.run(tmp_path, [f"create {made}", f"save 0 {tmp_path / 'saved'}"])
    whole = (tmp_path / "saved").read_bytes()
    short = tmp_path / "short"
    if built.flavour == "v2":
        short.write_bytes(whole[:-9])
        answers = built.run(tmp_path, [f"restore {short}"])
        assert "the serialised plugin ends early" in answers.errors
        short.write_bytes(b"another plugin's data")
        assert "something else" in built.run(tmp_path, [f"restore {short}"]).errors
    else:
        short.write_bytes(b"\n".join(whole.splitlines()[:-2]) + b"\n")  # images, chosen
        answers = built.run(tmp_path, [f"restore {short}"])
        assert "field images is missing" in answers.errors
    assert answers.said[-1] == {"object": None}


# -- how a TensorRT finds it


@dataclass(frozen=True)
class Loading:
    """A fake TensorRT 10, the plugin's builds, and a program that loads them in some order."""

    program: Path
    tensorrt: Path
    plugins: dict[str, Path]

    def run(self, commands: str, **env: str) -> list[dict[str, Any]]:
        result = subprocess.run(
            [str(self.program)],
            input=commands,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **env},
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == "" or "SparseConv2d" in result.stderr
        said = [json.loads(line) for line in result.stdout.splitlines()]
        return [*said, *({"stderr": line} for line in result.stderr.splitlines())]


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory) -> Loading:
    folder, made = headers(), tmp_path_factory.mktemp("loading")
    shared = ("-fPIC", "-shared", "-Wl,-soname,libnvinfer.so.10")
    flavours: tuple[Flavour, ...] = ("v2", "v3", "rtx")
    return Loading(
        host_program("loader", "loader.cpp", folder),
        host_program("libnvinfer.so.10", "fake_nvinfer.cpp", folder, *shared),
        {flavour: library(made / f"{flavour}.so", flavour, folder) for flavour in flavours},
    )


ONE = {"creators": 1, "found": True}
LOADERS: dict[str, Callable[[str, str], str]] = {
    "loaded privately before, as Python does": lambda trt, so: f"local {trt} local {so} creators",
    "linked before": lambda trt, so: f"global {trt} local {so} creators",
    "not loaded yet": lambda trt, so: f"local {so} creators",
    "by loadLibrary": lambda trt, so: f"local {trt} library {so} creators",
    "by loadLibrary after dlopen": lambda trt, so: f"local {trt} local {so} library {so} creators",
    "by loadLibrary twice": lambda trt, so: f"local {trt} library {so} unlibrary library {so} creators",
}


@pytest.mark.parametrize("how", LOADERS)
def test_every_loader_finds_one_creator(loading: Loading, how: str) -> None:
    commands = LOADERS[how](str(loading.tensorrt), str(loading.plugins["v3"]))
    said = loading.run(commands, LD_LIBRARY_PATH=str(loading.tensorrt.parent))
    assert said[-1] == ONE
    assert all(event.get("done", True) for event in said if event.get("registry") == "register")


def test_preloaded(loading: Loading) -> None:
    folder = str(loading.tensorrt.parent)
    said = loading.run("creators", LD_PRELOAD=str(loading.plugins["v3"]), LD_LIBRARY_PATH=folder)
    assert said[-1] == ONE


def test_unloading_leaves_no_creator_behind(loading: Loading) -> None:
    said = loading.run(f"local {loading.tensorrt} library {loading.plugins['v3']} unlibrary creators")
    assert said[-1] == {"creators": 0, "found": False}


def test_the_old_interface_registers_itself_too(loading: Loading) -> None:
    said = loading.run(f"local {loading.tensorrt} local {loading.plugins['v2']} creators")
    assert said == [{"registry": "register", "done": True, "held": 1}, {"creators": 1, "found": False}]


def test_registering_later(loading: Loading) -> None:
    plugin = loading.plugins["v3"]
    said = loading.run(f"local {plugin} local {loading.tensorrt} register {plugin} creators", LD_LIBRARY_PATH="")
    assert said[-2:] == [{"registered": True}, ONE]


def test_without_tensorrt_it_loads_in_silence(loading: Loading) -> None:
    said = loading.run(f"local {loading.plugins['v3']}", LD_LIBRARY_PATH="")
    assert said == []


@pytest.mark.parametrize(
    ("version", "name"), [("8601", "TensorRT 8"), ("110100", "TensorRT 11"), ("10701", "TensorRT-RTX 1")]
)
def test_another_tensorrt_is_refused_in_words(loading: Loading, version: str, name: str) -> None:
    plugin = loading.plugins["v3"]
    for way in ("local", "library"):
        commands = f"local {loading.tensorrt} {way} {plugin} creators"
        said = loading.run(commands, FAKE_TENSORRT_VERSION=version)
        assert {"creators": 0, "found": False} in said
        words = [event.get("words") or event.get("stderr") or "" for event in said]
        assert any(f"built for TensorRT 10, the process runs {name}:" in text for text in words)


def test_the_rtx_build_touches_no_registry(loading: Loading) -> None:
    commands = f"local {loading.tensorrt} local {loading.plugins['rtx']} creators"
    assert loading.run(commands, FAKE_TENSORRT_VERSION="10701") == [{"creators": 0, "found": False}]
    commands = f"local {loading.tensorrt} library {loading.plugins['rtx']} creators"
    said = loading.run(commands, FAKE_TENSORRT_VERSION="10701")
    assert said == [
        {"registry": "register", "done": True, "held": 1},
        {"library": True},
        ONE,
    ]


def test_words_go_to_the_logger_of_the_loader(loading: Loading) -> None:
    said = loading.run(f"local {loading.tensorrt} library {loading.plugins['v3']}", FAKE_TENSORRT_VERSION="110100")
    assert any(event.get("log") == 1 for event in said)


@pytest.mark.parametrize("given", list(filter(None, os.environ.get(LIBRARY, "").split(os.pathsep))) or [None])
def test_real_registries(given: str | None, tmp_path: Path) -> None:
    if given is None:
        pytest.skip(f"needs a TensorRT library (the wheel tensorrt-lean-cu12-libs has one) in {LIBRARY}")
    tensorrt, major = Path(given), int(given.rpartition(".")[2])
    folders = [headers(), *map(Path, filter(None, os.environ.get(INCLUDE, "").split(os.pathsep)))]
    fitting = [folder for folder in folders if header_version(folder)[0] == major]
    if not fitting:
        pytest.skip(f"needs the headers of TensorRT {major} in {INCLUDE}")
    plugin = library(tmp_path / "plugin.so", "v3", fitting[0])
    others = [folder for folder in folders if header_version(folder)[0] not in (8, major)]
    program = Loading(host_program("loader", "loader.cpp", fitting[0]), tensorrt, {})
    named = {"LOADER_TENSORRT": tensorrt.name, "LD_LIBRARY_PATH": ""}

    def found(commands: str) -> list[bool]:
        return [event["found"] for event in program.run(commands, **named) if "found" in event]

    for way in ("local", "global"):
        assert found(f"{way} {tensorrt} creators local {plugin} creators") == [False, True]
    assert found(f"local {tensorrt} library {plugin} creators unlibrary creators") == [True, False]
    assert found(f"local {tensorrt} local {plugin} library {plugin} creators unlibrary creators") == [True, False]
    assert found(f"local {plugin} local {tensorrt} creators register {plugin} creators") == [False, True]
    for folder in others:
        wrong = library(tmp_path / "wrong.so", "v3", folder)
        for way in ("local", "library"):
            assert found(f"local {tensorrt} {way} {wrong} creators") == [False]
