"""Kernels built in processes of their own: right answers in order, and none that outlives its budget."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from small_models import sparse_weight

from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Epilogue, Geometry
from sparsedeploy.measure.candidate_build import Builders, Job, Option, Search, _Cores, _different, build_one, search
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.kernel import BuildOptions, Prediction
from sparsedeploy.reading import count_zeros

NANO = find("jetson-nano")


def job(kernel: str = "csr", channels: int = 8, scale: float = 1.0, archs: tuple[int, ...] = (53,)) -> Job:
    """An fp32 layer, or one of fp16 sums where `scale` is large: such weights overflow them."""
    weight = sparse_weight((channels, channels, 3, 3)) * np.float32(scale)
    layer = ConvLayer(
        name=f"{kernel}{channels}", weight="w", dtype="fp32", shape=weight.shape, zeros=count_zeros(weight, 1), epilogue=Epilogue(),
        geometry=Geometry(oc=channels, ic=channels, kh=3, kw=3, h=8, w=8, pads=(1, 1, 1, 1)),
    )  # fmt: skip
    return Job(
        layer, weight, None, kernel, {}, NANO, BuildOptions("fp16" if scale > 1 else "fp32", 1, archs, assemble=False)
    )


def test_a_kernel_is_built() -> None:
    made = build_one(job("baked"))
    assert made.built is not None
    assert made.built.node.executable
    assert made.why == ""


def test_what_cannot_be_is_an_answer() -> None:
    assert "cannot carry the weights" in build_one(job("baked", scale=1e6)).why
    assert "has no code" in build_one(job("csr", archs=())).why
    assert "was not built" in build_one(replace(job("baked"), config={"wrong": 1})).why


def test_search_offers_every_kernel_asked_for() -> None:
    layer = job(channels=16).layer
    options = search(Search(layer, NANO, "fp32", 1, 2))
    assert {option.kernel for option in options} == {kernel.name for kernel in KERNELS}
    assert max([option.kernel for option in options].count(kernel.name) for kernel in KERNELS) <= 2
    assert {option.kernel for option in search(Search(layer, NANO, "fp32", 1, 3, ("csr",)))} == {"csr"}


def test_search_leaves_out_what_is_predicted_hopelessly_slow() -> None:
    layer = job(channels=16).layer
    every = search(Search(layer, NANO, "fp32", 1, 2))
    best = min(option.prediction.us for option in every)
    kept = search(Search(layer, NANO, "fp32", 1, 2, hopeless=1.5))
    assert kept == tuple(option for option in every if option.prediction.us <= 1.5 * best)
    assert 0 < len(kept) < len(every)


def test_candidates_that_are_all_but_the_same_are_one() -> None:
    def option(**config: int) -> Option:
        return Option("baked", config, Prediction(us=1.0, bound="compute", source="model"))

    first, same, other, third = option(c=64, p=767), option(c=64, p=768), option(c=32, p=768), option(c=16, p=768)
    assert _different([first, same, other, third], 2) == [first, other]
    assert _different([first, same], 2) == [first]
    assert _different([option(), option()], 2) == [option()]


def test_workers_answer_in_order_what_this_process_would() -> None:
    jobs = [job("baked", 8), job("baked", 24), job("baked", 8, 1e6), job("baked", 16)]
    with Builders(60.0, workers=2) as builders:
        made = builders.build(jobs)
        found = builders.search([Search(jobs[0].layer, NANO, "fp32", 1, 2)])
    assert [each.built is not None for each in made] == [True, True, False, True]
    for each, asked in zip(made, jobs, strict=True):
        here = build_one(asked)
        assert each.why == here.why
        if each.built and here.built:
            assert each.built.node.same_as(here.built.node)
    assert found == [search(Search(jobs[0].layer, NANO, "fp32", 1, 2))]


def test_a_budget_ends_a_build_and_the_next_one_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.perf_counter()
    with Builders(0.05, workers=1) as builders:  # less than a worker takes to start
        (made,) = builders.build([job("baked", 16)])
        assert made.why == "was not compiled within 0.05 s"
        assert made.built is None
        builders.budget_s = 60.0
        (made,) = builders.build([job("baked", 8)])
        assert made.built is not None
        pids = [worker.process.pid for worker in builders._all]
    assert time.perf_counter() - started < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_budget_is_refused_and_nothing_is_nothing() -> None:
    with pytest.raises(InputError, match="must be positive"):
        Builders(0.0)
    with Builders(1.0) as builders:
        assert builders.build([]) == []
        assert builders.search([]) == []


def test_a_job_takes_as_many_cores_as_it_is_compiled_in_parts() -> None:
    def cores(nnz: int, kernel: str = "baked", **config: int) -> int:
        asked = job()
        assert asked.layer.zeros is not None
        zeros = asked.layer.zeros.model_copy(update={"nnz": nnz})
        return replace(asked, kernel=kernel, config=config, layer=asked.layer.model_copy(update={"zeros": zeros})).cores

    assert [cores(nnz) for nnz in (1000, 80_000, 100_000, 170_000, 240_000, 400_000)] == [1, 1, 2, 3, 4, 4]
    assert (cores(240_000, "csr"), cores(240_000, parts=1), cores(60_000, rows=2)) == (1, 1, 2)


def test_no_more_is_begun_than_there_are_cores() -> None:
    cores, most, order = _Cores(4), [0], []

    def hold(number: int, wanted: int) -> None:
        with cores.held(wanted):
            order.append(number)
            most[0] = max(most[0], cores.count - cores.free)
            assert cores.free >= 0
            time.sleep(0.01)

    wanted = [4, 3, 2, 1, 9, 1, 1, 1, 1]
    threads = [threading.Thread(target=hold, args=each) for each in enumerate(wanted)]
    for thread in threads:
        thread.start()
        time.sleep(0.002)
    for thread in threads:
        thread.join(10)
    assert order == list(range(len(wanted)))  # a large one is not overtaken for ever
    assert (most[0], cores.free) == (4, 4)
