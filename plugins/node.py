"""The SparseConv2d node: every field it carries, in one place. plugins/trt reads the same fields.

Inputs in this order: X, the residual if one is fused, then `constants` (INT32, floats bit-cast). Every field is always
written; none is an empty list or tensor (TensorRT 8.0 retypes those), so "none" is one dummy word.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Activation, Epilogue, Geometry, Precision, ResidualPlace
from sparsedeploy.plugins.launch import Plan, decode, encode

OP_TYPE = "SparseConv2d"
DOMAIN = "trt.plugins"
"""The one domain that ONNX Runtime's TensorRT EP accepts; TensorRT 8 ignores it."""
PLUGIN_VERSION = "1"
PLUGIN_NAMESPACE = ""
ABI_VERSION = 1
"""Raised whenever a field changes its meaning; the plugin refuses any other."""

FieldValue = str | int | tuple[int, ...] | NDArray[np.int8]

ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "clip", "leaky_relu")
RESIDUALS: tuple[ResidualPlace, ...] = ("none", "before_activation", "after_activation")
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")
ImageKind = Literal["ptx", "cubin"]
_KINDS: tuple[ImageKind, ...] = ("ptx", "cubin")


@dataclass(frozen=True)
class Image:
    """Code for one architecture and one activation dtype. `data` is the PTX text or the cubin, not deflated."""

    arch: int
    """Compute capability times ten: 53, 80, 90."""
    dtype: Precision
    kind: ImageKind
    data: bytes


@dataclass(frozen=True)
class SparseConv:
    """What one SparseConv2d node says and carries. Arrays make `==` unusable: compare with `same_as`.

    The epilogue's floats travel as fp32, so they must be fp32 values for a node to come back as it went.
    """

    layer: str
    """Name of the convolution it replaces, used in every message."""
    kernel: str
    """Name of the kernel in plugins.KERNELS that made it."""
    geometry: Geometry
    epilogue: Epilogue
    precision: Precision
    constants: tuple[NDArray[np.int32], ...]
    parameters: tuple[int, ...] = ()
    """Integers whose meaning belongs to the kernel: block sizes, counts."""
    fixed_hw: bool = True
    """Whether the kernel runs only geometry.h x geometry.w."""
    plan: Plan = ()
    """Empty until a kernel can run it: the node then carries weights only."""
    images: tuple[Image, ...] = ()

    @property
    def has_residual(self) -> bool:
        """Whether the node takes a second activation input."""
        return self.epilogue.residual != "none"

    @property
    def executable(self) -> bool:
        """Whether the node carries code and a plan to launch it."""
        return bool(self.plan) and bool(self.images)

    def same_as(self, other: SparseConv) -> bool:
        """Whether both say and carry the same, constants compared by content."""
        alone = replace(self, constants=()), replace(other, constants=())
        return (
            alone[0] == alone[1]
            and len(self.constants) == len(other.constants)
            and all(np.array_equal(a, b) for a, b in zip(self.constants, other.constants, strict=True))
        )

    def fields(self) -> dict[str, FieldValue]:
        """The node's attributes: str, int, tuple of int32, or an INT8 array. Inverse of `from_fields`."""
        deflated = [zlib.compress(image.data, 9) for image in self.images]
        table: list[int] = []
        for image, packed in zip(self.images, deflated, strict=True):
            table += [image.arch, PRECISIONS.index(image.dtype), _KINDS.index(image.kind), len(packed), len(image.data)]
        blob = np.frombuffer(b"".join(deflated) or b"\0", np.int8)
        g, e = self.geometry, self.epilogue
        return {
            "plugin_version": PLUGIN_VERSION,
            "plugin_namespace": PLUGIN_NAMESPACE,
            "abi": ABI_VERSION,
            "layer": self.layer,
            "kernel": self.kernel,
            "precision": PRECISIONS.index(self.precision),
            "geometry": (g.oc, g.ic, g.kh, g.kw, g.h, g.w, *g.stride, *g.pads, *g.dilation, g.group),
            "fixed_hw": int(self.fixed_hw),
            "epilogue": (
                int(e.bias),
                ACTIVATIONS.index(e.activation),
                RESIDUALS.index(e.residual),
                *(_float_bits(value) for value in (e.slope, e.low, e.high)),
            ),
            "constants": len(self.constants),
            "parameters": (len(self.parameters), *self.parameters),
            "launch_plan": encode(self.plan),
            "image_table": (len(self.images), *table),
            "images": blob,
        }

    @classmethod
    def from_fields(cls, fields: dict[str, FieldValue], constants: tuple[NDArray[np.int32], ...]) -> SparseConv:
        """Read a node back; raises ValueError naming the field that is missing, malformed or of another ABI."""
        if fields.get("abi") != ABI_VERSION:
            raise ValueError(f"field abi is {fields.get('abi')}, this version reads {ABI_VERSION}")
        if fields.get("constants") != len(constants):
            raise ValueError(f"field constants says {fields.get('constants')}, the node has {len(constants)}")
        bias, activation, residual, slope, low, high = _ints(fields, "epilogue", 6)
        count, *parameters = _ints(fields, "parameters")
        if count != len(parameters):
            raise ValueError(f"field parameters says {count} values and has {len(parameters)}")
        return cls(
            layer=_text(fields, "layer"),
            kernel=_text(fields, "kernel"),
            geometry=_read_geometry(_ints(fields, "geometry", 15)),
            epilogue=Epilogue(
                bias=_pick((False, True), bias, "epilogue"),
                activation=_pick(ACTIVATIONS, activation, "epilogue"),
                slope=_bits_float(slope),
                low=_bits_float(low),
                high=_bits_float(high),
                residual=_pick(RESIDUALS, residual, "epilogue"),
            ),
            precision=_pick(PRECISIONS, _ints(fields, "precision", 1)[0], "precision"),
            constants=constants,
            parameters=tuple(parameters),
            fixed_hw=_pick((False, True), _ints(fields, "fixed_hw", 1)[0], "fixed_hw"),
            plan=_read_plan(_ints(fields, "launch_plan")),
            images=_read_images(_ints(fields, "image_table"), fields.get("images")),
        )


