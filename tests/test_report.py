"""The report: complete, escaped, the same bytes twice, and clean in a browser at phone and desktop width."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from sparsedeploy.devices import Device, find
from sparsedeploy.layer import ConvLayer, Geometry, Reason, Zeros
from sparsedeploy.plan import LayerPlan, Measured, Plan, Predicted
from sparsedeploy.report import render
from sparsedeploy.roofline import bound_us, crossover, dense_us, sparse_work
from sparsedeploy.scan import Scan, Summary

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FACTS = {"Verified": "18 of 20 nodes, max relative error 2.1e-07", "Size": "44.7 MB dense, 6.1 MB sparse"}


def conv(name: str, geometry: Geometry, sparsity: float, ineligible: tuple[Reason, ...] = ()) -> ConvLayer:
    shape = geometry.weight_shape
    total = shape[0] * shape[1] * shape[2] * shape[3]
    nnz = round(total * (1 - sparsity))
    each = nnz // geometry.oc
    return ConvLayer(
        name=name,
        weight=f"{name}.weight",
        dtype="fp32",
        shape=shape,
        input_shape=("N", geometry.ic, geometry.h, geometry.w),
        output_shape=("N", geometry.oc, geometry.oh, geometry.ow),
        geometry=geometry,
        zeros=Zeros(
            nnz=nnz, total=total, nnz_per_channel=(each // 2, float(each), each * 2), empty_filters=0, empty_inputs=0,
            near_zero=0, two_four=False, sparsity=1 - nnz / total,
        ),
        ineligible=ineligible,
    )  # fmt: skip


def square(oc: int, ic: int, k: int, size: int, stride: int = 1) -> Geometry:
    pad = k // 2
    return Geometry(oc=oc, ic=ic, kh=k, kw=k, h=size, w=size, stride=(stride, stride), pads=(pad, pad, pad, pad))


def resnet18(sparsity: float = 0.9) -> list[ConvLayer]:
    """Names and shapes as torchvision's export has them; the first layer stays dense, deeper ones have more zeros."""
    few = (Reason(code="channels", text="3 input channels: dense is as fast"),)
    layers = [conv("/conv1/Conv", square(64, 3, 7, 224, 2), 0.0, few)]
    channels, size = 64, 56
    for stage, oc in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            stride = 2 if stage > 1 and block == 0 else 1
            prefix = f"/layer{stage}/layer{stage}.{block}"
            zeros = min(0.985, sparsity + 0.015 * (stage - 1) + 0.01 * block) if sparsity else 0.0
            layers.append(conv(f"{prefix}/conv1/Conv", square(oc, channels, 3, size, stride), zeros))
            size //= stride
            layers.append(conv(f"{prefix}/conv2/Conv", square(oc, oc, 3, size), zeros))
            if stride == 2:
                geometry = square(oc, channels, 1, size * 2, stride)
                layers.append(conv(f"{prefix}/downsample/downsample.0/Conv", geometry, zeros * 0.9))
            channels = oc
    return layers


def decide(layer: ConvLayer, device: Device, batch: int = 1, precision: Any = "fp32") -> LayerPlan:
    if layer.geometry is None or not layer.eligible or layer.zeros is None:
        reason = "; ".join(reason.text for reason in layer.ineligible) or "input size unknown"
        return LayerPlan(name=layer.name, choice="dense", sparsity=layer.sparsity, reason=reason)
    dense = dense_us(layer.geometry, device, precision, batch).us
    work = sparse_work(layer.geometry, layer.zeros.nnz, batch, precision)
    at_roof = bound_us(work, device.peak_tflops(precision), device.bandwidth_gbs).us
    sparse = max(at_roof, work.flops / (device.throughput.sparse_tflops(layer.sparsity) * 1e6))
    pays = sparse < dense
    return LayerPlan(
        name=layer.name,
        choice="csr" if pays else "dense",
        predicted=Predicted(us_dense=dense, us_sparse=sparse, kernel="csr", bound="l2", source="published"),
        crossover=0.893,
        roofline_crossover=crossover(layer.geometry, device, precision, batch),
        sparsity=layer.sparsity,
        reason=f"predicted {sparse:.3g} us sparse (l2) against {dense:.3g} us dense (compute): "
        f"pays above 89.3%, has {layer.sparsity:.1%}",
    )


