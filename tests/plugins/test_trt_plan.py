"""The plugin's C++ decoders against node.py, launch.py and zlib: same fields, same plans, same numbers, same refusals."""

from __future__ import annotations

import json
import random
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from trt_native import HOST, PLUGIN, compile_native, node_file, write_fields

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.launch import (
    VARIABLES,
    Arg,
    ArgKind,
    Expr,
    Launch,
    Memset,
    Op,
    Plan,
    Variant,
    choose,
    const,
    decode,
    encode,
    var,
)
from sparsedeploy.plugins.node import (
    ABI_VERSION,
    ACTIVATIONS,
    PRECISIONS,
    RESIDUALS,
    FieldValue,
    Image,
    ImageKind,
    SparseConv,
)

SIZES = {"N": 3, "H": 56, "W": 20, "OH": 28, "OW": 7}
KINDS = ("input", "output", "residual", "constant", "workspace", "N", "H", "W")


@pytest.fixture(scope="module")
def dump() -> Path:
    sources = [HOST / "dump.cpp", *(PLUGIN / f"{name}.cpp" for name in ("plan", "params", "inflate"))]
    return compile_native("dump", sources)


def ask(dump: Path, lines: list[str]) -> list[Any]:
    result = subprocess.run([str(dump)], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(lines)
    return answers


def plan_line(words: tuple[int, ...], sizes: dict[str, int], dtype: str = "fp32") -> str:
    return f"plan {' '.join(map(str, words))} ; {' '.join(str(sizes[v]) for v in VARIABLES)} ; {int(dtype == 'fp16')}"


def evaluated(expression: Expr, sizes: dict[str, int]) -> int | str:
    try:
        value = expression.value(sizes)
    except ValueError:
        return "the launch plan divides by zero"
    return value


def said_of(op: Op, sizes: dict[str, int]) -> dict[str, Any]:
    if isinstance(op, Memset):
        return {"offset": op.offset, "bytes": evaluated(op.bytes, sizes)}
    return {
        "entry": op.entry,
        "grid": [evaluated(size, sizes) for size in op.grid],
        "block": list(op.block),
        "shared": op.shared_bytes,
        "cluster": op.cluster,
        "dependent": op.dependent,
        "args": [[KINDS.index(arg.kind), arg.index] for arg in op.args],
    }


def expected(plan: Plan, sizes: dict[str, int], dtype: str) -> dict[str, Any]:
    chosen = choose(plan, dtype, sizes["N"])
    return {
        "chosen": -1 if chosen is None else next(i for i, variant in enumerate(plan) if variant is chosen),
        "variants": [
            {
                "dtype": variant.dtype,
                "min_n": variant.min_n,
                "max_n": variant.max_n,
                "workspace": evaluated(variant.workspace, sizes),
                "ops": [said_of(op, sizes) for op in variant.ops],
            }
            for variant in plan
        ],
    }


def random_expression(rng: random.Random, depth: int = 3) -> Expr:
    """Small enough that 64 bits hold every value: no more than 4 factors of at most 2**12."""
    if depth == 0 or rng.random() < 0.25:
        return var(rng.choice(VARIABLES)) if rng.random() < 0.6 else const(rng.randint(-9, 4096))
    left, right = random_expression(rng, depth - 1), random_expression(rng, depth - 1)
    makers = (
        lambda: left + right,
        lambda: left - right,
        lambda: random_expression(rng, 0) * right,
        lambda: left // right,
        lambda: left.ceil_div(right),
        lambda: left.at_least(right),
        lambda: left.at_most(right),
    )
    return rng.choice(makers)()


def random_plan(rng: random.Random) -> Plan:
    def launch() -> Launch:
        args = tuple(Arg(rng.choice(KINDS), rng.randint(0, 9)) for _ in range(rng.randint(0, 6)))  # type: ignore[arg-type]
        grid = (random_expression(rng), random_expression(rng), random_expression(rng))
        block = (rng.randint(1, 1024), rng.randint(1, 8), 1)
        entry = "".join(rng.choice("abc_09Z$") for _ in range(rng.randint(0, 12)))
        return Launch(entry, grid, block, args, rng.randint(0, 200_000), rng.choice((1, 2, 8)), rng.random() < 0.5)

    def op() -> Op:
        return launch() if rng.random() < 0.7 else Memset(rng.randint(0, 4096), random_expression(rng))

    def variant() -> Variant:
        ops = tuple(op() for _ in range(rng.randint(0, 3)))
        dtype = rng.choice(("fp32", "fp16"))
        return Variant(dtype, ops, random_expression(rng), rng.randint(-1, 4), rng.randint(0, 6))  # type: ignore[arg-type]

    return tuple(variant() for _ in range(rng.randint(0, 4)))


def test_random_plans_decode_and_evaluate_as_in_python(dump: Path) -> None:
    rng = random.Random(4)
    lines, wanted = [], []
    for _ in range(1500):
        plan, dtype = random_plan(rng), rng.choice(("fp32", "fp16"))
        sizes = {name: rng.choice((0, 1, 2, 3, 7, 56, 4096, -5)) for name in VARIABLES}
        lines.append(plan_line(encode(plan), sizes, dtype))
        wanted.append(expected(plan, sizes, dtype))
    assert ask(dump, lines) == wanted


def test_damaged_plans_are_refused_as_in_python(dump: Path) -> None:
    rng = random.Random(5)
    damaged: list[tuple[int, ...]] = [(), (-1,), (2**31 - 1,), (0, 0), (1, 2, 1, 0, 2, 0, 0, 0)]
    while len(damaged) < 3000:
        code = list(encode(random_plan(rng)))
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(code) + 1)
            change = rng.random()
            if change < 0.3 and at < len(code):
                del code[at]
            elif change < 0.5:
                code.insert(at, rng.randint(-2, 9))
            elif at < len(code):
                code[at] = rng.choice((-(2**31), -1, 0, 1, 2, 8, 9, 300, 2**31 - 1))
        damaged.append(tuple(code))
    answers = ask(dump, [plan_line(words, SIZES) for words in damaged])
    refusals = [refusal(words) for words in damaged]
    for words, answer, error in zip(damaged, answers, refusals, strict=True):
        # The first words agree; expressions are printed in full by one and cut by the other.
        assert answer.get("error", "").split("(")[0] == error.split("(")[0], words
    assert 500 < sum(bool(error) for error in refusals) < 2900


