"""The demo: a pruned ResNet-18 made here, converted for two devices, by plan and forced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from sparsedeploy.build import add_engine
from sparsedeploy.convert import Conversion, Request, convert
from sparsedeploy.devices import Device, find
from sparsedeploy.models.sparsity import pruned

NETWORK, SPARSITY = "resnet18", 0.9
TARGETS = ("jetson-nano", "a100")


def write_model(folder: Path) -> Path:
    """ResNet-18 with seeded He weights, pruned to 90 % by skewed magnitude, as `resnet18-90.onnx`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "resnet18-90.onnx"
    onnx.save_model(pruned(NETWORK, SPARSITY), path)
    return path


def runs(
    model: Path, folder: Path, targets: tuple[Device, ...], tell: Callable[[str], None], *, engines: bool
) -> list[tuple[str, Conversion, tuple[str, ...]]]:
    """Convert for every target, as the plan decides and with every eligible layer forced sparse.

    Returns how, the conversion, and what is to be told about its engine (nothing without `engines`).
    """
    done = []
    for device in targets:
        for label, layers in (("by plan", ()), ("forced", ("*=sparse",))):
            out = folder / f"{device.name}-{label.replace(' ', '-')}"
            tell(f"{device.name}, {label}")
            conversion = convert(Request(model, device, out, layers=layers, tell=tell))
            lines = add_engine(out, conversion.manifest, tell) if engines else ()
            done.append((label, conversion, lines))
    return done


def default_targets() -> tuple[Device, ...]:
    """The two devices of the mission."""
    return tuple(find(name) for name in TARGETS)
