"""What was measured on one device, as a file: `tune --save-profile` makes it, `scan` and `convert --profile` plan with it.

A point is one layer shape timed in place inside a network (how: `DeviceProfile.conditions`). Planning takes a measured
point where there is one of the layer's shape, precision and batch, a line through two of them in nonzeros between and
beyond, and the cost model times the fitted factor of this device elsewhere; `Prediction.source` says which.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsedeploy.devices import Device
from sparsedeploy.errors import InputError
from sparsedeploy.layer import ConvLayer, Geometry, Precision
from sparsedeploy.plugins import KERNELS
from sparsedeploy.plugins.kernel import Config, Prediction
from sparsedeploy.record import Document, Record
from sparsedeploy.roofline import Bound

DENSE = "dense"
ARITHMETICS = ("fp32", "tf32", "fp16")
SAME_NNZ = 0.02
"""Counts of nonzeros this close, as a share, are one point: seeds differ by more."""
NEAR_NNZ = 0.15
"""How far, as a share, a single point reaches in nonzeros before the cost model is trusted more."""


class DensePoint(Record):
    """Time of a dense layer with what follows it (bias, activation, addition), microseconds."""

    geometry: Geometry
    arithmetic: str
    """fp32 (TF32 off), tf32 or fp16."""
    batch: int
    residual: bool
    us: float
    spread_us: float
    predicted_us: float
    """What the cost model said without a profile: points and model make the fit."""


class SparsePoint(Record):
    """Time of a sparse layer with its epilogue, by one kernel and configuration, microseconds."""

    geometry: Geometry
    precision: Precision
    batch: int
    residual: bool
    nnz: int
    kernel: str
    config: dict[str, int]
    us: float
    spread_us: float
    predicted_us: float | None
    """None where the cost model was not asked: the point is then no part of the fit."""


class Fit(Record):
    """How measured times of one kernel (or of dense layers) relate to the cost model's."""

    kernel: str
    """A kernel's name or `dense`."""
    precision: Precision
    factor: float
    """Geometric mean of measured / predicted: what a prediction is multiplied by."""
    mean_abs_log: float
    """Mean |ln(measured / predicted)| before the factor: 0.1 is about 10 % off."""
    worst: str
    """The point furthest off, in words."""
    points: int


