"""Print the grids of Tables 1 to 3 of arXiv 2611.17212 from this project's roofline, for a reader who has the paper.

The printed digits of the paper were not at hand when this was written, so nothing here is marked right or wrong: the
grids are ours, to be held against the page. Channel counts that differ from the paper's can be given as options.

Crossover sparsity and the limit of the gain are both printed for Tables 2 and 3. By the equations a layer whose dense
and sparse forms are both compute-bound crosses over at 1 - 1 / reduction (50 %) at any bandwidth, while the gain limit
depends on reduction and bandwidth in every cell; so a table that changes with 1.5 or 2 TB/s holds the latter.
A reader who checked Table 3 by hand found 0.1 more in print than the formula gives at (24,24), (24,48) and (32,32); the
last two have one and the same gain limit here, as they must.

    python scripts/reproduce_tables.py [--oc 24,32,48] [--ic 24,32,48] [--reduction 2] [--a100-gbs 1500]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from sparsedeploy.devices import Device, find
from sparsedeploy.layer import Geometry
from sparsedeploy.roofline import WINOGRAD_REDUCTION, crossover, dense_work, gain_limit, sparse_work, winograd_work

BATCH = 32
SIZE = 256
"""Input height and width; the batch and size at which weight bytes hardly count (stated for Table 1)."""

TABLE_1_IC = 32
TABLE_1_OC = (48, 64, 80, 96, 112, 128)
TABLE_1_ZEROS = (90, 92, 94, 96, 98)
A100_CHANNELS = (32, 48, 64, 96, 128)
NANO_CHANNELS = (16, 24, 32, 48, 64)
A100_GBS = 1500.0
"""What Table 2 follows from; the paper's text, the ridge point of 9.75 and devices.py have 2000."""


def layer(oc: int, ic: int) -> Geometry:
    """The tables' layer: 3x3, stride 1, output as large as the input."""
    return Geometry(oc=oc, ic=ic, kh=3, kw=3, h=SIZE, w=SIZE, pads=(1, 1, 1, 1))


def intensity_rows(reduction: float) -> list[list[str]]:
    """Arithmetic intensity per output channel count: direct, Winograd, and sparse at each share of zeros."""
    rows = []
    for oc in TABLE_1_OC:
        geometry = layer(oc, TABLE_1_IC)
        winograd = winograd_work(geometry, BATCH, "fp32", reduction)
        assert winograd is not None
        row = [dense_work(geometry, BATCH, "fp32").intensity, winograd.intensity]
        weights = oc * TABLE_1_IC * 9
        for zeros in TABLE_1_ZEROS:
            nnz = round(weights * (100 - zeros) / 100)
            row.append(sparse_work(geometry, nnz, BATCH, "fp32").intensity)
        rows.append([str(oc), *(f"{value:.2f}" for value in row)])
    return rows


def grid(ocs: Sequence[int], ics: Sequence[int], cell: Callable[[Geometry], str]) -> list[list[str]]:
    """One row per oc, one column per ic."""
    return [[str(oc), *(cell(layer(oc, ic)) for ic in ics)] for oc in ocs]


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, columns right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(f"\n{title}")
    for row in (head, *rows):
        print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def show_device(number: int, device: Device, ocs: Sequence[int], ics: Sequence[int], reduction: float) -> None:
    """Crossover and gain limit on one device."""

    def percent(geometry: Geometry) -> str:
        value = crossover(geometry, device, "fp32", BATCH, reduction)
        return "none" if value is None else f"{100 * value:.1f}"

    def limit(geometry: Geometry) -> str:
        return f"{gain_limit(geometry, device, 'fp32', BATCH, reduction):.2f}"

    machine = (
        f"{device.name}, {device.fp32_tflops * 1e3:g} GFLOP/s, {device.bandwidth_gbs:g} GB/s, "
        f"operation reduction {reduction:g}, N={BATCH}, {SIZE}x{SIZE}"
    )
    head = ["OC\\IC", *(str(ic) for ic in ics)]
    show(f"Table {number}, crossover sparsity in %: {machine}", head, grid(ocs, ics, percent))
    show(f"Table {number}, limit of the gain over the best dense form: {machine}", head, grid(ocs, ics, limit))


def channels(text: str) -> tuple[int, ...]:
    """Parse `24,32,48`."""
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError("channel counts must be positive")
    return values


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description="Print the grids of Tables 1 to 3 of arXiv 2611.17212.")
    parser.add_argument("--oc", type=channels, help="output channels of Tables 2 and 3, as 24,32,48")
    parser.add_argument("--ic", type=channels, help="input channels of Tables 2 and 3")
    parser.add_argument("--reduction", type=float, default=WINOGRAD_REDUCTION, help="Winograd operation reduction")
    parser.add_argument("--a100-gbs", type=float, default=A100_GBS, help="bandwidth of the A100 in Table 2")
    options = parser.parse_args()
    if options.reduction <= 0 or options.a100_gbs <= 0:
        parser.error("--reduction and --a100-gbs must be positive")

    head = ["OC", "direct", "Winograd", *(f"{zeros} %" for zeros in TABLE_1_ZEROS)]
    show(
        f"Table 1, arithmetic intensity in FLOP/byte: IC={TABLE_1_IC}, N={BATCH}, {SIZE}x{SIZE}, fp32; last columns "
        "sparse by share of zeros",
        head,
        intensity_rows(options.reduction),
    )
    a100 = find("a100").model_copy(update={"bandwidth_gbs": options.a100_gbs})
    for number, device, usual in ((2, a100, A100_CHANNELS), (3, find("jetson-nano"), NANO_CHANNELS)):
        show_device(number, device, options.oc or usual, options.ic or usual, options.reduction)
    print("\nThe paper's printed digits were not at hand when this was written: compare with the page.")


if __name__ == "__main__":
    main()
