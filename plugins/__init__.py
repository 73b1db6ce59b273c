"""The sparse convolution: nodes, launch plans, kernels and their weight formats. Knows CUDA, knows no ONNX graph."""

from __future__ import annotations

from sparsedeploy.errors import InputError
from sparsedeploy.plugins.baked import BAKED
from sparsedeploy.plugins.csr import CSR
from sparsedeploy.plugins.kernel import Kernel
from sparsedeploy.plugins.packed import PACKED

KERNELS: tuple[Kernel, ...] = (PACKED, CSR, BAKED)
"""Every kernel at hand, in order of preference where predictions tie."""


def kernel_named(name: str) -> Kernel:
    """The kernel of that name; raises InputError listing the names."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    known = ", ".join(kernel.name for kernel in KERNELS)
    raise InputError(f"kernel {name}: no such kernel. This version has {known}. Choose one of these, or `dense`.")