class DeviceProfile(Document):
    """The measured times of one device."""

    TITLE = "a device profile, as of `tune --save-profile`"

    target: str
    """The row of deploy/devices.py that it stands for."""
    gpu: str
    """The device's own name, as its driver says it."""
    sm: int
    sm_count: int
    versions: dict[str, str]
    """sparsedeploy, driver, CUDA, cuDNN, torch: whatever was measured with."""
    conditions: str
    """How the times were taken."""
    ceilings: dict[str, float] = {}
    """Measured rates by name, unit in the name (copy_gbs, fp32_tflops); may be empty."""
    dense: tuple[DensePoint, ...] = ()
    sparse: tuple[SparsePoint, ...] = ()

    def fit(self, kernel: str, precision: Precision) -> Fit | None:
        """The fit of one kernel or of `dense`; None where nothing was measured."""
        pairs = self._pairs(kernel, precision)
        return fit(kernel, precision, pairs) if pairs else None

    def fits(self) -> tuple[Fit, ...]:
        """Every fit that points allow."""
        kernels = [DENSE, *dict.fromkeys(point.kernel for point in self.sparse)]
        precisions: tuple[Precision, ...] = ("fp32", "fp16")
        made = [self.fit(kernel, precision) for kernel in kernels for precision in precisions]
        return tuple(each for each in made if each)

    def _pairs(self, kernel: str, precision: Precision) -> list[tuple[str, float, float]]:
        points: Iterable[DensePoint | SparsePoint]
        if kernel == DENSE:
            points = (point for point in self.dense if point.arithmetic == precision)
        else:
            points = (point for point in self.sparse if (point.kernel, point.precision) == (kernel, precision))
        return [
            (describe(point.geometry, point.batch), point.us, point.predicted_us)
            for point in points
            if point.predicted_us is not None
        ]

    def dense_us(
        self, geometry: Geometry, precision: Precision, batch: int, residual: bool, predicted: Bound
    ) -> tuple[Bound, str]:
        """Time of a dense layer and where it comes from; the cost model's `predicted` unchanged without any point."""
        points = [p for p in self.dense if (p.geometry, p.arithmetic, p.batch) == (geometry, precision, batch)]
        point = _like(points, residual)
        if point is not None:
            return Bound(point.us, predicted.resource), f"measured on {self.gpu} (profile)"
        found = self.fit(DENSE, precision)
        if found is None:
            return predicted, f"predicted: the profile of {self.gpu} holds no dense {precision} time"
        return Bound(predicted.us * found.factor, predicted.resource), self._scaled(found)

    def sparse_us(
        self,
        layer: ConvLayer,
        precision: Precision,
        batch: int,
        kernel: str,
        predicted: tuple[tuple[Config, Prediction], ...],
    ) -> tuple[tuple[Config, Prediction], ...]:
        """A kernel's configurations for a layer, fastest first, with times from the profile where it has them.

        Measured configurations come before scaled ones: a measured time is known, a scaled one may be flattering.
        """
        measured = self._measured(layer, precision, batch, kernel)
        found = self.fit(kernel, precision)
        if measured:
            bound = predicted[0][1].bound
            return tuple(
                (config, Prediction(us=us, bound=bound, source=source))
                for config, us, source in sorted(measured, key=lambda entry: entry[1])
            )
        if found is None:
            return predicted
        return tuple(
            (config, Prediction(us=each.us * found.factor, bound=each.bound, source=self._scaled(found)))
            for config, each in predicted
        )

    def knows(self, layer: ConvLayer, precision: Precision, batch: int, kernel: str) -> bool:
        """Whether a kernel's time on this layer is measured, or on a line through measured ones."""
        return bool(self._measured(layer, precision, batch, kernel))

    def _scaled(self, found: Fit) -> str:
        return (
            f"predicted, times {found.factor:.2f} as fitted to {found.points} points measured on {self.gpu} (profile)"
        )

    def _measured(
        self, layer: ConvLayer, precision: Precision, batch: int, kernel: str
    ) -> list[tuple[Config, float, str]]:
        if layer.zeros is None:
            return []
        nnz, residual = layer.zeros.nnz, layer.epilogue.residual != "none"
        key = (layer.geometry, precision, batch, kernel)
        points = [p for p in self.sparse if (p.geometry, p.precision, p.batch, p.kernel) == key]
        same = [point for point in points if point.residual == residual] or points
        configs = {tuple(sorted(point.config.items())): point.config for point in same}
        found = []
        for config in configs.values():
            line = sorted((p.nnz, p.us) for p in same if p.config == config)
            made = at_nnz(line, nnz)
            if made is not None:
                found.append((config, made[0], f"{made[1]} on {self.gpu} (profile)"))
        return found


def describe(geometry: Geometry, batch: int) -> str:
    """`128->128 3x3 s1 @28x28 N=1`."""
    g = geometry
    return f"{g.ic}->{g.oc} {g.kh}x{g.kw} s{g.stride[0]} @{g.h}x{g.w} N={batch}"


def _like(points: Sequence[DensePoint], residual: bool) -> DensePoint | None:
    same = [point for point in points if point.residual == residual] or list(points)
    return min(same, key=lambda point: point.us, default=None)


def at_nnz(points: Sequence[tuple[int, float]], nnz: int) -> tuple[float, str] | None:
    """Time at `nnz` by (nnz, us) points in ascending order, and `measured`, `interpolated` or `extrapolated`.

    None where a single point is too far away. A line is never followed below half of its least point: every kernel has
    work that does not shrink with the weights.
    """
    for known, us in points:
        if abs(nnz - known) <= SAME_NNZ * known:
            return us, "measured"
    if len(points) == 1:
        known, us = points[0]
        return (us, "measured at similar sparsity") if abs(nnz - known) <= NEAR_NNZ * known else None
    pairs = list(itertools.pairwise(points))
    if not pairs:
        return None
    (n0, t0), (n1, t1) = next((pair for pair in pairs if nnz <= pair[1][0]), pairs[-1])
    us = t0 + (t1 - t0) * (nnz - n0) / max(n1 - n0, 1)
    how = "interpolated between times measured" if n0 <= nnz <= n1 else "extrapolated from times measured"
    return max(us, min(us for _, us in points) / 2), how