def records(
    layers: list[ConvLayer], device: Device, model: str = "resnet18.onnx", precision: Any = "fp32"
) -> tuple[Scan, Plan]:
    macs = sum(layer.macs for layer in layers)
    eligible = sum(layer.macs for layer in layers if layer.eligible)
    share = eligible / macs if macs else 0.0
    weights = sum(layer.zeros.total for layer in layers if layer.zeros)
    plan = Plan(
        model=model, model_hash="c0ffee" * 10, target=device.name, precision=precision, batch=1,
        layers=tuple(decide(layer, device, precision=precision) for layer in layers),
    )  # fmt: skip
    sparse = sum(entry.choice != "dense" for entry in plan.layers)
    scan = Scan(
        model=model, model_hash="c0ffee" * 10, opset=17, ir_version=8, inputs={"x": (1, 3, 224, 224)}, batch=1,
        target=device.name, layers=tuple(layers),
        summary=Summary(
            convolutions=len(layers), eligible=sum(layer.eligible for layer in layers), macs=macs,
            eligible_macs_share=share, gain_cap=1 / (1 - share) if share < 1 else None,
            sparsity_by_macs=sum(layer.macs * layer.sparsity for layer in layers) / macs if macs else 0.0,
            sparsity_by_weights=1 - sum(layer.zeros.nnz for layer in layers if layer.zeros) / max(weights, 1),
        ),
        notes=("masks folded for 16 convolutions",),
        hints=("2 layers are exactly 2:4 along the input channels.",) if sparse else (),
        verdict=f"convert: {sparse} of {len(layers)} convolutions are predicted faster sparse on {device.name}. "
        "Predicted, not measured." if sparse else "nothing to convert: 0 % zeros.",
        next_command=f"sparsedeploy convert {model} --target {device.name}",
    )  # fmt: skip
    return scan, plan


def page_of(
    layers: list[ConvLayer], device: Device, precision: Any = "fp32", facts: dict[str, str] | None = None
) -> str:
    return render(*records(layers, device, precision=precision), device, facts or {})


def resnet18_page() -> str:
    return page_of(resnet18(), find("jetson-nano"), facts=FACTS)


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    """A page for each kind of model."""
    nano, a100, orin = find("jetson-nano"), find("a100"), find("orin-nano")
    deep = [
        conv(
            f"/model/backbone/stage{i // 30}/block{i % 30}/depth/expand_conv/Conv",
            square(64, 64, 3, 28),
            0.9 + i / 1300,
        )
        for i in range(120)
    ]
    unknown = [layer.model_copy(update={"geometry": None}) for layer in resnet18()[:3]]
    return {
        "resnet18-nano": resnet18_page(),
        "resnet18-a100-fp16": page_of(resnet18(), a100, "fp16"),
        "dense": page_of(resnet18(0.0), a100),
        "one-layer": page_of([conv("conv", square(48, 48, 3, 64), 0.95)], nano),
        "deep": page_of(deep, orin),
        "unknown-sizes": page_of(unknown, orin),
    }


class Outline(HTMLParser):
    """Tags must nest and close; text is collected as a reader sees it."""

    VOID = frozenset({"meta", "link", "br", "wbr", "path", "circle"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data)


def test_two_renders_are_equal(rendered: dict[str, str]) -> None:
    assert resnet18_page() == rendered["resnet18-nano"]


def test_another_process_renders_the_same_bytes(rendered: dict[str, str]) -> None:
    """With another hash seed: nothing may hang on the order of a set."""
    code = "import sys, test_report; sys.stdout.buffer.write(test_report.resnet18_page().encode())"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, check=True
    )
    assert done.stdout.decode() == rendered["resnet18-nano"]


def test_a_users_matplotlib_settings_change_nothing(rendered: dict[str, str]) -> None:
    import matplotlib

    nano = find("jetson-nano")
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert render(*records(resnet18(), nano), nano, FACTS) == rendered["resnet18-nano"]
        assert matplotlib.rcParams["font.size"] == 30


def test_every_page_is_well_formed_and_loads_nothing(rendered: dict[str, str]) -> None:
    for page in rendered.values():
        outline = Outline(page)
        assert not outline.open
        for tag, attributes in outline.tags:
            assert tag not in {"script", "img", "iframe", "object", "embed", "image"}
            for name, value in attributes.items():
                assert not name.startswith("on")
                if name in {"src", "href", "xlink:href"}:
                    assert value is not None
                    assert value.startswith(("#", "data:,"))
        assert not re.search(r"https?:|@import|url\((?!#)", page)


def test_every_layer_is_in_the_table_and_in_both_charts(rendered: dict[str, str]) -> None:
    outline = Outline(rendered["resnet18-nano"])
    table = "".join(outline.text[outline.text.index("Weight and input") :])
    charts = [text for text in outline.text if "conv" in text or "downsample" in text]
    for layer in resnet18():
        assert layer.name in table, layer.name
        assert any(text.startswith(f"{layer.name}: dense") for text in charts), "its mark on the roofline"
        short = layer.name.removesuffix("/Conv").removeprefix("/")
        assert {short, layer.name} & set(charts), "its bars"


