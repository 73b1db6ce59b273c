"""The PTX interpreter: each opcode against numpy, threads that part and meet, and the memory errors it must find."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from sparsedeploy.layer import Geometry
from sparsedeploy.plugins.baked.interpret import load, run_launch, run_plan
from sparsedeploy.plugins.baked.memory import GlobalMemory
from sparsedeploy.plugins.baked.threads import InterpretError
from sparsedeploy.plugins.launch import Arg, Launch, Memset, Variant, const, var
from sparsedeploy.plugins.node import Image

U32 = NDArray[np.uint32]
HEAD = ".version 7.8\n.target sm_90\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n"
REGS = """  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .f32 %f<16>;
  ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; ld.param.u32 %r31, [n];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
  mad.lo.u32 %r4, %r2, %r3, %r1; mul.wide.u32 %d3, %r4, 4; add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3;
"""


def program(body: str) -> str:
    """An entry `k(in, out, n)`; %d1 and %d2 point at this thread's word, %r1 is the thread, %r4 the thread in the grid."""
    return f"{HEAD}.visible .entry k(.param .u64 in, .param .u64 out, .param .u32 n)\n{{\n{REGS}{body}\n  ret;\n}}\n"


def run(
    body: str, words: U32, threads: int = 32, blocks: int = 1, shared: int = 0, cluster: int = 1, n: int = 0,
    out_words: int | None = None,
) -> U32:  # fmt: skip
    memory, out = GlobalMemory(), np.full(threads * blocks if out_words is None else out_words, 0xFFFFFFFF, np.uint32)
    arguments = [memory.alloc("in", words), memory.alloc("out", out, writable=True), n]
    launch = Launch("k", (const(blocks), const(1), const(1)), (threads, 1, 1), (), shared, cluster)
    run_launch(program(body), launch, {}, memory, arguments)
    return out


def words(count: int = 32, seed: int = 0) -> U32:
    return np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)


