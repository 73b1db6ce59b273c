"""Launch plans: expressions, the choice of a variant, and the wire form that the plugin reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedeploy.plugins.launch import (
    VARIABLES,
    Arg,
    Expr,
    Launch,
    Memset,
    Plan,
    Variant,
    as_expr,
    choose,
    const,
    decode,
    encode,
    var,
)

SIZES = {"N": 3, "H": 56, "W": 20, "OH": 28, "OW": 7}
N, OH, OW = var("N"), var("OH"), var("OW")
FEW = Variant(
    "fp32",
    (
        Memset(64, N * 4 * OH),
        Launch(
            "conv_few",
            (OW.ceil_div(32), OH.ceil_div(8), N * 2),
            (32, 8, 1),
            (Arg("input"), Arg("constant", 1), Arg("workspace", 64), Arg("output"), Arg("N"), Arg("H"), Arg("W")),
            shared_bytes=49152,
            cluster=2,
            dependent=True,
        ),
        Launch("sum", (N, const(1), const(1)), (256, 1, 1), (Arg("workspace"), Arg("residual"))),
    ),
    workspace=(N * OH * OW * 4).at_least(256),
    max_n=4,
)
MANY = Variant("fp32", (Launch("conv", (N.at_most(65535), OH, OW), (64, 1, 1), ()),), min_n=3)
HALF = Variant("fp16", (), min_n=2, max_n=2)
PLAN: Plan = (FEW, MANY, HALF)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (const(-7), -7),
        (N + 4, 7),
        (OH - OW, 21),
        (OH * OW * N, 588),
        (OH // 5, 5),
        (OH.ceil_div(5), 6),
        (OH.ceil_div(7), 4),
        (OW.at_least(N * 4), 12),
        (OW.at_most(N * 4), 7),
        ((OH + OW) * (OH - OW) // (N - 1), 367),
        (as_expr(9), 9),
        (var("H") - var("W"), 36),
    ],
)
def test_expressions_evaluate(expression: Expr, value: int) -> None:
    assert expression.value(SIZES) == value


OPERATIONS: tuple[tuple[Callable[[Expr, Expr], Expr], Callable[[int, int], int]], ...] = (
    (lambda a, b: a + b, lambda a, b: a + b),
    (lambda a, b: a - b, lambda a, b: a - b),
    (lambda a, b: a * b, lambda a, b: a * b),
    (lambda a, b: a.at_least(b), max),
    (lambda a, b: a.at_most(b), min),
)
leaves = st.one_of(
    st.integers(-1000, 1000).map(lambda v: (const(v), v)),
    st.sampled_from(VARIABLES).map(lambda name: (var(name), SIZES[name])),
)
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(inner, inner, st.sampled_from(OPERATIONS)).map(
        lambda t: (t[2][0](t[0][0], t[1][0]), t[2][1](t[0][1], t[1][1]))
    ),
    max_leaves=12,
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(tree=trees)
def test_any_expression_evaluates_and_survives_the_wire(tree: tuple[Expr, int]) -> None:
    expression, value = tree
    assert expression.value(SIZES) == value
    plan = (Variant("fp16", (Memset(0, expression),), workspace=expression),)
    assert decode(encode(plan)) == plan


def test_constants_must_fit_int32() -> None:
    assert const(2**31 - 1).value({}) == 2**31 - 1
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="does not fit INT32"):
            const(value)
    with pytest.raises(ValueError, match="does not fit INT32"):
        encode((Variant("fp32", (Memset(2**31, const(4)),)),))


@pytest.mark.parametrize("plan", [(), (HALF,), (MANY,), PLAN])
def test_plans_survive_the_wire(plan: Plan) -> None:
    words = encode(plan)
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert decode(words) == plan


@pytest.mark.parametrize(
    ("dtype", "n", "expected"),
    [
        ("fp32", 1, FEW),
        ("fp32", 4, FEW),  # MANY fits as well: the first one wins
        ("fp32", 5, MANY),
        ("fp32", 10**6, MANY),
        ("fp16", 1, None),
        ("fp16", 2, HALF),
        ("fp16", 3, None),
        ("int8", 1, None),
    ],
)
def test_the_first_variant_that_fits_is_chosen(dtype: str, n: int, expected: Variant | None) -> None:
    assert choose(PLAN, dtype, n) is expected
    assert choose((), dtype, n) is None


def test_every_truncation_is_refused() -> None:
    words = encode(PLAN)
    for length in range(len(words)):
        with pytest.raises(ValueError, match="the launch plan"):
            decode(words[:length])
    with pytest.raises(ValueError, match="left over"):
        decode((*words, 0))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(at=st.integers(0, len(encode(PLAN)) - 1), word=st.sampled_from((-(2**31), -1, 0, 1, 2, 5, 9, 128, 2**31 - 1)))
def test_a_damaged_plan_is_refused_or_reads_as_what_it_says(at: int, word: int) -> None:
    words = list(encode(PLAN))
    words[at] = word
    plan: Plan | None = None
    with contextlib.suppress(ValueError):  # any other exception would be a crash
        plan = decode(tuple(words))
    if plan is None:
        return
    again = list(encode(plan))
    assert len(again) == len(words)
    # Only the yes-or-no `dependent` may read as another word for yes.
    assert [i for i, (a, b) in enumerate(zip(again, words, strict=True)) if a != b] in ([], [at])
    for op in (op for variant in plan for op in variant.ops):
        for size in op.grid if isinstance(op, Launch) else (op.bytes,):
            with contextlib.suppress(ValueError):  # a divisor that became zero
                size.value(SIZES)


def test_a_zero_divisor_is_refused() -> None:
    for quotient in (OH // (N - 3), OH.ceil_div(N - 3)):
        with pytest.raises(ValueError, match="divides by zero"):
            quotient.value(SIZES)
        assert quotient.value({**SIZES, "N": 4}) == 28
    assert ((N - 8) // 2).value(SIZES) == -3  # rounded down, as the plugin must
    assert (N - 8).ceil_div(2).value(SIZES) == -2


@pytest.mark.parametrize(
    "code",
    [(), (0,), (1,), (1, 5), (1, -1), (2,), (0, 1, 2), (0, 1, 0, 1), (9,), (-1,), (0, 1, 0, 2, 2, 2), (0, 1, 2, 0, 1)],
)
def test_expressions_that_cannot_be_evaluated_are_refused(code: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="malformed expression"):
        decode(encode((Variant("fp32", (), workspace=Expr(code)),)))


def test_codes_never_count_from_the_end() -> None:
    for bad in ((1, -1, 1, 0, 2, 0, 0, 0), (1, 2, 1, 0, 2, 0, 0, 0)):
        with pytest.raises(ValueError, match="holds dtype"):
            decode(bad)
    with pytest.raises(ValueError, match="holds op 2"):
        decode((1, 0, 1, 0, 2, 0, 0, 1, 2, 0))
    with pytest.raises(ValueError, match="a list of -1"):
        decode((-1,))
