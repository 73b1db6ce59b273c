"""Where `tune` measures: a network on a device, any of whose convolutions can be handed to a sparse node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.plugins.kernel import Floats
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.runtime import Feeds, Session


@dataclass(frozen=True)
class Timed:
    """Median of several times of one layer in its place, and half their interquartile range, microseconds."""

    us: float
    spread_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float] | NDArray[np.float64]) -> Timed:
        """Summary of at least one sample."""
        low, middle, high = np.percentile(np.asarray(samples_us, np.float64), (25, 50, 75))
        return cls(float(middle), float(high - low) / 2)

    def with_repeat(self, other: Timed) -> Timed:
        """Two measurements of the same as one: their mean, and a spread that covers the distance between them."""
        spread = max(self.spread_us, other.spread_us, abs(self.us - other.us) / 2)
        return Timed((self.us + other.us) / 2, spread)


class Stage(Protocol):
    """A model at fixed input shapes on one device. Not shared between threads."""

    gpu: str
    """The device's own name."""
    sm: int
    sm_count: int
    versions: dict[str, str]
    feeds: Feeds
    """What its sessions are fed with."""

    def layer_times(self, nodes: Mapping[str, SparseConv], replays: int) -> dict[str, Timed]:
        """Time of every convolution with its epilogue, by layer, in one CUDA graph of the whole network in which the
        layers in `nodes` run sparse and all others dense. Cold code, warm clocks, real activations.
        """

    def error(self, layer: str, node: SparseConv, weight: Floats, bias: Floats | None) -> float:
        """Largest error of the node's output against float64 arithmetic with these weights on what the layer is fed in the
        network, as a share of the largest output; infinity for NaN or a value that was not written.
        """

    def session(self, nodes: Mapping[str, SparseConv]) -> Session:
        """The whole network, these layers sparse, in a CUDA graph; with none, dense in the fastest layout."""

    def ceilings(self) -> dict[str, float]:
        """Rates that this device reaches, measured now, unit in the name; may be empty."""

    def close(self) -> None:
        """Free everything."""