def test_overview_says_what_was_counted_and_that_it_is_predicted(rendered: dict[str, str]) -> None:
    text = " ".join(" ".join(Outline(rendered["resnet18-nano"]).text).split())
    nano = find("jetson-nano")
    scan, plan = records(resnet18(), nano)
    dense = sum(entry.predicted.us_dense for entry in plan.layers if entry.predicted)
    for needed in (
        scan.verdict, scan.next_command, scan.notes[0], scan.hints[0], nano.throughput.source, *FACTS, *FACTS.values(),
        f"19 of 20, {scan.summary.eligible_macs_share:.1%} of all MACs", f"{scan.summary.gain_cap:.2f}x",
        f"Convolutions, predicted {dense:,.0f} us dense", "1 without times not counted", "Time per layer, predicted",
        "25.6 GB/s", "fp32 peak 236 GFLOP/s", "fp16 peak 472 GFLOP/s", "ridge 9.22",
    ):  # fmt: skip
        assert needed in text, needed
    assert "measured where" not in text


def test_measured_times_replace_predicted_ones_and_are_marked() -> None:
    nano = find("jetson-nano")
    scan, plan = records(resnet18(), nano)
    first = plan.layers[1].model_copy(update={"measured": Measured(us_dense=4321.0, us_sparse=1234.0, spread_us=3.0)})
    mixed = plan.model_copy(update={"layers": (plan.layers[0], first, *plan.layers[2:])})
    text = " ".join(" ".join(Outline(render(scan, mixed, nano, {})).text).split())
    assert "4,321 measured 1,234 measured" in text
    assert "Time per layer, measured where marked, else predicted" in text

    assert first.crossover is not None
    assert f"{first.crossover:.1%} predicted {first.roofline_crossover:.1%} 4,321 measured" in text
    crossed = first.model_copy(update={"measured_crossover": 0.654})
    text = " ".join(
        " ".join(
            Outline(render(scan, plan.model_copy(update={"layers": (crossed, *plan.layers[2:])}), nano, {})).text
        ).split()
    )
    assert f"65.4% measured {first.roofline_crossover:.1%} 4,321 measured" in text

    done = plan.model_copy(update={"layers": (first.model_copy(update={"name": "only"}),)})
    one = scan.model_copy(update={"layers": (scan.layers[1].model_copy(update={"name": "only"}),)})
    assert "Time per layer, measured" in render(one, done, nano, {})


def test_names_are_escaped_everywhere() -> None:
    nano = find("jetson-nano")
    nasty = "<script>alert(1)</script>&\"'$x^2$\x07 层"
    layers = [conv(nasty, square(48, 48, 3, 64), 0.95)]
    page = render(*records(layers, nano, model="<b>m</b>.onnx"), nano, {"<i>fact</i>": "<u>text</u>"})
    outline = Outline(page)
    assert not outline.open
    assert not {tag for tag, _ in outline.tags} & {"script", "b", "i", "u"}
    text = "".join(outline.text)
    for shown in (nasty, "<b>m</b>.onnx", "<i>fact</i>", "<u>text</u>"):
        assert shown in text, shown
    assert "$x^2$" in "".join(outline.text)


def test_no_sparse_layer_reads_as_nothing_converted(rendered: dict[str, str]) -> None:
    page = rendered["dense"]
    text = " ".join(" ".join(Outline(page).text).split())
    assert "nothing to convert: 0 % zeros." in text
    assert "Runs sparse 0 of 20 convolutions" in text
    assert 'class="verdict"' in page


def test_unknown_sizes_are_listed_without_marks(rendered: dict[str, str]) -> None:
    text = " ".join(" ".join(Outline(rendered["unknown-sizes"]).text).split())
    assert "no convolution has a known input size" in text
    assert text.count("no prediction") == 6
    assert "64×3×7×7, input size unknown" in text


def test_long_names_lose_what_they_share_in_the_chart_only(rendered: dict[str, str]) -> None:
    texts = Outline(rendered["deep"]).text
    assert texts.count("stage3/block29") == 2, "wide and narrow"
    assert "/model/backbone/stage3/block29/depth/expand_conv/Conv" in "".join(texts[texts.index("Weight and input") :])


def test_a_layer_without_a_decision_and_an_empty_model_still_render() -> None:
    nano = find("jetson-nano")
    scan, plan = records(resnet18(), nano)
    page = render(scan, plan.model_copy(update={"layers": plan.layers[:3]}), nano, {})
    assert page.count("no prediction") > 0
    empty = render(*records([], nano), nano, {})
    assert not Outline(empty).open


