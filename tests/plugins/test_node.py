"""The node's fields: what goes out comes back, and what was damaged is refused by the field's name."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from sparsedeploy.layer import Epilogue, Geometry
from sparsedeploy.plugins.launch import Arg, Launch, Memset, Variant, const, var
from sparsedeploy.plugins.node import FieldValue, Image, SparseConv

PLAN = (
    Variant(
        "fp32",
        (Memset(0, var("N") * 4), Launch("k", (var("OW"), var("OH"), var("N")), (32, 4, 1), (Arg("constant", 2),))),
        workspace=var("N") * 4,
    ),
    Variant("fp16", (Launch("h", (const(1), const(1), const(1)), (1, 1, 1), ()),), min_n=2, max_n=8),
)
IMAGES = (
    Image(53, "fp32", "ptx", b".version 6.4\n.target sm_53\n" * 40),
    Image(90, "fp16", "cubin", bytes(range(256)) * 9),
    Image(90, "fp32", "cubin", b"\x7fELF"),
)
NODE = SparseConv(
    layer="layer1.0.conv1",
    kernel="packed",
    geometry=Geometry(oc=8, ic=12, kh=3, kw=5, h=17, w=19, stride=(2, 1), pads=(0, 1, 2, 3), dilation=(1, 2), group=4),
    epilogue=Epilogue(
        bias=True, activation="clip", slope=0.125, low=-1.5, high=float("inf"), residual="after_activation"
    ),
    precision="fp16",
    constants=(np.arange(5, dtype=np.int32), np.array([-1], np.int32)),
    parameters=(3, -4),
    fixed_hw=False,
    plan=PLAN,
    images=IMAGES,
)
BARE = SparseConv("c", "csr", Geometry(oc=1, ic=1, kh=1, kw=1, h=1, w=1), Epilogue(), "fp32", (np.zeros(1, np.int32),))


@pytest.mark.parametrize("node", [NODE, BARE], ids=["full", "bare"])
def test_fields_come_back(node: SparseConv) -> None:
    again = SparseConv.from_fields(node.fields(), node.constants)
    assert again.same_as(node)
    assert (again.geometry, again.epilogue, again.plan, again.images) == (
        node.geometry, node.epilogue, node.plan, node.images,
    )  # fmt: skip
    assert (again.executable, again.has_residual) == (node is NODE, node is NODE)


@pytest.mark.parametrize("node", [NODE, BARE], ids=["full", "bare"])
def test_no_field_is_empty_and_all_integers_fit(node: SparseConv) -> None:
    for name, value in node.fields().items():
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int8, name
            assert value.size >= 1, name
        elif isinstance(value, tuple):
            assert value, name
            assert all(type(item) is int and -(2**31) <= item < 2**31 for item in value), name
        else:
            assert isinstance(value, (str, int)), name
    assert set(NODE.fields()) == set(BARE.fields())


def test_two_writes_are_the_same() -> None:
    first, second = NODE.fields(), replace(NODE).fields()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_same_as_compares_contents() -> None:
    constants = (NODE.constants[0].copy(), NODE.constants[1])
    assert NODE.same_as(replace(NODE, constants=constants))
    constants[0][2] = 7
    assert not NODE.same_as(replace(NODE, constants=constants))
    assert not NODE.same_as(replace(NODE, constants=NODE.constants[:1]))
    assert not NODE.same_as(replace(NODE, fixed_hw=True))
    assert not NODE.same_as(replace(NODE, images=IMAGES[:2]))


def changed(name: str, at: int, value: int) -> FieldValue:
    """Field `name` of NODE with one integer replaced."""
    numbers = NODE.fields()[name]
    assert isinstance(numbers, tuple)
    return (*numbers[:at], value, *numbers[at + 1 :])


def table(at: int, value: int) -> FieldValue:
    return changed("image_table", at, value)


BLOB = NODE.fields()["images"]
assert isinstance(BLOB, np.ndarray)
DAMAGED = BLOB.copy()
DAMAGED[20] ^= 1

MALFORMED: tuple[tuple[str, FieldValue, str], ...] = (
    ("abi", 2, "abi"),
    ("constants", 3, "constants"),
    ("layer", 7, "layer"),
    ("kernel", (1,), "kernel"),
    ("precision", 2, "precision"),
    ("precision", -1, "precision"),
    ("precision", "fp16", "precision"),
    ("geometry", (1, 2, 3), "geometry"),
    ("geometry", changed("geometry", 0, 0), "geometry"),
    ("geometry", changed("geometry", 6, 0), "geometry"),
    ("geometry", changed("geometry", 9, -1), "geometry"),
    ("geometry", changed("geometry", 14, 0), "geometry"),
    ("geometry", changed("geometry", 14, 3), "geometry"),
    ("fixed_hw", 2, "fixed_hw"),
    ("fixed_hw", "no", "fixed_hw"),
    ("epilogue", (0,), "epilogue"),
    ("epilogue", changed("epilogue", 0, 2), "epilogue"),
    ("epilogue", changed("epilogue", 1, -1), "epilogue"),
    ("epilogue", changed("epilogue", 2, 3), "epilogue"),
    ("parameters", (), "parameters"),
    ("parameters", (5, 1), "parameters"),
    ("parameters", cast(FieldValue, ("2", 1, 1)), "parameters"),
    ("launch_plan", (), "launch_plan"),
    ("launch_plan", (1, 0), "launch_plan"),
    ("launch_plan", (0, 0), "launch_plan"),
    ("image_table", (), "image_table"),
    ("image_table", (9,), "image_table"),
    ("image_table", table(2, 5), "image_table"),
    ("image_table", table(3, -1), "image_table"),
    ("image_table", table(4, 10**6), "images"),
    ("image_table", table(5, len(IMAGES[0].data) - 1), "images"),
    ("image_table", table(5, -1), "image_table"),
    ("image_table", table(14, 10**6), "image_table"),
    ("images", DAMAGED, "images"),
    ("images", BLOB[:-3], "image_table"),
    ("images", np.concatenate([BLOB, BLOB[:1]]), "images"),
    ("images", "text", "images"),
)


@pytest.mark.parametrize(("name", "value", "named"), MALFORMED)
def test_malformed_fields_are_named(name: str, value: FieldValue, named: str) -> None:
    with pytest.raises(ValueError, match=rf"field {named}\b"):
        SparseConv.from_fields({**NODE.fields(), name: value}, NODE.constants)


@pytest.mark.parametrize("name", [name for name in NODE.fields() if not name.startswith("plugin_")])
def test_missing_fields_are_named(name: str) -> None:
    fields = NODE.fields()
    del fields[name]
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        SparseConv.from_fields(fields, NODE.constants)


def test_constants_must_be_as_many_as_the_field_says() -> None:
    with pytest.raises(ValueError, match="field constants says 2, the node has 1"):
        SparseConv.from_fields(NODE.fields(), NODE.constants[:1])
