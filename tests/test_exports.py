"""Small graphs spelled as exporters spell them, converted end to end: what each becomes, at the converted size and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from sparsedeploy.bundle import DENSE_MODEL, SPARSE_MODEL
from sparsedeploy.convert import Conversion, Request, convert
from sparsedeploy.converters.graph import Model
from sparsedeploy.converters.load import load, save
from sparsedeploy.converters.rewrite import read_nodes, restore
from sparsedeploy.devices import find
from sparsedeploy.errors import InputError
from sparsedeploy.layer import Precision
from sparsedeploy.plugins import kernel_named
from sparsedeploy.reading import read
from sparsedeploy.reverify import verify_bundle

Floats = NDArray[np.float32]
RNG = np.random.default_rng(3)


def weight(*shape: int, sparsity: float = 0.9) -> Floats:
    """Fan-in scaled weights, every output channel with at least one nonzero."""
    values = RNG.standard_normal(shape) / np.sqrt(max(1.0, np.prod(shape[1:]) * (1 - sparsity)))
    values[RNG.random(shape) < sparsity] = 0
    values.reshape(shape[0], -1)[:, 0] = 0.5
    return np.asarray(values, np.float32)


def vector(count: int, low: float = -0.5, high: float = 0.5) -> Floats:
    return RNG.uniform(low, high, count).astype(np.float32)


@dataclass(frozen=True)
class Export:
    """A graph in onnx's text form with its constants, and what converting it with every eligible layer sparse gives."""

    text: str
    constants: Mapping[str, NDArray[np.generic]]
    opset: int
    sparse: int
    epilogues: tuple[str, ...] = ()
    """Of the sparse nodes, in graph order."""
    x: str = "float[N,16,H,W]"
    y: str = "float[A,B,C,D]"
    shape: tuple[int, ...] = (1, 16, 12, 12)
    others: tuple[tuple[int, ...], ...] = ((3, 16, 12, 12), (2, 16, 9, 15))
    """Input shapes at which the sparse graph must equal the original too."""
    notes: tuple[str, ...] = ()
    external: bool = False
    functions: str = ""
    imports: Mapping[str, int] = field(default_factory=dict)


def batchnorm(name: str) -> dict[str, NDArray[np.generic]]:
    return {
        f"{name}_s": vector(16, 0.5, 1.5),
        f"{name}_b": vector(16),
        f"{name}_m": vector(16),
        f"{name}_v": vector(16, 0.5, 1.5),
    }


def masked(name: str) -> dict[str, NDArray[np.generic]]:
    sparse = weight(16, 16, 3, 3)
    dense = np.where(sparse != 0, sparse, RNG.standard_normal(sparse.shape)).astype(np.float32)
    return {f"{name}_orig": dense, f"{name}_mask": (sparse != 0).astype(np.float32)}