def floats(count: int = 32, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


LOAD = "  ld.global.nc.u32 %r5, [%d1];\n"
STORE = "\n  st.global.u32 [%d2], %r6;"


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32 %r6, %r5, -7;", lambda a: a - np.uint32(7)),
        ("sub.s32 %r6, 5, %r5;", lambda a: np.uint32(5) - a),
        ("mul.lo.u32 %r6, %r5, %r5;", lambda a: a * a),
        ("mul.hi.u32 %r6, %r5, 1000003;", lambda a: (a.astype(np.uint64) * 1000003 >> 32).astype(np.uint32)),
        ("cvt.u64.u32 %d5, %r5; mul.lo.s64 %d5, %d5, 5000000029; mul.hi.u64 %d6, %d5, %d5; cvt.u32.u64 %r6, %d6;",
         lambda a: [(int(v) * 5000000029 % 2**64) ** 2 >> 64 & 0xFFFFFFFF for v in a]),
        ("mad.lo.s32 %r6, %r5, 3, %r1;", lambda a: a * 3 + np.arange(32, dtype=np.uint32)),
        ("div.u32 %r6, %r5, 7;", lambda a: a // 7),
        ("rem.u32 %r6, %r5, 7;", lambda a: a % 7),
        ("div.s32 %r6, %r5, 7;", lambda a: np.trunc(a.view(np.int32) / 7.0).astype(np.int32).view(np.uint32)),
        ("rem.s32 %r6, %r5, -7;", lambda a: np.fmod(a.view(np.int32), np.int32(-7)).view(np.uint32)),
        ("and.b32 %r6, %r5, 255;", lambda a: a & 255),
        ("or.b32 %r6, %r5, 0x80000000;", lambda a: a | 0x80000000),
        ("xor.b32 %r6, %r5, -1;", lambda a: ~a),
        ("not.b32 %r6, %r5;", lambda a: ~a),
        ("shl.b32 %r6, %r5, 33;", lambda a: a * 0),
        ("shl.b32 %r6, %r5, 5;", lambda a: a << 5),
        ("shr.u32 %r6, %r5, 31;", lambda a: a >> 31),
        ("shr.s32 %r6, %r5, 40;", lambda a: (a.view(np.int32) >> 31).view(np.uint32)),
        ("shf.l.wrap.b32 %r6, %r5, %r5, 8;", lambda a: (a << 8) | (a >> 24)),
        ("shf.r.wrap.b32 %r6, %r5, %r5, 8;", lambda a: (a >> 8) | (a << 24)),
        ("bfe.u32 %r6, %r5, 4, 9;", lambda a: (a >> 4) & 511),
        ("bfi.b32 %r6, %r1, %r5, 8, 3;", lambda a: a & ~np.uint32(0x700) | (np.arange(32, dtype=np.uint32) & 7) << 8),
        ("lop3.b32 %r6, %r5, %r1, 12, 0x78;", lambda a: a ^ (np.arange(32, dtype=np.uint32) & 12)),
        ("prmt.b32 %r6, %r5, %r1, 0x4321;", lambda a: (a >> 8) | (np.arange(32, dtype=np.uint32) << 24)),
        ("prmt.b32 %r6, %r5, 0, 0x1032;", lambda a: (a >> 16) | (a << 16)),
        ("min.s32 %r6, %r5, 3;", lambda a: np.minimum(a.view(np.int32), 3).view(np.uint32)),
        ("max.u32 %r6, %r5, 77;", lambda a: np.maximum(a, 77)),
        ("mov.b32 {%h1, %h2}, %r5; mov.b32 %r6, {%h2, %h1};", lambda a: (a >> 16) | (a << 16)),
        ("cvt.u64.u32 %d5, %r5; shr.u64 %d5, %d5, 4; cvt.u32.u64 %r6, %d5;", lambda a: a >> 4),
        ("cvt.s64.s32 %d5, %r5; shr.u64 %d5, %d5, 24; cvt.u32.u64 %r6, %d5;", lambda a: (a.view(np.int32) >> 24).view(np.uint32)),
        ("setp.lt.s32 %p1, %r5, 0; selp.b32 %r6, 1, 2, %p1;", lambda a: np.where(a >> 31, 1, 2)),
        ("setp.hi.u32 %p1|%p2, %r5, 9; selp.b32 %r6, 1, 2, %p2;", lambda a: np.where(a <= 9, 1, 2)),
        ("setp.lt.u32 %p2, %r1, 7; setp.ne.and.u32 %p1, %r1, 3, %p2; selp.b32 %r6, 1, 0, %p1;", lambda a: np.isin(np.arange(32), [0, 1, 2, 4, 5, 6])),
        ("mov.u32 %r6, 4; setp.eq.u32 %p1, %r1, 5; @%p1 mov.u32 %r6, 8;", lambda a: np.where(np.arange(32) == 5, 8, 4)),
        ("mov.u32 %r6, 4; setp.eq.u32 %p1, %r1, 5; @!%p1 add.s32 %r6, %r6, 1;", lambda a: np.where(np.arange(32) == 5, 4, 5)),
    ],
)  # fmt: skip
def test_integer_opcodes(instruction, expected) -> None:  # type: ignore[no-untyped-def]
    data = words()
    with np.errstate(all="ignore"):
        want = np.asarray(expected(data)).astype(np.uint32)
    assert np.array_equal(run(LOAD + instruction + STORE, data), want)


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("fma.rn.f32 %f2, %f1, 0f40490FDB, %f1;", lambda a: (a.astype(np.float64) * np.float32(np.pi) + a).astype(np.float32)),
        ("mul.rn.f32 %f2, %f1, %f1;", lambda a: a * a),
        ("add.f32 %f2, %f1, 0fBF800000;", lambda a: a - 1),
        ("sub.f32 %f2, %f1, %f1;", lambda a: a - a),
        ("max.f32 %f2, %f1, 0f00000000;", lambda a: np.maximum(a, 0)),
        ("min.f32 %f2, %f1, 0f40C00000;", lambda a: np.minimum(a, 6)),
        ("neg.f32 %f2, %f1;", lambda a: -a),
        ("cvt.rn.f16.f32 %h1, %f1; cvt.f32.f16 %f2, %h1;", lambda a: a.astype(np.float16).astype(np.float32)),
        ("cvt.rzi.s32.f32 %r5, %f1; cvt.rn.f32.s32 %f2, %r5;", lambda a: np.trunc(a)),
        ("setp.gt.f32 %p1, %f1, 0f00000000; selp.f32 %f2, %f1, 0f3F000000, %p1;", lambda a: np.where(a > 0, a, np.float32(0.5))),
        ("mov.b32 %r5, %f1; mov.b32 %f2, %r5;", lambda a: a),
    ],
)  # fmt: skip
def test_float_opcodes(instruction, expected) -> None:  # type: ignore[no-untyped-def]
    data = floats()
    got = run(f"  ld.global.f32 %f1, [%d1];\n  {instruction}\n  st.global.f32 [%d2], %f2;", data.view(np.uint32))
    assert np.array_equal(got.view(np.float32), np.asarray(expected(data), np.float32))