def test_only_palette_colours_and_both_schemes(rendered: dict[str, str]) -> None:
    """A colour outside the variables would vanish in light or dark."""
    for page in rendered.values():
        head, body = page.split("</style>", 1)
        assert not re.findall(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b|(?<=[:\s])black|(?<=[:\s])white", body)
        used = set(re.findall(r"var\(--([a-z]+)\)", body))
        light, dark = head.split("prefers-color-scheme: dark", 1)
        for name in used:
            assert f"--{name}:" in light
            assert f"--{name}:" in dark


def test_render_takes_under_two_seconds(rendered: dict[str, str]) -> None:
    nano = find("jetson-nano")
    layers = [conv(f"layer{i}", square(64, 64, 3, 28), 0.95) for i in range(53)]
    given = records(layers, nano)
    start = time.process_time()
    render(*given, nano, FACTS)
    assert time.process_time() - start < 2


class Browser:
    """Headless Chromium over its DevTools pipe: just enough to open a page, emulate a screen and hear complaints."""

    def __init__(self, binary: str) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._profile = tempfile.mkdtemp()
        # A child's file descriptors 3 and 4 are the pipe by definition; only a shell's redirection puts them there.
        command = (
            f'exec "$0" --headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe '
            f'--user-data-dir="$1" about:blank 3<&{to_browser} 4>&{from_browser}'
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command, binary, self._profile],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._serial = 0
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = ""
        self._session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Call a method and return its result; events heard meanwhile are kept."""
        self._serial += 1
        message: dict[str, Any] = {"id": self._serial, "method": method, "params": params or {}}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._serial:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "the browser has not answered for a minute"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser went away"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, page: Path, width: int, dark: bool) -> None:
        """Load the page at that width and wait until it is loaded."""
        self.events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 2 if width < 600 else 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.send("Page.navigate", {"url": page.as_uri()})
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        return self.send("Runtime.evaluate", {"expression": expression, "returnByValue": True})["result"]["value"]

    def screenshot(self, path: Path, width: int) -> None:
        """The page down to 5000 pixels: a long table adds nothing to see."""
        height = min(5000, self.evaluate("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.send("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))

    def heard(self, *methods: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("method") in methods]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    with Browser(CHROMIUM) as opened:
        yield opened


SCREENS = {"phone": (390, False), "phone-dark": (390, True), "desktop": (1280, False), "desktop-dark": (1280, True)}
CASES = [
    *(("resnet18-nano", screen) for screen in SCREENS),
    ("resnet18-a100-fp16", "desktop-dark"),
    ("dense", "phone"),
    ("one-layer", "desktop"),
    ("deep", "phone"),
    ("deep", "desktop-dark"),
    ("unknown-sizes", "phone-dark"),
]


@pytest.mark.parametrize(("name", "screen"), CASES)
def test_in_chromium(browser: Browser, rendered: dict[str, str], name: str, screen: str, tmp_path: Path) -> None:
    """Nothing but the file is requested, the console stays empty, nothing overflows, and colours follow the scheme."""
    width, dark = SCREENS[screen]
    page = tmp_path / f"{name}.html"
    page.write_text(rendered[name], encoding="utf-8")
    browser.open(page, width, dark)
    requests = [event["params"]["request"]["url"] for event in browser.heard("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
    assert not browser.heard("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    visible = "[...document.querySelectorAll('figure > div')].filter(e => e.offsetParent).map(e => e.className)"
    assert set(browser.evaluate(f"{visible}.join(' ')").split()) == {"narrow" if width < 600 else "wide"}
    ink = browser.evaluate("getComputedStyle(document.querySelector('figure text')).fill")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    ink_level, paper_level = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper))
    assert (paper_level < 150) == dark
    assert abs(ink_level - paper_level) > 200, "text must stand out from the page"
    kept = Path(os.environ.get("SPARSEDEPLOY_SCREENSHOTS") or tmp_path)
    kept.mkdir(parents=True, exist_ok=True)
    shot = kept / f"{name}-{screen}.png"
    browser.screenshot(shot, width)
    assert shot.stat().st_size > 10_000


def test_the_browser_check_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A page that fetches and complains is heard."""
    page = tmp_path / "bad.html"
    page.write_text('<img src="missing.png"><script>console.error("x")</script>', encoding="utf-8")
    browser.open(page, 390, False)
    assert len(browser.heard("Network.requestWillBeSent")) == 2
    assert browser.heard("Runtime.consoleAPICalled")