EXPORTS = {
    # torch, older exporter: masks of torch.nn.utils.prune left in, BatchNormalization not folded.
    "residual block with masks": Export(
        "wa = Mul(a_orig, a_mask) ca = Conv<pads=[1,1,1,1],kernel_shape=[3,3]>(x, wa) "
        "na = BatchNormalization<epsilon=1e-5>(ca, na_s, na_b, na_m, na_v) ra = Relu(na) "
        "wb = Mul(b_orig, b_mask) cb = Conv<pads=[1,1,1,1],kernel_shape=[3,3]>(ra, wb) "
        "nb = BatchNormalization<epsilon=1e-5>(cb, nb_s, nb_b, nb_m, nb_v) s = Add(nb, x) y = Relu(s)",
        {**masked("a"), **masked("b"), **batchnorm("na"), **batchnorm("nb")},
        17,
        sparse=2,
        epilogues=("bias+relu", "bias+add+relu"),
        notes=("masks folded for 2", "2 BatchNormalization nodes folded"),
    ),
    # The projection shortcut halves as the main branch does at every size, odd ones too.
    "strided residual block": Export(
        "ca = Conv<pads=[1,1,1,1],strides=[2,2]>(x, wa, ba) ra = Relu(ca) cb = Conv<pads=[1,1,1,1]>(ra, wb, bb) "
        "sc = Conv<strides=[2,2]>(x, wc, bc) s = Add(cb, sc) y = Relu(s)",
        {"wa": weight(16, 16, 3, 3), "wb": weight(16, 16, 3, 3), "wc": weight(16, 16, 1, 1)}
        | {name: vector(16) for name in ("ba", "bb", "bc")},
        18,
        sparse=3,
        epilogues=("bias+relu", "bias", "bias+add+relu"),
        external=True,
    ),
    # An average-pooled shortcut has the size of the strided branch at even sizes alone: its Add stays.
    "pooled shortcut": Export(
        "ca = Conv<pads=[1,1,1,1],strides=[2,2]>(x, wa, ba) p = AveragePool<kernel_shape=[2,2],strides=[2,2]>(x) "
        "s = Add(ca, p) y = Relu(s)",
        {"wa": weight(16, 16, 3, 3), "ba": vector(16)},
        13,
        sparse=1,
        epilogues=("bias",),
        others=((3, 16, 12, 12), (2, 16, 8, 14)),
    ),
    # Paddle: no bias, but an Add of Reshape(Constant, Constant); squeeze and excite on one pixel.
    "squeeze and excite": Export(
        "g = GlobalAveragePool(x) ca = Conv(g, wa) k = Constant<value_ints=[1,16,1,1]>() ra = Reshape(ba, k) "
        "sa = Add(ca, ra) ta = Relu(sa) cb = Conv(ta, wb) rb = Reshape(bb, k) sb = Add(cb, rb) "
        "h = HardSigmoid<alpha=0.2,beta=0.5>(sb) y = Mul(x, h)",
        {"wa": weight(16, 16, 1, 1), "wb": weight(16, 16, 1, 1), "ba": vector(16), "bb": vector(16)},
        12,
        sparse=2,
        epilogues=("bias+relu", "bias"),
        notes=("constant Add made the bias of 2 convolutions",),
    ),
    # A bias already there: the constant [1, oc, 1, 1] is no residual for a batch above 1.
    "bias and constant": Export(
        "g = GlobalAveragePool(x) ca = Conv(g, wa, ba) y = Add(ca, row)",
        {"wa": weight(16, 16, 1, 1), "ba": vector(16), "row": vector(16).reshape(1, 16, 1, 1)},
        13,
        sparse=1,
        epilogues=("bias",),
    ),
    # YOLO: SiLU, Split, Concat, repeated MaxPool, Resize; the shortcut comes behind SiLU.
    "detector": Export(
        "ca = Conv<pads=[1,1,1,1]>(x, wa, ba) ga = Sigmoid(ca) a = Mul(ca, ga) l, r = Split<axis=1,num_outputs=2>(a) "
        "cb = Conv<pads=[1,1,1,1]>(r, wb) gb = Sigmoid(cb) b = Mul(cb, gb) q = Add(r, b) "
        "p = MaxPool<kernel_shape=[5,5],pads=[2,2,2,2]>(q) z = Concat<axis=1>(l, q, p) cc = Conv(z, wc, bc) "
        "u = MaxPool<kernel_shape=[2,2],strides=[2,2]>(cc) h = Shape<start=2>(cc) n = Constant<value_ints=[1,16]>() "
        'f = Concat<axis=0>(n, h) v = Resize<mode="nearest">(u, , , f) y = Concat<axis=1>(cc, v)',
        {"wa": weight(16, 16, 3, 3), "wb": weight(8, 8, 3, 3), "wc": weight(16, 24, 1, 1)}
        | {"ba": vector(16), "bc": vector(16)},
        18,
        sparse=3,
        epilogues=("bias", "-", "bias"),
        x="float[1,16,H,W]",
        others=((1, 16, 9, 15),),
    ),
    # MobileNet: depthwise, ReLU6 as Clip, hard swish, linear bottleneck with a shortcut.
    "inverted residual": Export(
        "ca = Conv(x, wa, ba) a = Clip(ca, zero, six) cb = Conv<pads=[1,1,1,1],group=32>(a, wb, bb) b = HardSwish(cb) "
        "cc = Conv(b, wc, bc) y = Add(x, cc)",
        {"wa": weight(32, 16, 1, 1), "wb": weight(32, 1, 3, 3, sparsity=0.5), "wc": weight(16, 32, 1, 1)}
        | {"ba": vector(32), "bb": vector(32), "bc": vector(16)}
        | {"zero": np.float32(0), "six": np.float32(6)},
        14,
        sparse=3,
        epilogues=("bias+relu6", "bias", "bias+add"),
    ),
    # One weight behind two convolutions, an Identity before the second, and the weight itself an output.
    "shared weight": Export(
        "i = Identity(w) ca = Conv<pads=[1,1,1,1]>(x, w, b) a = LeakyRelu<alpha=0.2>(ca) "
        "cb = Conv<pads=[1,1,1,1]>(a, i, b) t = Add(cb, a) y = Identity(t)",
        {"w": weight(16, 16, 3, 3), "b": vector(16)},
        13,
        sparse=2,
        epilogues=("bias+leaky(0.2)", "bias+add"),
        notes=("behind Identity nodes read directly",),
    ),
}


