"""The PTX of a MaxPool assembles for the oldest and the newest device, and one thread of it computes a pooling."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparsedeploy.layer import Precision
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.host import Call
from sparsedeploy.runners.max_pool import LARGEST_WINDOW, THREADS, MaxPool, Pool, max_pool, ptx

POOLS = [
    Pool((112, 112), (56, 56), (3, 3), (2, 2), (1, 1), (1, 1)),
    Pool((9, 7), (5, 3), (2, 3), (2, 2), (0, 0), (1, 1)),
    Pool((8, 8), (6, 8), (3, 3), (1, 1), (0, 2), (2, 1)),
    Pool((9, 7), (5, 4), (3, 3), (2, 2), (1, 1), (1, 1), channels=5),
]


@pytest.mark.parametrize("arch", [53, 90, 120])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("pool", POOLS)
def test_it_assembles(pool: Pool, dtype: Precision, arch: int) -> None:
    usage = assemble(ptx(pool, dtype).encode(), arch).usage["max_pool"]
    assert usage.spill_bytes == 0
    assert usage.registers <= 64


def interpret(text: str, x: NDArray[np.float32], planes: int, outputs: int) -> NDArray[np.float32]:
    """Run every thread of the fp32 text, instruction by instruction, on Python numbers; memory outside x is an error."""
    y = np.full(outputs, np.float32(7e7))
    body = [line.rstrip(";") for line in text.splitlines() if re.match(r"(@|[a-z])", line)]
    for at in range(-(-outputs // THREADS) * THREADS):
        _thread(body, at, x.ravel(), y, planes)
    return y


def _thread(body: list[str], at: int, x: NDArray[np.float32], y: NDArray[np.float32], planes: int) -> None:
    # Addresses: x begins at 0, y at 1 << 40.
    known: dict[str, Any] = {
        "%ctaid.x": at // THREADS,
        "%tid.x": at % THREADS,
        "[x]": 0,
        "[y]": 1 << 40,
        "[planes]": planes,
    }

    def value(word: str) -> Any:
        if word.startswith("0f"):
            return float(np.uint32(int(word[2:], 16)).view(np.float32))
        return known[word] if word in known else int(word)

    for line in body:
        guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        if guard and not known[guard[1:]]:
            continue
        op, _, arguments = rest.partition(" ")
        if op == "ret":
            return
        target, *words = [word.strip() for word in arguments.split(",")]
        kind = op.split(".")[0]
        if kind == "st":
            y[(known[target[1:-1]] - (1 << 40)) // 4] = value(words[0])
        elif kind == "ld" and words[0].startswith("[%x"):
            place = known["%x"] + int(words[0][1:-1].partition("+")[2])
            assert place % 4 == 0 <= place < 4 * x.size
            known[target] = float(x[place // 4])
        else:
            known[target] = _result(op, kind, [value(word) for word in words])


def _result(op: str, kind: str, v: list[Any]) -> Any:
    if kind == "setp":
        unsigned = [number % 2**32 for number in v[:2]] if ".u32" in op else v
        return {
            "setp.ge.u32": lambda: unsigned[0] >= unsigned[1], "setp.lt.u32": lambda: unsigned[0] < unsigned[1],
            "setp.gt.f32": lambda: v[0] > v[1], "setp.nan.or.f32": lambda: v[0] != v[0] or v[1] != v[1] or v[2],
        }[op]()  # fmt: skip
    return {
        "mov": lambda: v[0], "ld": lambda: v[0], "mad": lambda: v[0] * v[1] + v[2], "mul": lambda: v[0] * v[1],
        "add": lambda: v[0] + v[1], "div": lambda: v[0] // v[1], "rem": lambda: v[0] % v[1], "and": lambda: v[0] and v[1],
    }[kind]()  # fmt: skip


@pytest.mark.parametrize("pool", POOLS[1:])
def test_every_thread_computes_its_pixel(pool: Pool) -> None:
    planes, rng = 3, np.random.default_rng(5)
    x = rng.standard_normal((planes, *pool.input, pool.channels)).astype(np.float32)
    x[1, 4, 4] = np.nan
    got = interpret(ptx(pool, "fp32"), x, planes, planes * pool.output[0] * pool.output[1] * pool.channels)
    padded = np.full((planes, 40, 40, pool.channels), -np.inf, np.float32)
    padded[:, pool.pads[0] : pool.pads[0] + pool.input[0], pool.pads[1] : pool.pads[1] + pool.input[1]] = x
    (sh, sw), (dh, dw), (kh, kw), (oh, ow) = pool.strides, pool.dilations, pool.kernel, pool.output
    windows = [
        padded[:, ky * dh : ky * dh + (oh - 1) * sh + 1 : sh, kx * dw : kx * dw + (ow - 1) * sw + 1 : sw]
        for ky in range(kh)
        for kx in range(kw)
    ]
    np.testing.assert_array_equal(got.reshape(planes, oh, ow, pool.channels), np.maximum.reduce(windows))


class Driver:
    """Remembers launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, int]] = []
        self.loaded: list[bytes] = []

    def activate(self, device: int) -> None: ...

    def load(self, image: bytes) -> int:
        self.loaded.append(image)
        return 5

    def unload(self, module: int) -> None:
        self.loaded.pop()

    def function(self, module: int, name: str, shared_bytes: int, cluster: int) -> int:
        assert (module, name) == (5, "max_pool")
        return 6

    def launch(self, function: int, call: Call, stream: int) -> None:
        self.calls.append((call, stream))


def test_a_launch_covers_every_output() -> None:
    driver: Any = Driver()
    made = MaxPool(POOLS[0], "fp32", driver=driver)
    made.launch(1000, 2000, 2, 77)
    ((call, stream),) = driver.calls
    assert call.grid[0] * THREADS >= 2 * 56 * 56 > (call.grid[0] - 1) * THREADS
    assert (call.values, stream) == (((1000, 8), (2000, 8), (2, 4)), 77)
    made.close()
    assert driver.loaded == []


def test_windows_too_large_for_registers_are_left_to_others() -> None:
    side = LARGEST_WINDOW
    assert max_pool(Pool((64, 64), (16, 16), (side, 1), (1, 1), (0, 0), (1, 1)), "fp32") is None  # no driver here
    assert max_pool(Pool((64, 64), (16, 16), (side, 2), (1, 1), (0, 0), (1, 1)), "fp32") is None