def refusal(words: tuple[int, ...]) -> str:
    try:
        decode(words)
    except ValueError as error:
        return str(error)
    return ""


def test_quotients_round_as_python_does_and_overflow_is_refused(dump: Path) -> None:
    pairs = [(7, 2), (-7, 2), (7, -2), (-7, -2), (6, 3), (-6, 3), (0, 5), (5, 0), (1, -3), (-1, 3)]
    grids = [(const(a) // b, const(a).ceil_div(b), const(1)) for a, b in pairs]
    plans: list[Plan] = [(Variant("fp32", (Launch("k", grid, (1, 1, 1), ()),)),) for grid in grids]
    assert ask(dump, [plan_line(encode(plan), SIZES) for plan in plans]) == [
        expected(plan, SIZES, "fp32") for plan in plans
    ]
    huge = const(2**31 - 1) * (2**31 - 1) * 4
    lowest = (const(-(2**31)) * (2**31 - 1) - (2**31 - 1) - 1) * 2  # one power of two below: -2**63
    for expression, words in ((huge, "beyond 64 bits"), (huge - 1, "beyond 64 bits"), (lowest // -1, "beyond 64 bits")):
        (answer,) = ask(dump, [plan_line(encode((Variant("fp32", (), expression),)), SIZES)])
        assert words in answer["variants"][0]["workspace"]


def test_deep_expressions_are_refused_before_they_run(dump: Path) -> None:
    deep = (0, 1) * 70 + (2,) * 69
    answers = ask(dump, [plan_line((1, 0, 1, 0, len(deep), *deep, 0), SIZES)])
    assert answers == [{"error": "the launch plan holds an expression deeper than 64"}]


GEOMETRY = Geometry(oc=6, ic=4, kh=3, kw=2, h=9, w=8, stride=(2, 1), pads=(1, 0, 2, 1), dilation=(1, 2), group=2)
NODE = SparseConv(
    layer='stage "1"\\conv',
    kernel="csr",
    geometry=GEOMETRY,
    epilogue=Epilogue(bias=True, activation="clip", low=-1.5, high=6.0, residual="after_activation"),
    precision="fp16",
    constants=(np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32)),
    parameters=(3, -4),
    fixed_hw=False,
    plan=(
        Variant(
            "fp16",
            (
                Memset(8, var("N") * 4),
                Launch("conv", (var("OW"), const(1), const(1)), (64, 1, 1), (Arg("constant", 1),)),
            ),
            var("N") * 64,
        ),
    ),
    images=(
        Image(53, "fp32", "ptx", b".version 6.4\n" * 400),
        Image(90, "fp16", "cubin", bytes(range(256)) * 9),
        Image(80, "fp16", "ptx", b""),
    ),
)


def test_fields_are_those_of_the_node(dump: Path) -> None:
    (names,) = ask(dump, ["names"])
    types = {"text": 0, "ints": 1, "bytes": 2}
    wanted = []
    for name, value in NODE.fields().items():
        if name in ("plugin_version", "plugin_namespace"):
            continue
        kind = "text" if isinstance(value, str) else "bytes" if isinstance(value, np.ndarray) else "ints"
        lists = ("parameters", "launch_plan", "image_table")
        count = 0 if kind != "ints" or name in lists else 1 if isinstance(value, int) else len(value)
        wanted.append([name, types[kind], count])
    assert names == wanted


def test_node_reads_back(dump: Path, tmp_path: Path) -> None:
    (answer,) = ask(dump, [f"node {node_file(tmp_path / 'node', NODE)}"])
    g = GEOMETRY
    assert answer == {
        "layer": NODE.layer,
        "kernel": "csr",
        "geometry": [g.oc, g.ic, g.kh, g.kw, g.h, g.w, *g.stride, *g.pads, *g.dilation, g.group],
        "fixed_hw": False,
        "residual": True,
        "constants": 2,
        "variants": 1,
        "images": [[image.arch, image.dtype, image.kind, image.data.hex()] for image in NODE.images],
    }


def launching(**changes: Any) -> tuple[int, ...]:
    op = replace(Launch("conv", (const(1),) * 3, (64, 1, 1), ()), **changes)
    return encode((Variant("fp16", (op,)),))


def test_codes_are_those_of_python(dump: Path, tmp_path: Path) -> None:
    """Every choice that node.py knows is read, the next code is refused."""
    epilogues = [(0, len(ACTIVATIONS), 0, 0, 0, 0), (0, 0, len(RESIDUALS), 0, 0, 0)]
    images = [(1, 80, len(PRECISIONS), 0, 4, 4), (1, 80, 0, len(get_args(ImageKind)), 4, 4)]
    cases: list[tuple[str, FieldValue, int]] = [
        ("abi", ABI_VERSION + 1, ABI_VERSION),
        ("precision", len(PRECISIONS), len(PRECISIONS) - 1),
        ("epilogue", epilogues[0], len(ACTIVATIONS) - 1),
        ("epilogue", epilogues[1], len(RESIDUALS) - 1),
        ("image_table", images[0], len(PRECISIONS) - 1),
        ("image_table", images[1], len(get_args(ImageKind)) - 1),
        ("launch_plan", (*launching(args=(Arg("W"),))[:-2], len(get_args(ArgKind)), 0), len(get_args(ArgKind)) - 1),
    ]
    lines = []
    for i, (name, value, _) in enumerate(cases):
        fields = NODE.fields() | {name: value}
        lines.append(f"node {write_fields(tmp_path / str(i), fields)}")
    for (name, _, last), answer in zip(cases, ask(dump, lines), strict=True):
        assert name in answer["error"]
        assert f"{'reads ' if name == 'abi' else '0..'}{last}" in answer["error"]
    last_ones = Epilogue(activation=ACTIVATIONS[-1], residual=RESIDUALS[-1])
    (answer,) = ask(dump, [f"node {node_file(tmp_path / 'last', replace(NODE, epilogue=last_ones))}"])
    assert answer["residual"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("abi", 2, "field abi is 2, this plugin reads 1"),
        ("layer", None, "field layer is missing"),
        ("geometry", (1, 2), "field geometry has 2 integers, needed 15"),
        ("geometry", (0,) * 15, "sizes must be positive"),
        ("precision", 2, "field precision holds the code 2, known are 0..1"),
        ("epilogue", (0, 9, 0, 0, 0, 0), "field epilogue holds the code 9"),
        ("parameters", (5, 1), "field parameters says 5 values and has 1"),
        ("launch_plan", (1, 0), "field launch_plan: the launch plan ends early"),
        ("image_table", (1, 80), "field image_table does not fit field images"),
        ("image_table", (1, 80, 0, 0, 10**9, 4), "is not within field images"),
        ("image_table", (0,), ""),
        ("launch_plan", launching(args=(Arg("constant", 2),)), "takes constant 2, the node has 2"),
        ("launch_plan", launching(block=(0, 1, 1)), "not positive"),
        ("launch_plan", launching(entry=""), "without an entry name"),
        ("launch_plan", launching(args=(Arg("workspace", -4),)), "before the workspace"),
        ("launch_plan", launching(args=(Arg("N"),) * 65), "more than 64 arguments"),
    ],
)
def test_damaged_nodes_are_refused_in_words(
    dump: Path, tmp_path: Path, name: str, value: FieldValue | None, words: str
) -> None:
    fields = NODE.fields()
    if value is None:
        del fields[name]
    else:
        fields[name] = value
    (answer,) = ask(dump, [f"node {write_fields(tmp_path / 'node', fields)}"])
    assert words in answer["error"] if words else "error" not in answer


def test_a_residual_argument_needs_a_residual(dump: Path, tmp_path: Path) -> None:
    fields = replace(NODE, epilogue=Epilogue()).fields() | {"launch_plan": launching(args=(Arg("residual"),))}
    (answer,) = ask(dump, [f"node {write_fields(tmp_path / 'node', fields)}"])
    assert "takes a residual, the node has none" in answer["error"]


def test_inflate_gives_what_zlib_packed(dump: Path) -> None:
    rng = random.Random(6)
    texts = [b"", b"a", b"ab" * 40_000, bytes(rng.randrange(256) for _ in range(70_000)), bytes(300) + b"\xff" * 300]
    texts += [bytes(rng.choice(b"ld.f \n") for _ in range(rng.randrange(5000))) for _ in range(40)]
    lines, wanted = [], []
    for text in texts:
        for level in (0, 1, 9):
            for strategy in (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY, zlib.Z_FIXED, zlib.Z_RLE):
                packer = zlib.compressobj(level, zlib.DEFLATED, 15, 9, strategy)
                lines.append(f"inflate {len(text)} {(packer.compress(text) + packer.flush()).hex()}")
                wanted.append({"bytes": text.hex()})
    assert ask(dump, lines) == wanted


def test_inflate_refuses_what_zlib_refuses(dump: Path) -> None:
    rng = random.Random(7)
    text = bytes(rng.choice(b"mov.b32 {}%r1234567890\n") for _ in range(3000))
    packed = zlib.compress(text, 9)
    damaged = [packed[:cut] for cut in range(0, len(packed), 7)] + [packed + b"\0", b""]
    for _ in range(600):
        copy = bytearray(packed)
        copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        damaged.append(bytes(copy))
    answers = ask(dump, [f"inflate {len(text)} {data.hex()}" for data in damaged])
    accepted = [data for data, answer in zip(damaged, answers, strict=True) if "error" not in answer]
    # What is left are bits that mean nothing: the padding before the checksum, the header's level.
    assert len(accepted) < 10
    assert all(zlib.decompress(data) == text for data in accepted)
    short, long = ask(dump, [f"inflate {len(text) + change} {packed.hex()}" for change in (-1, 1)])
    assert "more bytes than the table says" in short["error"]
    assert "fewer bytes than the table says" in long["error"]