def proto_of(export: Export) -> onnx.ModelProto:
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": export.opset, **export.imports}.items())
    proto = parser.parse_model(
        f"<ir_version: 8, opset_import: [{imports}]> g ({export.x} x) => ({export.y} y) {{ {export.text} }}"
        + export.functions
    )
    for name, array in export.constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return proto


def written(folder: Path, export: Export) -> Path:
    path = folder / "model.onnx"
    onnx.save(
        proto_of(export), path, save_as_external_data=export.external, location="model.onnx.data", size_threshold=0
    )
    return path


def converted(
    path: Path,
    target: str,
    precision: Precision = "fp32",
    kernel: str = "csr",
    shape: tuple[int, ...] = (1, 16, 12, 12),
) -> Conversion:
    out = path.parent / target
    return convert(Request(path, find(target), out, precision, shapes={"x": shape}, layers=(f"*={kernel}",)))


def run(path: Path, shape: tuple[int, ...]) -> list[Floats]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {"x": np.random.default_rng(5).random(shape).astype(np.float32)}
    return [np.asarray(value, np.float32) for value in session.run(None, feeds)]


def restored(out: Path) -> Path:
    """The sparse graph with every node a Conv again, of the weights that it carries."""
    model = restore(load(out / SPARSE_MODEL), lambda node: kernel_named(node.kernel).unpack(node))
    save(model, out / "restored.onnx")
    return out / "restored.onnx"


@pytest.mark.parametrize(
    ("target", "precision", "kernel"), [("a100", "fp32", "csr"), ("jetson-nano", "fp16", "packed")]
)
@pytest.mark.parametrize("name", EXPORTS)
def test_exports(tmp_path: Path, name: str, target: str, precision: Precision, kernel: str) -> None:
    export = EXPORTS[name]
    path = written(tmp_path, export)
    result = converted(path, target, precision, kernel, export.shape)
    nodes = read_nodes(load(result.out / SPARSE_MODEL))
    assert len(nodes) == export.sparse
    assert {node.kernel for node in nodes.values()} == {kernel}
    assert tuple(node.epilogue.describe() for node in nodes.values()) == export.epilogues
    for note in export.notes:
        assert any(note in said for said in result.notes), result.notes
    again = restored(result.out)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for shape in (export.shape, *export.others):
        if kernel == "csr" and shape[2:] != export.shape[2:]:
            continue  # its nodes hold offsets of one height and width
        for expected, got in zip(run(path, shape), run(again, shape), strict=True):
            assert expected.shape == got.shape
            assert np.abs(expected - got).max() <= tolerance * np.abs(expected).max()


def test_equal_bytes_every_time(tmp_path: Path) -> None:
    path = written(tmp_path, EXPORTS["strided residual block"])
    runs = []
    for _ in range(2):  # the report names the folder, so both go to the same one
        out = converted(path, "jetson-nano", "fp16", "packed").out
        runs.append({file.name: file.read_bytes() for file in sorted(out.iterdir())})
    assert len(runs[0]) >= 6
    assert runs[0].keys() == runs[1].keys()
    assert [name for name in runs[0] if runs[0][name] != runs[1][name]] == []


def test_function_of_another_opset(tmp_path: Path) -> None:
    """Left alone and said so where it cannot be inlined; the convolution outside of it still becomes sparse."""
    export = Export(
        "a = Conv<pads=[1,1,1,1]>(x, w, b) y = pkg.Block(a, w)",
        {"w": weight(16, 16, 3, 3), "b": vector(16)},
        18,
        sparse=1,
        imports={"pkg": 1},
        functions=' <domain: "pkg", opset_import: ["" : 16]> Block (t, v) => (o) { c = Conv<pads=[1,1,1,1]>(t, v) o = Relu(c) }',
    )
    path = written(tmp_path, export)
    result = converted(path, "a100")
    assert len(read_nodes(load(result.out / SPARSE_MODEL))) == 1
    assert any("another opset" in note for note in result.notes), result.notes
    with pytest.raises(InputError, match="Block"):
        converted(path, "jetson-nano")


