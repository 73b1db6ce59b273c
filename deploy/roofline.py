"""The roofline of one convolution: work of the dense, Winograd and sparse forms, time bounds, crossover sparsity.

Model and constants follow "Theoretical and Empirical Analysis of Sparse Convolution" (arXiv 2611.17212), its equations
(4) to (8). What is stated there and what is derived here:

* Stated: 2 FLOPs per multiply-add; activations and stored nonzeros at 4 bytes each (fp32 activations; a nonzero is one
  packed 32-bit word: fp16 value, ic, kx, ky); sparse FLOPs are those of the nonzeros; Winograd does the dense FLOPs
  divided by an operation reduction; ridge points A100 9.75, AGX Orin 25.98, Orin Nano 73.53, Nano 9.22 FLOP/byte.
* Stated twice, differently: the text gives an operation reduction of 1.5 and 2 TB/s for the A100, Table 2 follows from
  2 and 1.5 TB/s. Table 3 follows from 2, 236 GFLOP/s and 25.6 GB/s. `WINOGRAD_REDUCTION` is the tables' 2.
* Derived here: precision, stride, group and any kernel size as parameters; Winograd moving the same bytes as the direct
  form (untransformed weights, which is its lower limit); the closed forms of `crossover` and `gain_limit`.

The printed digits of Tables 1 to 3 were not at hand when this was written, so they are not checked here;
scripts/reproduce_tables.py prints grids from these functions for comparison with the paper.

Every byte is counted once (a perfect cache), the fused epilogue is not counted, and FLOPs include padding, as every
dense runtime counts them. These are bounds: no kernel is faster, most are slower.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from sparsedeploy.devices import Device
from sparsedeploy.layer import ELEMENT_BYTES, Geometry, Precision
from sparsedeploy.record import Record

WINOGRAD_REDUCTION = 2.0
"""Dense over Winograd FLOPs, transforms included, as Tables 2 and 3 of the paper have it. F(2x2, 3x3) without its
transforms is 2.25."""

BYTES_PER_NONZERO = 4
"""One packed word; the same in fp32 and fp16."""

Resource = Literal["compute", "memory", "latency"]


class Work(Record):
    """What one convolution has to do: FLOPs executed and bytes moved to and from DRAM."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP/byte."""
        return self.flops / self.bytes


class Bound(NamedTuple):
    """A time and the resource that sets it: `us, resource = bound_us(...)`."""

    us: float
    resource: Resource


def dense_work(geometry: Geometry, batch: int, precision: Precision) -> Work:
    """Work of the direct dense convolution on `batch` images.

    FLOPs = 2 * oc * (ic / group) * kh * kw * oh * ow * N;
    bytes = e * (ic * h * w + oc * oh * ow) * N + e * oc * (ic / group) * kh * kw, with e bytes per element.
    Raises ValueError when the batch or the output is empty.
    """
    weight_bytes = ELEMENT_BYTES[precision] * _weights(geometry)
    return Work(
        flops=2.0 * geometry.macs * _checked(batch, geometry),
        bytes=_activation_bytes(geometry, batch, precision) + weight_bytes,
    )


def has_winograd(geometry: Geometry) -> bool:
    """Whether the Winograd form applies: 3x3, stride 1, no dilation, one group."""
    return (geometry.kh, geometry.kw, geometry.stride, geometry.dilation, geometry.group) == (3, 3, (1, 1), (1, 1), 1)


def winograd_work(
    geometry: Geometry, batch: int, precision: Precision, reduction: float = WINOGRAD_REDUCTION
) -> Work | None:
    """Work of the Winograd convolution, or None where it does not apply (`has_winograd`).

    FLOPs = dense FLOPs / reduction; bytes as for the direct form. Raises ValueError when reduction is not positive.
    """
    if reduction <= 0:
        raise ValueError(f"operation reduction must be positive, not {reduction}")
    if not has_winograd(geometry):
        return None
    dense = dense_work(geometry, batch, precision)
    return Work(flops=dense.flops / reduction, bytes=dense.bytes)


def sparse_work(
    geometry: Geometry, nnz: float, batch: int, precision: Precision, bytes_per_nonzero: float = BYTES_PER_NONZERO
) -> Work:
    """Work of the sparse convolution of `nnz` stored nonzeros (a fraction is allowed, for curves over sparsity).

    FLOPs = 2 * nnz * oh * ow * N; bytes = e * (ic * h * w + oc * oh * ow) * N + bytes_per_nonzero * nnz. The offsets,
    oc + 1 words, are left out. Raises ValueError when nnz is negative or more than the weight holds, or when the batch
    or the output is empty.
    """
    if not 0 <= nnz <= _weights(geometry):
        raise ValueError(f"nnz must be 0..{_weights(geometry)} for weight {geometry.weight_shape}, not {nnz}")
    return Work(
        flops=2.0 * nnz * _pixels(geometry, batch),
        bytes=_activation_bytes(geometry, batch, precision) + bytes_per_nonzero * nnz,
    )


