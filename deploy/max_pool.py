"""MaxPool of NCHW planes on the GPU. PyTorch's own also writes 8-byte indices, half again as many bytes as the pooling moves.

One thread per output pixel, sizes as compile-time constants; bound by reading the input once.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsedeploy.errors import SparseDeployError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins.assemble import compile_cuda
from sparsedeploy.plugins.host import Call, Driver, cuda_driver

_THREADS = 256
_SOURCE = r"""
#ifdef HALF
typedef unsigned short element;
__device__ float wide(element bits) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits)); return f; }
__device__ element narrow(float f) { element bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f)); return bits; }
#else
typedef float element;
__device__ float wide(element f) { return f; }
__device__ element narrow(float f) { return f; }
#endif

extern "C" __global__ void __launch_bounds__(256) max_pool(const element* __restrict__ x, element* __restrict__ y, int planes)
{
    const unsigned at = blockIdx.x * 256u + threadIdx.x;
    if (at >= (unsigned)planes * (OH * OW)) return;
    const int plane = at / (OH * OW), pixel = at % (OH * OW);
    const int top = (pixel / OW) * SH - PT, left = (pixel % OW) * SW - PL;
    x += (long long)plane * (IH * IW);
    float best = -1.0f / 0.0f;
#pragma unroll
    for (int ky = 0; ky < KH; ++ky) {
#pragma unroll
        for (int kx = 0; kx < KW; ++kx) {
            const int row = top + ky * DH, column = left + kx * DW;
            if (row >= 0 && row < IH && column >= 0 && column < IW) {
                const float value = wide(x[row * IW + column]);
                if (value > best || value != value) best = value;  // NaN stays, as it does in PyTorch
            }
        }
    }
    y[at] = narrow(best);
}
"""


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

    def defines(self) -> list[str]:
        """As compiler options."""
        names = (("I", self.input), ("O", self.output))
        sizes = {f"{letter}{axis}": size for letter, pair in names for axis, size in zip("HW", pair, strict=True)}
        pairs = (("K", self.kernel), ("S", self.strides), ("D", self.dilations))
        sizes |= {f"{letter}{axis}": size for letter, pair in pairs for axis, size in zip("HW", pair, strict=True)}
        sizes |= {"PT": self.pads[0], "PL": self.pads[1]}
        return [f"-D{name}={size}" for name, size in sizes.items()]


class MaxPool:
    """One pooling made ready on one device."""

    def __init__(self, pool: Pool, dtype: Precision, device: int = 0, driver: Driver | None = None) -> None:
        self._driver: Driver = driver or cuda_driver()
        self._driver.activate(device)
        options = [*pool.defines(), *(["-DHALF"] if dtype == "fp16" else [])]
        image = compile_cuda(_SOURCE, self._driver.capability(device), options, "cubin", "max_pool.cu")
        self._module = self._driver.load(image.data)
        self._function = self._driver.function(self._module, "max_pool", 0, 1)
        self._pixels = pool.output[0] * pool.output[1]

    def launch(self, x: int, y: int, planes: int, stream: int) -> None:
        """Pool `planes` contiguous planes at address x into y, in stream order. Outputs must be fewer than 2^31."""
        grid = (-(-planes * self._pixels // _THREADS), 1, 1)
        values = ((x, 8), (y, 8), (planes, 4))
        call = Call("max_pool", grid, (_THREADS, 1, 1), 0, 1, False, values)
        self._driver.launch(self._function, call, stream)

    def close(self) -> None:
        """Unload; graphs captured from it may not be replayed afterwards."""
        self._driver.unload(self._module)


def max_pool(pool: Pool, dtype: Precision, device: int = 0) -> MaxPool | None:
    """Made ready, or None where it cannot be compiled here (no NVRTC, an architecture it does not know)."""
    try:
        return MaxPool(pool, dtype, device)
    except (SparseDeployError, ValueError):
        return None