def test_function_of_the_same_opset(tmp_path: Path) -> None:
    export = Export(
        "a = Conv<pads=[1,1,1,1]>(x, w, b) y = pkg.Block(a, w)",
        {"w": weight(16, 16, 3, 3), "b": vector(16)},
        18,
        sparse=2,
        imports={"pkg": 1},
        functions=' <domain: "pkg", opset_import: ["" : 18]> Block (t, v) => (o) { c = Conv<pads=[1,1,1,1]>(t, v) o = Relu(c) }',
    )
    result = converted(written(tmp_path, export), "jetson-nano")
    assert [node.epilogue.describe() for node in read_nodes(load(result.out / SPARSE_MODEL)).values()] == [
        "bias",
        "relu",
    ]
    assert any("1 model-local function inlined" in note for note in result.notes)


def test_weight_that_is_an_output_and_read_in_a_loop(tmp_path: Path) -> None:
    """The main graph's convolution becomes sparse, the weight stays for the body and for the output."""
    body = parser.parse_graph(
        "body (int64 i, bool go, float[N,16,H,W] t) => (bool again, float[N,16,H,W] u) "
        "{ again = Identity(go) c = Conv<pads=[1,1,1,1]>(t, w) u = Tanh(c) }"
    )
    proto = proto_of(
        Export("a = Conv<pads=[1,1,1,1]>(x, w, b) r = Relu(a) y = Identity(r)",
               {"w": weight(16, 16, 3, 3), "b": vector(16), "n": np.int64(2), "on": np.asarray(True)}, 16, sparse=1)
    )  # fmt: skip
    proto.graph.node[-1].CopyFrom(helper.make_node("Loop", ["n", "on", "r"], ["y"], "loop", body=body))
    proto.graph.output.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [16, 16, 3, 3]))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    for target in ("a100", "jetson-nano"):
        result = converted(path, target)
        sparse = load(result.out / SPARSE_MODEL)
        assert [node.layer for node in read_nodes(sparse).values()] == ["a"]
        assert {layer.name: layer.ineligible[0].code for layer in result.scan.layers if layer.ineligible} == {
            "Loop 'loop'/body/c": "in-body"
        }
        weights = {tensor.name for tensor in sparse.proto.graph.initializer}
        assert "w" in weights
        for expected, got in zip(run(path, (2, 16, 12, 12)), run(restored(result.out), (2, 16, 12, 12)), strict=True):
            assert np.abs(expected - got).max() <= 1e-2 * np.abs(expected).max()


def test_side_file_survives_lowering(tmp_path: Path) -> None:
    """torch.export writes every weight beside the model: both graphs of the comparison must find them from anywhere."""
    export = EXPORTS["strided residual block"]
    path = written(tmp_path, export)
    assert (tmp_path / "model.onnx.data").is_file()
    result = converted(path, "jetson-nano")
    assert any("opset 18 lowered to 13" in note for note in result.notes)
    assert load(result.out / DENSE_MODEL).opset() == 13


def test_residuals_found_when_sizes_are_open(tmp_path: Path) -> None:
    """The scan of an export with open sizes shows what its conversion fuses."""
    reading = read(written(tmp_path, EXPORTS["inverted residual"]), find("a100"), given={"x": (1, 16, 12, 12)})
    assert [layer.epilogue.residual for layer in reading.layers] == ["none", "none", "before_activation"]
    assert isinstance(reading.model, Model)


def test_fp16_bundle_without_its_original(tmp_path: Path) -> None:
    """On another machine only the bundle is there: its dense model holds biases that went through fp16, the nodes do not."""
    path = written(tmp_path, EXPORTS["strided residual block"])
    out = converted(path, "jetson-nano", "fp16", "packed").out
    path.unlink()
    result = verify_bundle(out, None, None, 0)
    assert result.passed
    assert len(result.weights) == 3
    assert "is not here" in result.note


def test_training_mode_is_refused_for_an_old_target(tmp_path: Path) -> None:
    """Opset 13 says training by further outputs, which TensorRT 8.0 does not make; other targets keep the node dense."""
    export = Export(
        "ca = Conv<pads=[1,1,1,1]>(x, wa) y, m, v, om, ov = BatchNormalization(ca, n_s, n_b, n_m, n_v)",
        {"wa": weight(16, 16, 3, 3), **batchnorm("n")},
        13,
        sparse=1,
    )
    path = written(tmp_path, export)
    with pytest.raises(InputError, match=r"training mode: call model\.eval\(\)"):
        converted(path, "jetson-nano")
    assert any("it is in training mode" in note for note in converted(path, "a100").notes)
