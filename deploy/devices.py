"""The devices sparsedeploy can plan for. A new device is one row here; images and operator lists derive from it.

Ceilings are the vendor's datasheet numbers unless a source says otherwise. Throughputs are what predictions start
from: published or measured on the named device, or scaled from one by peak rate, and always labelled.
"""

from __future__ import annotations

from sparsedeploy.errors import InputError
from sparsedeploy.layer import Precision
from sparsedeploy.record import Record


class Throughput(Record):
    """How fast convolutions run on a device, as FLOP/s over the whole layer (2 FLOPs per multiply-add).

    dense_tflops counts the direct convolution's FLOPs (a Winograd or tensor-core kernel may exceed the fp32 peak);
    the sparse points count the FLOPs of nonzeros only.
    """

    source: str
    dense_tflops: dict[Precision, float]
    dense_latency_us: dict[Precision, tuple[float, float]] = {}
    """(a, b) where known: a dense kernel takes at least a + b * ic * kh * kw, the length of its innermost sum, however
    small the layer. At batch 1 that, not the arithmetic, is what most layers take."""
    sparse_points: tuple[tuple[float, float], tuple[float, float]]
    """Two points (sparsity, TFLOP/s); between and beyond them time is linear in density."""

    def sparse_tflops(self, sparsity: float) -> float:
        """TFLOP/s of nonzero FLOPs at a sparsity: the line through both points in (density, time per dense FLOP)."""
        (s0, t0), (s1, t1) = self.sparse_points
        d0, d1, density = 1 - s0, 1 - s1, max(1 - sparsity, 1e-9)
        slope = (d0 / t0 - d1 / t1) / (d0 - d1)
        time_per_flop = max(d0 / t0 + slope * (density - d0), density / max(t0, t1), 1e-9)
        return density / time_per_flop


class Device(Record):
    """One target: identity, ceilings, software, and the throughputs that predictions use."""

    name: str
    title: str
    sm: int
    """Compute capability times ten."""
    sm_count: int
    fp32_tflops: float
    """FMA rate on CUDA cores."""
    fp16_tflops: float
    """half2 FMA rate on CUDA cores."""
    bandwidth_gbs: float
    l2_mb: float
    shared_kb_per_block: int
    tensorrt: tuple[str, ...]
    """TensorRT releases that run on it, oldest first; the graph is written for the oldest."""
    max_opset: int | None = None
    """Newest ONNX opset that the oldest of these reads; None: no limit that matters."""
    sparse_24: bool = False
    """Whether tensor cores run 2:4 sparse weights."""
    throughput: Throughput

    def peak_tflops(self, precision: Precision) -> float:
        """CUDA-core FMA peak: what a sparse kernel can reach."""
        return self.fp32_tflops if precision == "fp32" else self.fp16_tflops

    def ridge_point(self, precision: Precision = "fp32") -> float:
        """FLOP/byte at which compute and bandwidth bind alike."""
        return self.peak_tflops(precision) * 1e3 / self.bandwidth_gbs


_PAPER = "arXiv 2611.17212"

_A100_THROUGHPUT = Throughput(
    source=f"published throughputs of {_PAPER} (A100, OC=128); fp16 dense assumed at 40 % of tensor-core peak",
    dense_tflops={"fp32": 25.0, "fp16": 125.0},
    sparse_points=((0.90, 2.4), (0.98, 0.8)),
)


def _scaled(title: str, fp32_tflops: float, fp16_dense_tflops: float) -> Throughput:
    """The A100's published curve scaled by fp32 peak: a guess, and labelled as one."""
    factor = fp32_tflops / 19.5
    (s0, t0), (s1, t1) = _A100_THROUGHPUT.sparse_points
    return Throughput(
        source=f"the A100's published throughputs scaled by fp32 peak to the {title}: nothing measured there",
        dense_tflops={"fp32": 25.0 * factor, "fp16": fp16_dense_tflops},
        sparse_points=((s0, t0 * factor), (s1, t1 * factor)),
    )


