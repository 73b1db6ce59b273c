"""ptxas and NVRTC from the wheels: results, errors in full, a cache that many processes may share."""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from sparsedeploy.errors import MachineError
from sparsedeploy.plugins import assemble as module
from sparsedeploy.plugins.assemble import (
    AssembleError,
    assemble,
    assemble_many,
    compile_cuda,
    ptx_version,
    read_usage,
    relabel,
    reproduces,
    tool_version,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiler wheels exist for Linux only")

PTX = """.version {version}
.target sm_{arch}
.address_size 64
.visible .entry one(.param .u64 p)
{{
  .reg .b64 %rd<2>;
  .reg .b32 %r<2>;
  ld.param.u64 %rd1, [p];
  mov.u32 %r1, {value};
  st.global.u32 [%rd1], %r1;
  ret;
}}
"""
CUDA = """extern "C" __global__ void twice(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = 2 * s[63 - threadIdx.x];
}
"""


def ptx(arch: int = 80, value: int = 7) -> bytes:
    return PTX.format(version=ptx_version(arch), arch=arch, value=value).encode()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.CACHE_VARIABLE, str(tmp_path / "cache"))


def entries(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("arch", [53, 75, 80, 86, 87, 89, 90, 120])
def test_every_target_assembles(arch: int) -> None:
    made = assemble(ptx(arch), arch)
    assert made.cubin.startswith(b"\x7fELF")
    assert made.registers >= 2
    assert made.spill_bytes == 0
    assert list(made.usage) == ["one"]


def test_second_assemble_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = assemble(ptx(), 80)
    monkeypatch.setattr(module, "_run_ptxas", lambda *_: pytest.fail("assembled again"))
    assert assemble(ptx(), 80) == first
    assert len(entries(tmp_path)) == 1


def test_key_holds_source_flags_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assemble(ptx(), 80)
    assemble(ptx(value=8), 80)
    assemble(ptx(), 80, ["-O1"])
    monkeypatch.setattr(module, "tool_version", lambda: "ptxas V0")
    assemble(ptx(), 80)
    assert len(entries(tmp_path)) == 4


def test_damaged_entry_is_made_again(tmp_path: Path) -> None:
    first = assemble(ptx(), 80)
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    assert assemble(ptx(), 80).cubin == first.cubin


def test_cache_that_cannot_be_written_costs_only_caching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv(module.CACHE_VARIABLE, str(blocker))
    assert assemble(ptx(), 80).cubin.startswith(b"\x7fELF")


def _assemble_in_process(value: int) -> bytes:
    return assemble(ptx(value=value % 3), 80).cubin


def test_processes_share_the_cache(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as pool:
        cubins = list(pool.map(_assemble_in_process, range(12)))
    assert [cubins[i] == cubins[i % 3] for i in range(12)] == [True] * 12
    assert len(set(cubins)) == 3
    assert sorted(path.name[0] == "." for path in entries(tmp_path)) == [False] * 3


def test_many_keeps_order_and_assembles_equal_jobs_once(tmp_path: Path) -> None:
    jobs = [(ptx(80, value), 80) for value in (1, 2, 1)] + [(ptx(90), 90)]
    made = assemble_many(jobs, workers=2)
    assert [entry.cubin for entry in made] == [assemble(*job).cubin for job in jobs]
    assert len(entries(tmp_path)) == 3


def test_entries_assemble_side_by_side_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, body = ptx(90).split(b".visible", 1)
    text = head + b"".join(
        b".visible" + body.replace(b"entry one", b"entry " + name).replace(b"7;", value + b";")
        for name, value in ((b"one", b"7"), (b"two", b"8"), (b"three", b"9"))
    )
    made = []
    for threads in (1, 3):
        monkeypatch.setattr(module, "_SIDE_BY_SIDE", threads)
        monkeypatch.setattr(module.os, "cpu_count", lambda: 8)
        monkeypatch.setenv(module.CACHE_VARIABLE, str(tmp_path / str(threads)))
        made.append(assemble(text, 90))
    assert made[0].cubin == made[1].cubin
    assert len(made[0].usage) == 3
    assert made[0].usage == made[1].usage


def test_refused_ptx_shows_command_and_log() -> None:
    with pytest.raises(AssembleError) as error:
        assemble(ptx().replace(b"st.global.u32", b"st.nowhere.u32"), 80)
    assert "-arch=sm_80" in str(error.value)
    assert ".nowhere" in str(error.value)
    assert "line 10" in str(error.value)


def test_refused_cuda_shows_options_and_log() -> None:
    with pytest.raises(AssembleError) as error:
        compile_cuda("__global__ void broken( {", 80, ["-DTILE=3"])
    assert "-DTILE=3" in str(error.value)
    assert "error" in str(error.value)


def test_missing_wheel_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"pip install nvidia-cuda-nvcc-cu12==12\.9\.86"):
        module._wheel_file("no_such_package", module.PTXAS_WHEEL, "bin", "ptxas")


def test_cubin_is_reproduced_byte_for_byte() -> None:
    made = assemble(ptx(), 90)
    assert reproduces(ptx(), 90, made.cubin)
    assert not reproduces(ptx(value=9), 90, made.cubin)


@pytest.mark.parametrize(("arch", "version"), [(53, b"6.4"), (80, b"7.0"), (90, b"7.8")])
def test_cuda_becomes_ptx_with_the_oldest_label_that_ptxas_takes(arch: int, version: bytes) -> None:
    made = compile_cuda(CUDA, arch)
    assert b".version " + version in made.data
    assert b".entry twice" in made.data
    assert assemble(made.data, arch).shared_bytes == 256


def test_cuda_becomes_a_cubin_with_its_usage() -> None:
    made = compile_cuda(CUDA, 75, kind="cubin")
    assert made.data.startswith(b"\x7fELF")
    assert made.usage["twice"].shared_bytes == 256


def test_relabel_wants_one_version_line() -> None:
    with pytest.raises(ValueError, match=r"0 \.version lines"):
        relabel(b".target sm_53\n", "6.4")


def test_usage_is_read_per_entry() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90'
ptxas info    : Function properties for a
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'b' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers
"""
    usage = read_usage(log)
    assert (usage["a"].registers, usage["a"].spill_bytes, usage["a"].stack_bytes, usage["a"].shared_bytes) == (
        40,
        20,
        16,
        1024,
    )
    assert (usage["b"].registers, usage["b"].spill_bytes, usage["b"].shared_bytes) == (12, 0, 0)


def test_version_is_the_pinned_one() -> None:
    assert tool_version() == f"ptxas V{module.PINNED}"
