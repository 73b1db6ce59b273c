"""The data-driven kernel: what NVRTC makes of direct.cu, run by the interpreter, against float64 on drawn convolutions."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from conv_cases import EPILOGUES, Case, cases, fill, layer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparsedeploy.devices import find
from sparsedeploy.errors import MachineError
from sparsedeploy.layer import Geometry, Precision
from sparsedeploy.plugins import direct, epilogue, kernel_named
from sparsedeploy.plugins.assemble import assemble
from sparsedeploy.plugins.baked.interpret import run_plan
from sparsedeploy.plugins.csr import CSR
from sparsedeploy.plugins.direct import Tiling, choose, with_code
from sparsedeploy.plugins.kernel import BuildOptions, Built, UnfitWeightsError
from sparsedeploy.plugins.launch import choose as choose_variant
from sparsedeploy.plugins.node import SparseConv
from sparsedeploy.plugins.packed import PACKED
from sparsedeploy.plugins.reference import conv2d

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiler wheels exist for Linux only")

DEVICE_OF = {53: find("jetson-nano"), 80: find("a100"), 90: find("h200")}
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11}
SLACK = 8
"""Roundings of the size of the sum of magnitudes: partial sums of mixed signs stay far below it."""


def options(precision: Precision = "fp32", arch: int = 90, batch: int = 1) -> BuildOptions:
    return BuildOptions(precision, batch, (arch,))


def build(name: str, case: Case, how: BuildOptions, tiling: Tiling | None = None) -> SparseConv:
    kernel, device = kernel_named(name), DEVICE_OF[how.archs[0]]
    if tiling is None:
        return kernel.build(case.layer, case.weight, case.bias, device, {}, how).node
    bare = kernel.build(case.layer, case.weight, case.bias, device, {}, replace(how, archs=()))
    places = (PACKED if name == "packed" else CSR).places(bare.node)
    return with_code(bare, cast("direct.Format", name), places, device, how, tiling).node


def run(node: SparseConv, case: Case) -> NDArray[np.float64]:
    x = case.x.astype(np.float32 if node.precision == "fp32" else np.float16)
    return run_plan(node.plan, node.images, node.precision, x, case.residual, node.constants, case.geometry).astype(
        np.float64
    )


def check(node: SparseConv, case: Case) -> None:
    """Each pixel within SLACK roundings of its sum of magnitudes; inputs as the kernel sees them."""
    element = np.float32 if node.precision == "fp32" else np.float16
    weight, bias = kernel_named(node.kernel).unpack(node)
    if node.precision == "fp16":
        weight = weight.astype(np.float16).astype(np.float32)
    x = case.x.astype(element)
    residual = None if case.residual is None else case.residual.astype(element)
    expected = epilogue.apply(case.layer.epilogue, conv2d(x, weight, bias, case.geometry), residual)
    magnitude = conv2d(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias), case.geometry)
    magnitude += 0 if residual is None else np.abs(residual.astype(np.float64))
    error = np.abs(run(node, case) - expected)
    tolerance = SLACK * ROUNDING[node.precision] * magnitude + 1e-7
    assert (error <= tolerance).all(), f"worst at {np.unravel_index(np.argmax(error - tolerance), error.shape)}"


@settings(max_examples=14, derandomize=True, deadline=None)
@given(case=cases(), name=st.sampled_from(["packed", "csr"]), arch=st.sampled_from([53, 80, 90]))
def test_drawn_convolutions_in_fp32(case: Case, name: str, arch: int) -> None:
    check(build(name, case, options("fp32", arch, len(case.x))), case)


@settings(max_examples=8, derandomize=True, deadline=None)
@given(case=cases(), name=st.sampled_from(["packed", "csr"]))
def test_drawn_convolutions_in_fp16(case: Case, name: str) -> None:
    check(build(name, case, options("fp16", 80, len(case.x))), case)


MAP = Geometry(oc=12, ic=10, kh=3, kw=3, h=9, w=8, pads=(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("tiling", "precision"),
    [
        (Tiling(MAP, 1, 2, 3, 8, 1, 2, 2, 4, 2), "fp32"),  # a cluster of 4 ranges of input channels
        (Tiling(MAP, 1, 2, 5, 8, 1, 4, 1, 2, 2), "fp32"),  # several stages in each rank
        (Tiling(MAP, 2, 2, 5, 8, 1, 2, 4, 1, 4), "fp32"),  # images side by side, the last one missing
        (Tiling(MAP, 1, 3, 3, 5, 1, 2, 8, 1, 10), "fp32"),  # column tiles that end inside
        (Tiling(MAP, 1, 2, 2, 8, 2, 2, 4, 1, 3), "fp32"),  # two warps a set
        (Tiling(MAP, 1, 2, 3, 8, 1, 2, 2, 2, 5, "rows"), "fp16"),
        (Tiling(MAP, 1, 2, 5, 8, 1, 2, 4, 2, 5, "images"), "fp16"),
        (Tiling(MAP, 1, 2, 5, 8, 1, 2, 4, 1, 5), "fp16"),  # fp16 data, fp32 sums
    ],
    ids=lambda value: str(value) if isinstance(value, str) else f"{value.splits}x{value.stage}-{value.pairs}",
)
def test_tilings(tiling: Tiling, precision: Precision) -> None:
    case = fill(MAP, EPILOGUES[2], 300, 3, 7)
    check(build("csr", case, options(precision), tiling), case)


@pytest.mark.parametrize(("splits", "version"), [(1, b".version 7.8"), (4, b".version 8.1")])
def test_newer_ptx_is_declared_only_where_clusters_need_it(splits: int, version: bytes) -> None:
    case = fill(MAP, EPILOGUES[0], 100, 1, 7)
    (image,) = build("csr", case, options(), Tiling(MAP, 1, 2, 5, 8, 1, 2, 2, splits, 3)).images
    assert version in image.data


def test_packed_runs_any_height_and_width() -> None:
    case = fill(MAP, EPILOGUES[1], 200, 2, 3)
    node = build("packed", case, options())
    g = MAP.model_copy(update={"h": 13, "w": 11})
    x = np.random.default_rng(0).standard_normal((2, g.ic, g.h, g.w)).astype(np.float32)
    weight, bias = PACKED.unpack(node)
    expected = epilogue.apply(case.layer.epilogue, conv2d(x, weight, bias, g))
    got = run_plan(node.plan, node.images, "fp32", x, None, node.constants, g)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_scaled_weights_are_unscaled_ahead_of_bias_and_residual(precision: Precision) -> None:
    case = fill(MAP, EPILOGUES[2], 300, 2, 7)
    case.weight[...] *= 2.0**-6  # half sums bound the scale
    case.weight[tuple(np.argwhere(case.weight)[0])] = 2.0**-19 * (1 + 2.0**-10)
    node = build("packed", case, options(precision, batch=2))
    assert node.parameters == (10, 5)
    check(node, case)


def test_results_are_equal_from_run_to_run() -> None:
    case = fill(MAP, EPILOGUES[1], 400, 1, 5)
    node = build("csr", case, options(), Tiling(MAP, 1, 2, 3, 8, 1, 2, 2, 4, 2))
    assert np.array_equal(run(node, case), run(node, case))


def test_nan_and_infinity_reach_only_what_their_weights_touch() -> None:
    case = fill(MAP, EPILOGUES[1], 60, 1, 5)
    case.x[0, 4, 4, 4] = np.nan
    case.x[0, 5, 0, 0] = np.inf
    node = build("csr", case, options())
    with np.errstate(invalid="ignore"):
        expected = CSR.reference(node, case.x)
    assert np.array_equal(np.isnan(run(node, case)), np.isnan(expected))


@pytest.mark.parametrize("arch", [53, 75, 80, 86, 87, 89, 90, 120])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_target_assembles_and_keeps_sums_in_registers(arch: int, precision: Precision) -> None:
    case = fill(MAP.model_copy(update={"oc": 64, "ic": 32}), EPILOGUES[4], 1500, 1, 1)
    device = DEVICE_OF.get(arch, find("a100"))
    node = PACKED.build(case.layer, case.weight, case.bias, device, {}, options(precision, arch)).node
    # Some bytes around the division of the prologue are ptxas's choice; a spilled sum would be hundreds.
    assert assemble(node.images[0].data, arch).spill_bytes <= 16


def test_node_with_code_survives_its_fields_and_keeps_its_weights() -> None:
    case = fill(MAP, EPILOGUES[2], 300, 1, 7)
    for kernel in (PACKED, CSR):
        node = kernel.build(case.layer, case.weight, case.bias, DEVICE_OF[80], {}, options("fp32", 80)).node
        bare = kernel.build(case.layer, case.weight, case.bias, DEVICE_OF[80], {}, BuildOptions("fp32")).node
        assert node.executable
        assert not bare.executable
        back = SparseConv.from_fields(node.fields(), node.constants)
        assert back.plan == node.plan
        assert back.images == node.images
        for a, b in zip(kernel.unpack(back), kernel.unpack(bare), strict=True):
            assert a is not None
            assert b is not None
            np.testing.assert_array_equal(a, b)


def test_table_gives_every_nonzero_to_exactly_one_slot() -> None:
    g = Geometry(oc=24, ic=600, kh=1, kw=3, h=5, w=6, pads=(0, 1, 0, 1))
    case = fill(g, EPILOGUES[0], 2000, 1, 9)
    bare = PACKED.build(case.layer, case.weight, None, DEVICE_OF[90], {}, BuildOptions("fp32")).node
    tiling = Tiling(g, 1, 1, 5, 6, 1, 4, 2, 4, 40)
    table, stages, capacity = direct.make_table(tiling, "packed", PACKED.places(bare))
    slot_ints = 2 + 3 * stages
    covered = np.zeros(2000, np.int64)
    for rank in table.reshape(3 * 4, tiling.table_ints(stages)):
        slots = rank[2 * stages :][: 8 * slot_ints].reshape(8, slot_ints)
        assert (np.sort(slots[:, 0]) == np.arange(8)).all()
        assert (rank[2 * stages + 8 * slot_ints :][:8][slots[:, 0]] == slots[:, 1]).all()
        for begin, end, _ in slots[:, 2:].reshape(-1, 3):
            assert 0 <= end - begin <= capacity
            covered[begin:end] += 1
    assert (covered == 1).all()


def test_predictions_rank_tilings_and_no_cluster_is_chosen_for_older_devices() -> None:
    g = Geometry(oc=512, ic=512, kh=3, kw=3, h=7, w=7, pads=(1, 1, 1, 1))
    hopper, guess = choose(g, 235_000, find("h200"), 1, "fp32", clusters=True)
    ampere, _ = choose(g, 235_000, find("a100"), 1, "fp32", clusters=False)
    assert hopper.splits > 1
    assert ampere.splits == 1
    assert 1.5 < guess.us < 20
    assert hopper.shared_bytes(hopper.stages(512), 100) <= 227 * 1024


def test_small_batches_get_an_sm_for_each_block() -> None:
    """A variant of its own asks for over half of the shared memory as long as all blocks run at once."""
    g = Geometry(oc=64, ic=64, kh=3, kw=3, h=14, w=14, pads=(1, 1, 1, 1))
    device, tiling = find("h200"), Tiling(g, 1, 2, 7, 14, 1, 8, 2, 4, 16)  # 4 blocks of channels, clusters of 4
    plan = direct.make_plan(tiling, "csr", EPILOGUES[0], "fp32", 4, 30_000, device)
    assert [(variant.max_n, variant.ops[0].shared_bytes) for variant in plan] == [(7, 117_248), (0, 30_000)]  # type: ignore[union-attr]
    assert 2 * 117_248 > 228 * 1024 > 227 * 1024 > 117_248
    for variant, n in zip(plan, (7, 8), strict=True):
        (launch,) = variant.ops
        assert choose_variant(plan, "fp32", n) is variant
        blocks = np.prod([size.value({"N": n, "OH": 14, "OW": 14}) for size in launch.grid])  # type: ignore[union-attr]
        assert (blocks <= 120) == (n <= 7)
    assert len(direct.make_plan(tiling, "csr", EPILOGUES[0], "fp32", 4, 200_000, device)) == 1
    assert len(direct.make_plan(tiling, "csr", EPILOGUES[0], "fp32", 31, 30_000, device)) == 1
    (alone,) = direct.make_plan(tiling, "csr", EPILOGUES[0], "fp32", 4, 30_000)
    assert not alone.ops[0].dependent  # type: ignore[union-attr]


def test_weights_that_fit_no_tiling_keep_the_layer_dense() -> None:
    g = Geometry(oc=4, ic=64, kh=3, kw=3, h=6, w=6, pads=(1, 1, 1, 1))
    case = fill(g, EPILOGUES[0], 4 * 64 * 9, 1, 2)
    assert CSR.build(case.layer, case.weight, None, DEVICE_OF[53], {}, options("fp32", 53)).node.executable
    tiny = DEVICE_OF[53].model_copy(update={"shared_kb_per_block": 1})
    with pytest.raises(UnfitWeightsError, match="conv3: 2304 nonzero weights at 6x6 do not fit the 1 KB"):
        CSR.build(case.layer, case.weight, None, tiny, {}, options("fp32", 53))


@pytest.mark.parametrize(("channels", "size"), [(64, 56), (512, 7)])
@pytest.mark.parametrize("arch", [53, 80, 90])
def test_resnet_layers_fit_every_device_from_sparse_to_dense(channels: int, size: int, arch: int) -> None:
    g = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
    device = DEVICE_OF[arch]
    for density in (0.02, 0.1, 1.0):
        for n, precision in ((1, "fp32"), (32, "fp16")):
            nnz = int(channels * channels * 9 * density)
            tiling, guess = choose(g, nnz, device, n, cast("Precision", precision), arch >= 90)
            assert guess.us < 1e6
            assert tiling.shared_bytes(tiling.stages(channels), 2) <= device.shared_kb_per_block * 1024


def test_tilings_are_shortlisted_anew_for_other_ceilings_of_a_device() -> None:
    g = Geometry(oc=32, ic=32, kh=3, kw=3, h=14, w=14, pads=(1, 1, 1, 1))
    device = DEVICE_OF[90]
    slower = device.model_copy(update={"bandwidth_gbs": device.bandwidth_gbs / 64})
    for before in (device, slower):
        direct._shortlist(g, before, 32, "fp32", True)
    kept = direct._shortlist(g, slower, 32, "fp32", True)
    direct._SHORTLISTS.clear()
    assert np.array_equal(kept.shape, direct._shortlist(g, slower, 32, "fp32", True).shape)
    assert not np.array_equal(kept.shape, direct._shortlist(g, device, 32, "fp32", True).shape)


def test_prediction_respects_memory_and_grows_with_the_work() -> None:
    g = Geometry(oc=64, ic=64, kh=3, kw=3, h=28, w=28, pads=(1, 1, 1, 1))
    sparse, dense = (fill(g, EPILOGUES[0], nnz, 1, 1).layer for nnz in (1000, 30000))
    for device in DEVICE_OF.values():
        times = [direct.predict(layer, device, "fp32", n).us for n in (1, 32) for layer in (sparse, dense)]
        assert times[0] < times[1] < times[3]
        assert times[0] < times[2] < times[3]
        assert times[2] >= 32 * 2 * 64 * 28 * 28 * 4 / device.bandwidth_gbs / 1e3
    nothing = direct.predict(fill(g, EPILOGUES[0], 0, 1, 1).layer, DEVICE_OF[53], "fp32", 32)
    assert nothing.us < direct.predict(sparse, DEVICE_OF[53], "fp32", 32).us


MEASURED = {  # us on an H200 at 90 %, scripts/lab/NOTES.md: (fp32, fp16)
    (64, 56, 1): (5.1, 4.4), (128, 28, 1): (5.3, 4.7), (256, 14, 1): (5.2, 4.8), (512, 7, 1): (6.0, 5.7),
    (64, 56, 8): (20.4, 13.5), (256, 14, 8): (22.9, 14.1), (64, 56, 32): (77.8, 40.8), (512, 7, 32): (78.8, 51.2),
}  # fmt: skip


@pytest.mark.parametrize(("channels", "size", "n"), MEASURED)
def test_predictions_are_near_what_was_measured(channels: int, size: int, n: int) -> None:
    g = Geometry(oc=channels, ic=channels, kh=3, kw=3, h=size, w=size, pads=(1, 1, 1, 1))
    weight = np.zeros(g.weight_shape, np.float32)
    weight.ravel()[::10] = 1
    layer = layer_of(g, weight)
    for precision, us in zip(("fp32", "fp16"), MEASURED[channels, size, n], strict=True):
        for kernel in (PACKED, CSR):
            ((config, prediction),) = kernel.configs(layer, find("h200"), cast("Precision", precision), n)
            assert config == {}
            assert prediction.us == pytest.approx(us, rel=0.15)
            assert "fitted on an H200" in prediction.source


def test_asking_at_many_sparsities_is_quick() -> None:
    g = Geometry(oc=64, ic=64, kh=3, kw=3, h=14, w=14, pads=(1, 1, 1, 1))
    layers = [fill(g, EPILOGUES[0], nnz, 1, 1).layer for nnz in range(1000, 30000, 500)]
    PACKED.configs(layers[0], find("h200"), "fp32", 1)
    started = time.process_time()
    times = [PACKED.configs(layer, find("h200"), "fp32", 1)[0][1].us for layer in layers]
    assert (time.process_time() - started) / len(layers) < 0.005
    assert times == sorted(times)


def test_node_keeps_weights_alone_where_the_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MachineError("libnvrtc.so.12 was not found")

    monkeypatch.setattr(direct, "compile_cuda", refuse)
    case = fill(MAP, EPILOGUES[0], 30, 1, 7)
    built: Built = CSR.build(case.layer, case.weight, None, DEVICE_OF[80], {}, options("fp32", 80))
    assert not built.node.executable
    assert "weights alone: libnvrtc.so.12 was not found" in built.notes[-1]
    CSR.unpack(built.node)
