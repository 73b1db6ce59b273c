"""What a sparse convolution kernel is to the rest of the house. The list of kernels is plugins.KERNELS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparsedeploy.devices import Device
from sparsedeploy.layer import ConvLayer, Precision, Reason
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.record import Record

Floats = NDArray[np.float32]
Config = dict[str, int]
"""A kernel's tuning parameters by name; `{}` is its default."""


class Prediction(Record):
    """A predicted time of one layer with one kernel and configuration on one device."""

    us: float
    bound: str
    """The resource that binds: compute, memory, l2, shared, fetch, launch."""
    source: str
    """Where the efficiency comes from, in words: a paper's table, a measured profile."""


class UnfitWeightsError(ValueError):
    """The weights cannot be carried by this kernel's format (overflow in fp16, ...): the layer must stay dense."""


@dataclass(frozen=True)
class Built:
    """A node and what making it was like."""

    node: SparseConv
    notes: tuple[str, ...] = ()
    """Said to the user: rounding counted, what could not be assembled."""
    record: dict[str, float] = field(default_factory=dict)
    """Sizes and times of the build by name, units in the names (ptx_bytes, assemble_s)."""


@dataclass(frozen=True)
class BuildOptions:
    """What to build a node for."""

    precision: Precision
    batch: int = 1
    archs: tuple[int, ...] = ()
    """Compute capabilities times ten to ship images for."""
    assemble: bool = False
    """Ship cubins besides PTX."""


class Kernel(Protocol):
    """One way to run a pruned convolution. Stateless; a kernel is a module-level instance."""

    name: str
    quick: bool
    """Whether `configs` takes well under a millisecond, so that a plan may ask it at many sparsities."""

    def automatic(self, device: Device) -> bool:
        """Whether a plan may choose this kernel unasked: its speed is published or measured for such a device."""

    def supports(self, layer: ConvLayer, device: Device, precision: Precision) -> Reason | None:
        """None when the layer's geometry and epilogue can run, else why not. Looks at no weight."""

    def configs(
        self, layer: ConvLayer, device: Device, precision: Precision, batch: int
    ) -> tuple[tuple[Config, Prediction], ...]:
        """Configurations for a supported layer, fastest predicted first; at least one."""

    def build(
        self,
        layer: ConvLayer,
        weight: Floats,
        bias: Floats | None,
        device: Device,
        config: Config,
        options: BuildOptions,
    ) -> Built:
        """Make the node. weight is [oc, ic // group, kh, kw], bias [oc]; raises UnfitWeightsError."""

    def unpack(self, node: SparseConv) -> tuple[Floats, Floats | None]:
        """Weight [oc, ic // group, kh, kw] and bias [oc] or None, recovered from what the node carries."""

    def reference(
        self, node: SparseConv, x: NDArray[np.float64], residual: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Output [N, oc, oh, ow] in float64, computed from the node's own format without going through a dense weight."""