def test_float_compare_with_nan() -> None:
    data = np.array([np.nan, 1.0, -1.0] + [0.0] * 29, np.float32)
    body = (
        "ld.global.f32 %f1, [%d1]; max.f32 %f2, %f1, 0f00000000; max.NaN.f32 %f3, %f1, 0f00000000;"
        "setp.neu.f32 %p1, %f1, %f1; setp.ne.f32 %p2, %f1, %f1; setp.nan.f32 %p3, %f1, %f1; mov.u32 %r6, 0;"
        "@%p1 add.s32 %r6, %r6, 1; @%p2 add.s32 %r6, %r6, 2; @%p3 add.s32 %r6, %r6, 4;"
        "setp.nan.f32 %p4, %f2, %f2; @%p4 add.s32 %r6, %r6, 8; setp.nan.f32 %p5, %f3, %f3; @%p5 add.s32 %r6, %r6, 16;"
    )
    assert run(body + STORE, data.view(np.uint32))[:3].tolist() == [1 + 4 + 16, 0, 0]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("fma.rn.f16x2 %r6, %r5, %r7, %r5;", lambda a, b: (a.astype(np.float64) * b + a).astype(np.float16)),
        ("add.rn.f16x2 %r6, %r5, %r7;", lambda a, b: a + b),
        ("mul.f16x2 %r6, %r5, %r7;", lambda a, b: a * b),
        ("max.f16x2 %r6, %r5, %r7;", np.maximum),
        ("fma.rn.f16x2 %r6, %r5, 0x3C003C00, %r7;", lambda a, b: a + b),
    ],
)
def test_half_pairs(instruction, expected) -> None:  # type: ignore[no-untyped-def]
    data = floats(64).astype(np.float16)
    got = run(LOAD + f"xor.b32 %r7, %r5, 0x8000; {instruction}" + STORE, data.view(np.uint32))
    other = data * np.tile(np.array([-1, 1], np.float16), 32)
    assert np.array_equal(got.view(np.float16), expected(data, other))


def test_packing_conversion_takes_high_first() -> None:
    data = floats()
    body = "ld.global.f32 %f1, [%d1]; mov.f32 %f2, 0f3F800000; cvt.rn.f16x2.f32 %r6, %f2, %f1;"
    got = run(body + STORE, data.view(np.uint32)).view(np.float16).reshape(-1, 2)
    assert np.array_equal(got[:, 0], data.astype(np.float16))
    assert (got[:, 1] == 1).all()


def test_vectors_and_halves_in_global_memory() -> None:
    body = """ld.param.u64 %d5, [in]; ld.param.u64 %d6, [out]; mul.wide.u32 %d7, %r1, 16; add.s64 %d5, %d5, %d7;
      add.s64 %d6, %d6, %d7; ld.global.nc.v4.u32 {%r5, %r6, %r7, %r8}, [%d5]; ld.global.u16 %h1, [%d5+2];
      ld.global.s8 %r9, [%d5+1]; st.global.v2.u32 [%d6], {%r8, %r7}; st.global.b16 [%d6+8], %h1;
      st.global.b16 [%d6+10], %r6; st.global.u32 [%d6+12], %r9;"""
    data = words(16)
    rows, got = data.reshape(4, 4), run(body, data, threads=4, out_words=16).reshape(4, 4)
    assert np.array_equal(got[:, 0], rows[:, 3])
    assert np.array_equal(got[:, 1], rows[:, 2])
    assert np.array_equal(got[:, 2], (rows[:, 0] >> 16) | (rows[:, 1] << 16))
    assert np.array_equal(got[:, 3], ((rows[:, 0] << 16).view(np.int32) >> 24).view(np.uint32))


