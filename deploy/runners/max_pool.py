"""MaxPool on the GPU, NCHW or channels last. PyTorch's own also writes 8-byte indices, half again as many bytes as the
pooling moves, and is slower still with channels last.

Straight-line PTX, one thread per output element, every size a constant; the driver assembles it, so no compiler is
needed. Bound by reading the input once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparsedeploy.errors import MachineError
from sparsedeploy.layer import ELEMENT_BYTES, Precision
from sparsedeploy.plugins.host import Call, Driver, cuda_driver

THREADS = 256
LARGEST_WINDOW = 49
"""Elements of a window that are held in registers at once."""


@dataclass(frozen=True)
class Pool:
    """Sizes of one pooling, height before width."""

    input: tuple[int, int]
    output: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    """Above and to the left; what the window reaches beyond the other sides is padding too."""
    dilations: tuple[int, int]
    channels: int = 1
    """How many values of one pixel lie side by side: 1 for NCHW, where each channel is a plane of its own."""


def ptx(pool: Pool, dtype: Precision) -> str:
    """The entry `max_pool(x, y, planes)` (channels last: images) for any GPU from sm_53 on. NaN stays, as it does in PyTorch."""
    return "\n".join(_lines(pool, dtype)) + "\n"


def _lines(pool: Pool, dtype: Precision) -> Iterator[str]:
    (ih, iw), (oh, ow), (kh, kw) = pool.input, pool.output, pool.kernel
    size, window, c = ELEMENT_BYTES[dtype], kh * kw, pool.channels
    yield from (".version 6.4", ".target sm_53", ".address_size 64")
    yield ".visible .entry max_pool(.param .u64 x, .param .u64 y, .param .u32 planes)"
    yield f".maxntid {THREADS}, 1, 1"
    yield "{"
    yield f".reg .pred %out, %more, %inside, %row<{kh}>, %column<{kw}>;"
    yield ".reg .b32 %at, %block, %total, %plane, %pixel, %channel, %oy, %ox, %top, %left, %place, %base;"
    yield f".reg .f32 %best, %f<{window}>;"
    yield f".reg .b16 %h<{window}>, %half;"
    yield ".reg .b64 %x, %y, %far;"
    yield from ("mov.u32 %block, %ctaid.x;", "mov.u32 %at, %tid.x;", f"mad.lo.u32 %at, %block, {THREADS}, %at;")
    yield from ("ld.param.u32 %total, [planes];", f"mul.lo.u32 %total, %total, {oh * ow * c};")
    yield from ("setp.ge.u32 %out, %at, %total;", "@%out ret;")
    yield from (f"div.u32 %plane, %at, {oh * ow * c};", f"rem.u32 %pixel, %at, {oh * ow * c};")
    if c > 1:
        yield from (f"rem.u32 %channel, %pixel, {c};", f"div.u32 %pixel, %pixel, {c};")
    yield from (f"div.u32 %oy, %pixel, {ow};", f"rem.u32 %ox, %pixel, {ow};")
    yield f"mad.lo.s32 %top, %oy, {pool.strides[0]}, {-pool.pads[0]};"
    yield f"mad.lo.s32 %left, %ox, {pool.strides[1]}, {-pool.pads[1]};"
    yield from ("ld.param.u64 %x, [x];", f"mul.wide.u32 %far, %plane, {ih * iw * c * size};", "add.s64 %x, %x, %far;")
    yield f"mad.lo.s32 %base, %top, {iw}, %left;"
    if c > 1:
        yield f"mad.lo.s32 %base, %base, {c}, %channel;"
    yield from (f"mul.wide.s32 %far, %base, {size};", "add.s64 %x, %x, %far;")
    # An unsigned comparison finds places before the first as well as behind the last.
    for ky in range(kh):
        yield from (f"add.s32 %place, %top, {ky * pool.dilations[0]};", f"setp.lt.u32 %row{ky}, %place, {ih};")
    for kx in range(kw):
        yield from (f"add.s32 %place, %left, {kx * pool.dilations[1]};", f"setp.lt.u32 %column{kx}, %place, {iw};")
    for at in range(window):
        ky, kx = divmod(at, kw)
        step = (ky * pool.dilations[0] * iw + kx * pool.dilations[1]) * c * size
        yield f"and.pred %inside, %row{ky}, %column{kx};"
        if dtype == "fp32":
            yield from (f"mov.f32 %f{at}, 0fFF800000;", f"@%inside ld.global.nc.f32 %f{at}, [%x+{step}];")
        else:
            yield from (f"mov.b16 %h{at}, 0xFC00;", f"@%inside ld.global.nc.b16 %h{at}, [%x+{step}];")
    yield "mov.f32 %best, 0fFF800000;"
    for at in range(window):
        if dtype == "fp16":
            yield f"cvt.f32.f16 %f{at}, %h{at};"
        yield from (f"setp.gt.f32 %more, %f{at}, %best;", f"setp.nan.or.f32 %more, %f{at}, %f{at}, %more;")
        yield f"@%more mov.f32 %best, %f{at};"
    yield from ("ld.param.u64 %y, [y];", f"mul.wide.u32 %far, %at, {size};", "add.s64 %y, %y, %far;")
    # Streaming stores: what is written leaves the L2 ahead of the code of layers around it.
    if dtype == "fp32":
        yield "st.global.cs.f32 [%y], %best;"
    else:
        yield from ("cvt.rn.f16.f32 %half, %best;", "st.global.cs.b16 [%y], %half;")
    yield from ("ret;", "}")


class MaxPool:
    """One pooling made ready on one device."""

    def __init__(self, pool: Pool, dtype: Precision, device: int = 0, driver: Driver | None = None) -> None:
        self._driver: Driver = driver or cuda_driver()
        self._driver.activate(device)
        self._module = self._driver.load(ptx(pool, dtype).encode("ascii"))
        self._function = self._driver.function(self._module, "max_pool", 0, 1)
        self._each = pool.output[0] * pool.output[1] * pool.channels

    def launch(self, x: int, y: int, planes: int, stream: int) -> None:
        """Pool `planes` contiguous planes (channels last: images) at address x into y, in stream order. Inputs and outputs must
        be fewer than 2^29.
        """
        grid = (-(-planes * self._each // THREADS), 1, 1)
        values = ((x, 8), (y, 8), (planes, 4))
        call = Call("max_pool", grid, (THREADS, 1, 1), 0, 1, False, values)
        self._driver.launch(self._function, call, stream)

    def close(self) -> None:
        """Unload; graphs captured from it may not be replayed afterwards."""
        self._driver.unload(self._module)


def max_pool(pool: Pool, dtype: Precision, device: int = 0) -> MaxPool | None:
    """Made ready, or None where it does not pay or this driver cannot load it."""
    if pool.kernel[0] * pool.kernel[1] > LARGEST_WINDOW:
        return None
    try:
        return MaxPool(pool, dtype, device)
    except MachineError:
        return None
