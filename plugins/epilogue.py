"""What follows the sum of one output pixel, in float64: the meaning of `Epilogue` that every kernel must reproduce."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.layer import Epilogue

Array = NDArray[np.float64]


def activate(epilogue: Epilogue, y: Array) -> Array:
    """The activation alone, element by element; NaN stays NaN."""
    if epilogue.activation == "relu":
        return np.maximum(y, 0.0)
    if epilogue.activation == "clip":
        # min after max, as ONNX Clip: with low > high the result is high.
        return np.minimum(np.maximum(y, epilogue.low), epilogue.high)
    if epilogue.activation == "leaky_relu":
        return np.where(y < 0.0, epilogue.slope * y, y)
    return y


def apply(epilogue: Epilogue, y: NDArray[np.floating], residual: NDArray[np.floating] | None = None) -> Array:
    """Residual and activation in the epilogue's order on y [N, oc, oh, ow], whose bias is already added.

    Raises ValueError when the residual is missing, not expected, or of another shape than y: a residual is fused only
    where its shape is proven equal, so nothing here broadcasts.
    """
    sums = y.astype(np.float64)
    if epilogue.residual == "none":
        if residual is not None:
            raise ValueError("a residual was given to an epilogue that adds none")
        return activate(epilogue, sums)
    if residual is None:
        raise ValueError(f"the epilogue adds a residual ({epilogue.residual}) and none was given")
    if residual.shape != y.shape:
        raise ValueError(f"the residual has shape {residual.shape}, the output {y.shape}")
    added = residual.astype(np.float64)
    if epilogue.residual == "before_activation":
        return activate(epilogue, sums + added)
    return activate(epilogue, sums) + added