def test_threads_part_and_meet_again() -> None:
    body = """setp.lt.u32 %p1, %r1, 10; @%p1 bra LOW; setp.lt.u32 %p2, %r1, 20; @%p2 bra MID; mov.u32 %r6, 3; bra END;
    LOW: mov.u32 %r6, 1; bra END; MID: mov.u32 %r6, 2; END: add.s32 %r6, %r6, %r1;"""
    t = np.arange(32)
    assert np.array_equal(run(body + STORE, words()), np.where(t < 10, 1, np.where(t < 20, 2, 3)) + t)


def test_loop_of_another_length_in_each_thread() -> None:
    body = """mov.u32 %r6, 0; mov.u32 %r7, 0; LOOP: setp.ge.u32 %p1, %r7, %r4; @%p1 bra DONE; add.s32 %r6, %r6, %r7;
    add.s32 %r7, %r7, 1; bra LOOP; DONE: add.s32 %r6, %r6, 0;"""
    t = np.arange(64)
    assert np.array_equal(run(body + STORE, words(64), blocks=2), t * (t - 1) // 2)


def test_branch_table() -> None:
    body = """and.b32 %r7, %r1, 3; T: .branchtargets A, B, C, B; brx.idx %r7, T; A: mov.u32 %r6, 10; bra E;
    B: mov.u32 %r6, 20; bra E; C: mov.u32 %r6, 30; E: add.s32 %r6, %r6, 0;"""
    assert run(body + STORE, words())[:4].tolist() == [10, 20, 30, 20]


def test_barrier_joins_threads_that_took_other_ways() -> None:
    body = """mov.u32 %r7, smem; shl.b32 %r8, %r1, 2; add.s32 %r8, %r7, %r8; setp.lt.u32 %p1, %r1, 16; @%p1 bra FIRST;
    st.shared.u32 [%r8], 5; bar.sync 0; bra READ; FIRST: st.shared.u32 [%r8], %r1; bar.sync 0;
    READ: xor.b32 %r9, %r1, 31; shl.b32 %r9, %r9, 2; add.s32 %r9, %r7, %r9; ld.shared.u32 %r6, [%r9];"""
    t = 31 - np.arange(32)
    assert np.array_equal(run(body + STORE, words(), shared=128), np.where(t < 16, t, 5))


def test_exited_threads_do_not_hold_a_barrier() -> None:
    body = "setp.ge.u32 %p1, %r1, 16; @%p1 ret; bar.sync 0; mov.u32 %r6, 1;" + STORE
    assert run(body, words()).tolist() == [1] * 16 + [0xFFFFFFFF] * 16


COPY = """mov.u32 %r7, smem; shl.b32 %r8, %r1, 2; add.s32 %r8, %r7, %r8; cp.async.ca.shared.global [%r8], [%d1], 4{fill};
  cp.async.commit_group; {wait} {bar} {read} ld.shared.u32 %r6, [%r8];"""
OTHER = "xor.b32 %r9, %r1, 31; shl.b32 %r9, %r9, 2; add.s32 %r8, %r7, %r9;"


def copy(fill: str = "", wait: str = "cp.async.wait_group 0;", bar: str = "bar.sync 0;", read: str = OTHER) -> str:
    return COPY.format(fill=fill, wait=wait, bar=bar, read=read) + STORE


def test_async_copy_arrives_after_wait_and_barrier() -> None:
    data = words()
    assert np.array_equal(run(copy(), data, shared=128), data[::-1])
    assert np.array_equal(run(copy(wait="cp.async.wait_all;"), data, shared=128), data[::-1])
    assert np.array_equal(run(copy(bar="", read=""), data, shared=128), data)


def test_async_copy_fills_with_zeros_and_reads_nothing_then() -> None:
    body = "setp.lt.u32 %p1, %r1, 8; selp.u32 %r10, 4, 0, %p1; @!%p1 mov.u64 %d1, 0;" + copy(", %r10", read="")
    data = words()
    assert np.array_equal(run(body, data, shared=128), np.where(np.arange(32) < 8, data, 0))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (copy(wait="cp.async.wait_group 1;"), "a cp.async has not been waited for"),
        (copy(wait=""), "a cp.async has not been waited for"),
        (copy(bar=""), "written by another thread with no barrier between"),
        (copy(wait="") .replace("ld.shared", "//"), "not .*subset|waited|reads register"),
        ("mov.u32 %r7, smem; ld.shared.u32 %r6, [%r7+4];" + STORE, "byte 4 of shared memory, which nothing wrote"),
        ("mov.u32 %r7, smem; st.shared.u32 [%r7+128], %r1;", "which has 128 bytes"),
        ("mov.u32 %r7, smem; st.shared.u32 [%r7+2], %r1;", "misaligned"),
        ("mov.u32 %r7, smem; st.shared.u32 [%r7], %r1;", "different values"),
        ("mov.u32 %r7, smem; setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%r7], %r1; setp.eq.u32 %p2, %r1, 1; @%p2 st.shared.u32 [%r7], %r1;",
         "overwrites byte 0 of shared memory, written by another thread"),
        ("mov.u32 %r7, smem; shl.b32 %r8, %r1, 2; add.s32 %r8, %r8, %r7; st.shared.u32 [%r8], %r1; bar.sync 0; setp.eq.u32 %p1, %r1, 3;"
         "setp.eq.u32 %p2, %r1, 4; @%p1 ld.shared.u32 %r6, [%r7]; @%p2 st.shared.u32 [%r7], %r1;",
         "read by another thread with no barrier between"),
        ("ld.global.u32 %r6, [%d1+4];", "4 bytes at byte 128 of in, which has 128 bytes"),
        ("ld.global.u32 %r6, [%d1+-4];", "belongs to no buffer"),
        ("ld.global.u32 %r6, [%d1+2];", "misaligned|which has 128"),
        ("st.global.u32 [%d1], %r1;", "a store to in, which is read-only"),
        ("mov.u64 %d5, 64; ld.global.u32 %r6, [%d5];", "belongs to no buffer"),
        ("ld.param.u64 %d5, [out]; st.global.u32 [%d5], %r1;", "two threads store different values to one address of out"),
        ("add.s32 %r6, %r9, 1;", "reads register %r9, which nothing wrote"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bra OUT; bar.sync 0; OUT: barrier.cluster.wait.acquire.aligned;", "without having arrived"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bra OUT; bar.sync 0; ret; OUT: barrier.cluster.arrive; barrier.cluster.wait;", "waited at for ever|waited for ever|a cluster"),
        ("sin.approx.f32 %f2, %f1;", "not in the interpreted subset"),
        ("fma.rn.ftz.f32 %f2, %f1, %f1, %f1;", r"modifier \.ftz"),
        ("bar.sync 1;", "only barrier 0"),
    ],
)  # fmt: skip
def test_errors_name_the_instruction(body: str, message: str) -> None:
    with pytest.raises(InterpretError, match=message) as error:
        run(body, words(), shared=128)
    assert "line " in str(error.value)