def _read_geometry(values: tuple[int, ...]) -> Geometry:
    oc, ic, kh, kw, h, w, sh, sw, top, left, bottom, right, dh, dw, group = values
    positive = (oc, ic, kh, kw, h, w, sh, sw, dh, dw, group)
    if min(positive) < 1 or min(top, left, bottom, right) < 0 or oc % group or ic % group:
        raise ValueError(f"field geometry is {values}: sizes must be positive, pads not negative, group a divisor")
    return Geometry(
        oc=oc,
        ic=ic,
        kh=kh,
        kw=kw,
        h=h,
        w=w,
        stride=(sh, sw),
        pads=(top, left, bottom, right),
        dilation=(dh, dw),
        group=group,
    )


def _read_plan(words: tuple[int, ...]) -> Plan:
    try:
        return decode(words)
    except ValueError as error:
        raise ValueError(f"field launch_plan: {error}") from error


def _read_images(table: tuple[int, ...], blob: FieldValue | None) -> tuple[Image, ...]:
    count, *rows = table
    if len(rows) != 5 * count or not isinstance(blob, np.ndarray):
        raise ValueError("field image_table does not fit field images")
    data, at, images = blob.tobytes(), 0, []
    for i in range(count):
        arch, dtype, kind, packed, size = rows[5 * i : 5 * i + 5]
        if packed < 1 or size < 0 or at + packed > len(data):
            raise ValueError(f"field image_table: image {i} of {packed} bytes is not within field images")
        raw = _inflate(data[at : at + packed], size, i)
        images.append(Image(arch, _pick(PRECISIONS, dtype, "image_table"), _pick(_KINDS, kind, "image_table"), raw))
        at += packed
    if images and at != len(data):
        raise ValueError(f"field images has {len(data)} bytes, image_table accounts for {at}")
    return tuple(images)


def _inflate(deflated: bytes, size: int, number: int) -> bytes:
    """One image; inflates no further than the size that the table promises."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(deflated, size + 1)
    except zlib.error as error:
        raise ValueError(f"field images: image {number} does not inflate: {error}") from error
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        raise ValueError(f"field images: image {number} does not inflate to {size} bytes, as image_table says")
    return raw


_T = TypeVar("_T")


def _pick(choices: tuple[_T, ...], code: int, name: str) -> _T:
    """The choice that a field's code stands for; a negative code must not count from the end."""
    if not 0 <= code < len(choices):
        raise ValueError(f"field {name} holds the code {code}, known are 0..{len(choices) - 1}")
    return choices[code]


def _text(fields: dict[str, FieldValue], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"field {name} is {value!r}, needed text")
    return value


def _ints(fields: dict[str, FieldValue], name: str, count: int | None = None) -> tuple[int, ...]:
    """A field of integers: exactly `count` of them, or at least one."""
    value = fields.get(name)
    if isinstance(value, int):
        value = (value,)
    if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
        raise ValueError(f"field {name} is {value!r}, needed integers")
    if len(value) != count if count is not None else not value:
        raise ValueError(f"field {name} has {len(value)} integers, needed {count if count is not None else 'a list'}")
    return value


def _float_bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _bits_float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<i", bits))[0]
    return value
