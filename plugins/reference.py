"""Dense float64 convolution in numpy: what every kernel's result is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Geometry

Array = NDArray[np.float64]


def padded(x: NDArray[np.floating], geometry: Geometry) -> Array:
    """X [N, ic, h, w] with the convolution's zero border, [N, ic, top + h + bottom, left + w + right], float64.

    Raises ValueError when x is not a batch of the geometry's input.
    """
    g = geometry
    if x.ndim != 4 or x.shape[1:] != (g.ic, g.h, g.w):
        raise ValueError(f"the input has shape {x.shape}, needed [N, {g.ic}, {g.h}, {g.w}]")
    top, left, bottom, right = g.pads
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))


def tap(plane: Array, ky: int, kx: int, geometry: Geometry) -> Array:
    """View of what the kernel's tap (ky, kx) reads for every output pixel: [..., oh, ow] of a padded [..., H, W]."""
    (sh, sw), (dh, dw) = geometry.stride, geometry.dilation
    top, left = ky * dh, kx * dw
    return plane[..., top : top + sh * (geometry.oh - 1) + 1 : sh, left : left + sw * (geometry.ow - 1) + 1 : sw]


def conv2d(
    x: NDArray[np.floating], weight: NDArray[np.floating], bias: NDArray[np.floating] | None, geometry: Geometry
) -> Array:
    """Convolution of x [N, ic, h, w] by weight [oc, ic // group, kh, kw] plus bias [oc]; [N, oc, oh, ow], float64.

    One matrix product per tap, so memory stays near that of one input. Raises ValueError when a shape does not fit.
    """
    g = geometry
    if weight.shape != g.weight_shape or (bias is not None and bias.shape != (g.oc,)):
        raise ValueError(f"weight {weight.shape} and bias {getattr(bias, 'shape', None)} do not fit {g.weight_shape}")
    plane = padded(x, g)
    inputs = plane.reshape(len(x), g.group, g.ic // g.group, *plane.shape[2:])
    filters = weight.astype(np.float64).reshape(g.group, g.oc // g.group, g.ic // g.group, g.kh, g.kw)
    y = np.zeros((len(x), g.group, g.oc // g.group, g.oh * g.ow))
    for ky in range(g.kh):
        for kx in range(g.kw):
            y += filters[..., ky, kx] @ tap(inputs, ky, kx, g).reshape(*inputs.shape[:3], -1)
    y = y.reshape(len(x), g.oc, g.oh, g.ow)
    return y if bias is None else y + bias.astype(np.float64)[:, None, None]