def test_copies_nobody_waits_for_are_an_error() -> None:
    body = "mov.u32 %r7, smem; cp.async.cg.shared.global [%r7], [%d1], 16; cp.async.commit_group;"
    with pytest.raises(InterpretError, match="nothing waited for"):
        run(body, words(4), threads=1, shared=16)


CLUSTER = """mov.u32 %r7, smem; mov.u32 %r10, %cluster_ctarank; shl.b32 %r8, %r1, 2; add.s32 %r8, %r7, %r8;
  xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r12, %r8, %r11; {before}
  st.shared::cluster.u32 [%r12], %r4; {between} ld.shared.u32 %r6, [%r8];"""
SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def test_cluster_blocks_write_each_others_shared_memory() -> None:
    got = run(CLUSTER.format(before=SYNC, between=SYNC) + STORE, words(128), blocks=4, shared=128, cluster=2)
    assert np.array_equal(got, np.arange(128).reshape(2, 2, 32)[:, ::-1].ravel())


def test_cluster_blocks_in_code_of_their_own_meet() -> None:
    body = CLUSTER.format(before=f"setp.eq.u32 %p1, %r10, 0; @%p1 bra A; {SYNC} bra B; A: {SYNC} B: ", between=SYNC)
    got = run(body + STORE, words(128), blocks=4, shared=128, cluster=2)
    assert np.array_equal(got, np.arange(128).reshape(2, 2, 32)[:, ::-1].ravel())