def fit(kernel: str, precision: Precision, pairs: Sequence[tuple[str, float, float]]) -> Fit:
    """The fit of (what, measured us, predicted us), at least one."""
    logs = [(math.log(us / predicted), what) for what, us, predicted in pairs if us > 0 and predicted > 0]
    mean = sum(log for log, _ in logs) / len(logs)
    off, what = max(logs, key=lambda entry: abs(entry[0]))
    return Fit(
        kernel=kernel, precision=precision, factor=math.exp(mean), mean_abs_log=sum(abs(log) for log, _ in logs) / len(logs),
        worst=f"{what}: measured {math.exp(off):.2f} of predicted", points=len(logs),
    )  # fmt: skip


def merged(old: DeviceProfile | None, new: DeviceProfile) -> DeviceProfile:
    """Both profiles' points, the newer where they measured the same; raises InputError for two devices."""
    if old is None:
        return new
    if (old.target, old.sm, old.gpu) != (new.target, new.sm, new.gpu):
        raise InputError(
            f"the profile holds times of {old.gpu} ({old.target}), these are of {new.gpu} ({new.target}): they do not "
            "belong in one file. Give --save-profile another name."
        )
    dense = {_dense_key(point): point for point in (*old.dense, *new.dense)}
    sparse = {_sparse_key(point): point for point in (*old.sparse, *new.sparse)}
    ceilings = {**old.ceilings, **new.ceilings}
    return new.model_copy(
        update={"dense": tuple(dense.values()), "sparse": tuple(sparse.values()), "ceilings": ceilings}
    )


def _dense_key(point: DensePoint) -> tuple[object, ...]:
    return (point.geometry, point.arithmetic, point.batch, point.residual)


def _sparse_key(point: SparsePoint) -> tuple[object, ...]:
    config = tuple(sorted(point.config.items()))
    return (point.geometry, point.precision, point.batch, point.residual, point.nnz, point.kernel, config)


def load_profile(path: Path, device: Device) -> DeviceProfile:
    """Read a profile for a device; raises InputError where the file is none or is another device's."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"--profile {path}: {error.strerror}. Make one on the device with `sparsedeploy tune BUNDLE --save-profile {path}`."
        ) from error
    profile = DeviceProfile.from_json(text, path)
    _refuse_no_times(path, profile)
    _refuse_unknown_words(path, profile)
    if (profile.target, profile.sm) != (device.name, device.sm):
        raise InputError(
            f"--profile {path}: holds times measured on {profile.gpu} (target {profile.target}, sm_{profile.sm}), and it is planned for "
            f"{device.name} (sm_{device.sm}). Times of one device say nothing about another: give --target {profile.target}, or a "
            f"profile of {device.name}."
        )
    return profile


def _refuse_unknown_words(path: Path, profile: DeviceProfile) -> None:
    """Raises InputError for a kernel or arithmetic that no plan asks for: its times would say nothing, silently."""
    kernels = tuple(kernel.name for kernel in KERNELS)
    words = [(f"sparse.{at}.kernel", point.kernel, kernels) for at, point in enumerate(profile.sparse)]
    words += [(f"dense.{at}.arithmetic", point.arithmetic, ARITHMETICS) for at, point in enumerate(profile.dense)]
    for field, word, known in words:
        if word not in known:
            raise InputError(
                f"--profile {path}: {field} is {word!r}, which this version of sparsedeploy does not know; it has {', '.join(known)}. "
                "Correct it, or measure again with `sparsedeploy tune BUNDLE --save-profile FILE`."
            )


def _refuse_no_times(path: Path, profile: DeviceProfile) -> None:
    """Raises InputError for a time that is not above zero and finite: the fits divide by it."""
    points: dict[str, Sequence[DensePoint | SparsePoint]] = {"dense": profile.dense, "sparse": profile.sparse}
    for kind, members in points.items():
        for at, point in enumerate(members):
            for field, us in (("us", point.us), ("predicted_us", point.predicted_us)):
                if us is not None and not 0 < us < math.inf:
                    raise InputError(
                        f"--profile {path}: {kind}.{at}.{field} is {us:g}, needed microseconds above zero. The file is damaged: copy "
                        "it again, or measure again with `sparsedeploy tune BUNDLE --save-profile FILE`."
                    )