def bound_us(work: Work, tflops: float, bandwidth_gbs: float) -> Bound:
    """Least time for `work`: max(FLOPs / peak, bytes / bandwidth), microseconds; a tie counts as compute."""
    compute_us = work.flops / (tflops * 1e6)
    memory_us = work.bytes / (bandwidth_gbs * 1e3)
    return Bound(us=max(compute_us, memory_us), resource="compute" if compute_us >= memory_us else "memory")


def dense_us(geometry: Geometry, device: Device, precision: Precision, batch: int) -> Bound:
    """Predicted time of the dense layer: direct FLOPs at the device's dense throughput, never under bytes / bandwidth.

    The throughput stands for whatever dense kernel is best (Winograd, tensor cores), for every layer shape alike; so a
    layer that has neither is predicted faster than it will be, which errs against the sparse kernel. Where the device's
    latency floor is known, small layers take that.
    """
    rate = device.throughput.dense_tflops[precision]
    bound = bound_us(dense_work(geometry, batch, precision), rate, device.bandwidth_gbs)
    fixed, per_term = device.throughput.dense_latency_us.get(precision, (0.0, 0.0))
    floor = fixed + per_term * (geometry.ic // geometry.group) * geometry.kh * geometry.kw
    return bound if bound.us >= floor else Bound(floor, "latency")


def best_dense_bound(
    geometry: Geometry, device: Device, precision: Precision, batch: int, reduction: float = WINOGRAD_REDUCTION
) -> Bound:
    """The lower of the direct and, where it applies, the Winograd bound, both at the device's CUDA-core peak."""
    forms = (dense_work(geometry, batch, precision), winograd_work(geometry, batch, precision, reduction))
    peak = device.peak_tflops(precision)
    return min((bound_us(work, peak, device.bandwidth_gbs) for work in forms if work), key=lambda bound: bound.us)


def crossover(
    geometry: Geometry,
    device: Device,
    precision: Precision,
    batch: int,
    reduction: float = WINOGRAD_REDUCTION,
    bytes_per_nonzero: float = BYTES_PER_NONZERO,
) -> float | None:
    """Sparsity, 0..1, at which the sparse bound equals the best dense bound; above it the sparse bound is lower.

    Both parts of the sparse bound grow with nnz, so the largest nnz within the dense bound T is closed-form,
    nnz = min(T * peak / (2 * oh * ow * N), (T * bandwidth - activation bytes) / bytes_per_nonzero), and the crossover
    is 1 - nnz / weights, 0 where even a weight without zeros is within T. None when not one nonzero is.

    Limits: both forms compute-bound, 1 - 1 / reduction (50 %, whatever the bandwidth); both memory-bound,
    1 - e / bytes_per_nonzero (0 in fp32, 50 % in fp16). Tensor cores are not in these bounds: with them dense is faster
    and the true crossover higher.
    """
    dense_bound_us = best_dense_bound(geometry, device, precision, batch, reduction).us
    by_compute = dense_bound_us * device.peak_tflops(precision) * 1e6 / (2.0 * _pixels(geometry, batch))
    spare_bytes = dense_bound_us * device.bandwidth_gbs * 1e3 - _activation_bytes(geometry, batch, precision)
    nnz = min(by_compute, spare_bytes / bytes_per_nonzero)
    return max(0.0, 1.0 - nnz / _weights(geometry)) if nnz >= 1 else None


def gain_limit(
    geometry: Geometry, device: Device, precision: Precision, batch: int, reduction: float = WINOGRAD_REDUCTION
) -> float:
    """Best dense bound over the sparse bound at no nonzeros: the gain that no sparsity exceeds.

    A sparse kernel still moves the activations, so for a compute-bound dense layer this tends to
    dense intensity / (reduction * ridge point).
    """
    activations_us = _activation_bytes(geometry, batch, precision) / (device.bandwidth_gbs * 1e3)
    return best_dense_bound(geometry, device, precision, batch, reduction).us / activations_us


def _weights(geometry: Geometry) -> int:
    oc, ic, kh, kw = geometry.weight_shape
    return oc * ic * kh * kw


def _checked(batch: int, geometry: Geometry) -> int:
    if batch < 1 or geometry.oh < 1 or geometry.ow < 1:
        raise ValueError(f"nothing to compute: batch {batch}, output {geometry.oh}x{geometry.ow}")
    return batch


def _pixels(geometry: Geometry, batch: int) -> int:
    """Output pixels of one channel, all images."""
    return geometry.oh * geometry.ow * _checked(batch, geometry)


def _activation_bytes(geometry: Geometry, batch: int, precision: Precision) -> int:
    inputs = geometry.ic * geometry.h * geometry.w * _checked(batch, geometry)
    return ELEMENT_BYTES[precision] * (inputs + geometry.oc * _pixels(geometry, batch))


def format_us(us: float) -> str:
    """Microseconds to three digits, whole from 100 on: `0.52`, `15.2`, `1,520`."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