@pytest.mark.parametrize(("before", "between"), [("", SYNC), (SYNC, "bar.sync 0;")])
def test_missing_cluster_barrier_is_an_error(before: str, between: str) -> None:
    body = CLUSTER.format(before=before, between=between).replace(
        "ld.shared.u32 %r6, [%r8]", "ld.shared::cluster.u32 %r6, [%r12]"
    )
    if before:  # the block reads what its neighbour wrote, past a barrier of its own block alone
        body = CLUSTER.format(before=before, between=between)
    else:
        body = "mov.u32 %r7, smem; st.shared.u32 [%r7], 1; bar.sync 0; ld.shared.u32 %r9, [%r7]; " + CLUSTER.format(
            before="", between=SYNC
        )
    with pytest.raises(InterpretError, match=r"no barrier between|nothing wrote"):
        run(body + STORE, words(64), blocks=2, shared=128, cluster=2)


ASYNC = """mov.u32 %r7, smem; mov.u32 %r10, %cluster_ctarank; shl.b32 %r8, %r1, 3; add.s32 %r8, %r7, %r8; add.s32 %r8, %r8, 16;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra MADE;
  mbarrier.init.shared::cta.b64 [%r7], 1; fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r7], {bytes};
MADE: barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
  xor.b32 %r11, %r10, 1; mapa.shared::cluster.u32 %r12, %r8, %r11; mapa.shared::cluster.u32 %r13, %r7, {barrier};
  st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r12], {{%r4, %r1}}, [%r13];
  {wait} ld.shared.u32 %r6, [%r8];"""
WAIT = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r7], 0; @!%p2 bra AGAIN;"


def test_asynchronous_stores_count_themselves_in_at_an_mbarrier() -> None:
    got = run(ASYNC.format(bytes=256, barrier="%r11", wait=WAIT) + STORE, words(128), blocks=4, shared=272, cluster=2)
    assert got.reshape(4, 32).tolist() == np.arange(128).reshape(4, 32)[[1, 0, 3, 2]].tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wait": ""}, "has not been waited for"),
        ({"bytes": 260}, "waited at for ever"),
        ({"barrier": "%r10"}, "stores to another block than its mbarrier's"),
        (
            {"wait": "add.s32 %r7, %r7, 8; " + WAIT},
            "uses byte 8 of shared memory as an mbarrier, which nothing made one",
        ),
        ({"wait": WAIT.replace(", 0;", ", 1;")}, "only the first phase"),
    ],
)
def test_misuse_of_an_mbarrier_is_an_error(given: dict[str, object], message: str) -> None:
    body = ASYNC.format(**{"bytes": 256, "barrier": "%r11", "wait": WAIT, **given})
    with pytest.raises(InterpretError, match=message):
        run(body + STORE, words(64), blocks=2, shared=272, cluster=2)


def test_atomics_give_each_thread_its_turn() -> None:
    body = "ld.param.u64 %d5, [out]; mov.u32 %r9, 3; setp.lt.u32 %p1, %r1, 5; @%p1 atom.global.add.u32 %r6, [%d5+128], %r9; @!%p1 mov.u32 %r6, 0;"
    memory, out = GlobalMemory(), np.zeros(33, np.uint32)
    launch = Launch("k", (const(1), const(1), const(1)), (32, 1, 1), ())
    run_launch(
        program(body + STORE), launch, {}, memory, [memory.alloc("in", words()), memory.alloc("out", out, True), 0]
    )
    assert out[:6].tolist() == [0, 3, 6, 9, 12, 0]
    assert out[32] == 15


def test_chosen_blocks_only() -> None:
    memory, out = GlobalMemory(), np.full(128, 9, np.uint32)
    launch = Launch("k", (const(4), const(1), const(1)), (32, 1, 1), ())
    arguments = [memory.alloc("in", words(128)), memory.alloc("out", out, True), 0]
    run_launch(program("mov.u32 %r6, %ctaid.x;" + STORE), launch, {}, memory, arguments, blocks=[1, 3])
    assert out.reshape(4, 32)[:, 0].tolist() == [9, 1, 9, 3]


def test_undeclared_register_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"line 11.*%zz is not declared"):
        load(program("mov.u32 %r6, %zz;"))