_JETSON_NANO = Device(
    name="jetson-nano", title="Jetson Nano (JetPack 4.6)", sm=53, sm_count=1, fp32_tflops=0.236, fp16_tflops=0.472,
    bandwidth_gbs=25.6, l2_mb=0.25, shared_kb_per_block=48, tensorrt=("8.0.1", "8.2.1"), max_opset=13,
    throughput=Throughput(
        source=f"published throughputs of {_PAPER} (Jetson Nano, OC=48); fp16 dense assumed at twice fp32",
        dense_tflops={"fp32": 0.115, "fp16": 0.230},
        sparse_points=((0.90, 0.0125), (0.98, 0.0033)),
    ),
)  # fmt: skip
_A100 = Device(
    name="a100", title="A100 (sm_80)", sm=80, sm_count=108, fp32_tflops=19.5, fp16_tflops=78.0, bandwidth_gbs=2000.0,
    l2_mb=40, shared_kb_per_block=163, tensorrt=("10.3", "11.0", "RTX 1.7.1"), sparse_24=True,
    throughput=_A100_THROUGHPUT,
)  # fmt: skip
_H200 = Device(
    name="h200", title="H200 (sm_90)", sm=90, sm_count=132, fp32_tflops=67.0, fp16_tflops=134.0, bandwidth_gbs=4800.0,
    l2_mb=60, shared_kb_per_block=227, tensorrt=("10.3", "11.0"), sparse_24=True,
    throughput=Throughput(
        source="measured on an H200: cuDNN on 104 layers at N = 1, 8, 32 (fit: a factor 1.2 off in fp32, 1.3 in fp16) and "
        "the paper's kernel on 64->64 3x3 at 56x56, N=32",
        dense_tflops={"fp32": 21.0, "fp16": 373.0},
        dense_latency_us={"fp32": (4.0, 0.022), "fp16": (4.5, 0.0015)},
        sparse_points=((0.90, 2.75), (0.98, 1.33)),
    ),
)  # fmt: skip
_ORIN_NANO = Device(
    name="orin-nano", title="Jetson Orin Nano (sm_87)", sm=87, sm_count=8, fp32_tflops=5.0, fp16_tflops=10.0,
    bandwidth_gbs=68.0, l2_mb=2, shared_kb_per_block=163, tensorrt=("8.6", "10.3"), max_opset=17, sparse_24=True,
    throughput=_scaled("Orin Nano", 5.0, 8.0),
)  # fmt: skip
_AGX_ORIN = Device(
    name="agx-orin", title="Jetson AGX Orin (sm_87)", sm=87, sm_count=16, fp32_tflops=5.32, fp16_tflops=10.64,
    bandwidth_gbs=204.8, l2_mb=4, shared_kb_per_block=163, tensorrt=("8.6", "10.3"), max_opset=17, sparse_24=True,
    throughput=_scaled("AGX Orin", 5.32, 17.0),
)  # fmt: skip


def _rtx(name: str, title: str, sm: int, sm_count: int, fp32: float, fp16: float, gbs: float, l2: float) -> Device:
    return Device(
        name=name, title=f"{title} (sm_{sm})", sm=sm, sm_count=sm_count, fp32_tflops=fp32, fp16_tflops=fp16,
        bandwidth_gbs=gbs, l2_mb=l2, shared_kb_per_block=64 if sm == 75 else 99, tensorrt=("10.3", "11.0", "RTX 1.7.1"),
        sparse_24=sm >= 80, throughput=_scaled(title, fp32, 2 * fp32),
    )  # fmt: skip


DEVICES: tuple[Device, ...] = (
    _JETSON_NANO,
    _A100,
    _ORIN_NANO,
    _AGX_ORIN,
    _H200,
    _rtx("rtx-20", "GeForce RTX 2080 Ti", 75, 68, 13.4, 26.9, 616.0, 5.5),
    _rtx("rtx-30", "GeForce RTX 3090", 86, 82, 35.6, 35.6, 936.0, 6),
    _rtx("rtx-40", "GeForce RTX 4090", 89, 128, 82.6, 82.6, 1008.0, 72),
    _rtx("rtx-50", "GeForce RTX 5090", 120, 170, 104.8, 104.8, 1792.0, 96),
)
DEFAULT = "a100"


def find(name: str) -> Device:
    """The device of that name; raises InputError listing the names."""
    for device in DEVICES:
        if device.name == name.lower():
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise InputError(
        f"--target {name}: no such device. Known: {known}. Choose one of these, or the closest by compute capability."
    )