SCALE = f"""{HEAD}.visible .entry double(.param .u64 in, .param .u64 out, .param .u64 ws, .param .u64 c, .param .u32 n)
{{
  .reg .b32 %r<8>; .reg .b64 %d<12>; .reg .f32 %f<8>; .reg .pred %p<2>;
  ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out]; ld.param.u64 %d3, [ws]; ld.param.u64 %d4, [c]; ld.param.u32 %r5, [n];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.ge.u32 %p1, %r2, %r5; @%p1 ret;
  mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1; mul.wide.u32 %d5, %r4, 4;
  add.s64 %d6, %d1, %d5; add.s64 %d7, %d2, %d5; add.s64 %d8, %d3, %d5;
  ld.global.f32 %f1, [%d6]; ld.global.f32 %f2, [%d8]; ld.global.f32 %f3, [%d4+4];
  fma.rn.f32 %f4, %f1, %f3, %f2; st.global.f32 [%d7], %f4;
  ret;
}}
"""


def scale_plan(memset: bool) -> tuple[Variant, ...]:
    clear = (Memset(64, var("N") * (4 * 3 * 25)),) if memset else ()
    args = (Arg("input"), Arg("output"), Arg("workspace", 64), Arg("constant", 0), Arg("N"))
    launch = Launch("double", (var("N") + 1, const(1), const(1)), (75, 1, 1), args)
    return (Variant("fp32", (*clear, launch), var("N") * (4 * 3 * 25) + 64, max_n=4),)


GEOMETRY = Geometry(oc=3, ic=3, kh=1, kw=1, h=5, w=5)
IMAGES = (Image(90, "fp32", "ptx", SCALE.encode()),)


def test_plan_runs_memsets_launches_and_arguments() -> None:
    x = floats(150).reshape(2, 3, 5, 5)
    constants = [np.array([1.0, 3.0], np.float32).view(np.int32)]
    y = run_plan(scale_plan(True), IMAGES, "fp32", x, None, constants, GEOMETRY)
    assert np.array_equal(y, (x.astype(np.float64) * 3).astype(np.float32))


def test_workspace_is_never_zero_by_chance() -> None:
    x = floats(75).reshape(1, 3, 5, 5)
    y = run_plan(scale_plan(False), IMAGES, "fp32", x, None, [np.array([1.0, 3.0], np.float32)], GEOMETRY)
    assert np.isnan(y).all()


def test_plan_says_what_does_not_fit() -> None:
    x = np.zeros((5, 3, 5, 5), np.float32)
    with pytest.raises(ValueError, match="no variant of the plan fits fp32 and N=5"):
        run_plan(scale_plan(True), IMAGES, "fp32", x, None, [], GEOMETRY)
    with pytest.raises(ValueError, match=r"no PTX image for fp32 and sm_53; images are: sm_90 fp32 ptx"):
        run_plan(scale_plan(True), IMAGES, "fp32", x[:1], None, [], GEOMETRY, arch=53)


CUDA = r"""
extern "C" __global__ void __launch_bounds__(64) smooth(const float* __restrict__ x, float* y, int n) {
  extern __shared__ float s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i + blockIdx.x * n];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    float left = i > 0 ? s[i - 1] : 0.f, right = i + 1 < n ? s[i + 1] : 0.f;
    y[i + blockIdx.x * n] = fmaxf(left + 2.f * s[i] + right, 0.f);
  }
}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler wheels exist for Linux only")
@pytest.mark.parametrize("arch", [53, 80, 90])
def test_what_nvrtc_writes_runs_too(arch: int) -> None:
    from sparsedeploy.plugins.assemble import compile_cuda

    n, blocks = 150, 3
    x, y, memory = floats(n * blocks).reshape(blocks, n), np.full((blocks, n), np.nan, np.float32), GlobalMemory()
    launch = Launch("smooth", (const(blocks), const(1), const(1)), (64, 1, 1), (), shared_bytes=4 * n)
    arguments = [memory.alloc("x", x), memory.alloc("y", y, True), n]
    run_launch(compile_cuda(CUDA, arch).data, launch, {}, memory, arguments)
    wide = np.pad(x.astype(np.float64), ((0, 0), (1, 1)))
    assert np.abs(y - np.maximum(wide[:, :-2] + 2 * wide[:, 1:-1] + wide[:, 2:], 0)).max() < 1e-6
