"""The torch runner against ONNX Runtime on small random graphs: what operators in place, views and fused units do to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from small_models import saved

from sparsedeploy.verify import run_file

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from sparsedeploy.runners import torch_runner  # noqa: E402
from sparsedeploy.runners.torch_program import Builder  # noqa: E402

Shape = tuple[int, int, int, int]


@dataclass
class Graph:
    """A graph that grows by operators on values drawn from those that it has, old ones too."""

    rng: np.random.Generator
    values: dict[str, Shape] = field(default_factory=lambda: {"x": (2, 4, 7, 6)})
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def draw(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def pick(self, shape: Shape | None = None) -> str:
        """A value, of a shape where one is named; as a rule a new one, so that chains grow."""
        names = [name for name, size in self.values.items() if shape in (None, size)]
        return names[-1] if self.rng.random() < 0.6 else str(self.draw(*names))

    def constant(self, array: NDArray[np.generic]) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = array
        return name

    def floats(self, *shape: int) -> str:
        return self.constant((self.rng.standard_normal(shape) / 3).astype(np.float32))

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: object) -> None:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        self.values[output] = shape

    def grow(self) -> None:
        kind = self.draw(
            self.unary,
            self.unary,
            self.sum,
            self.sum,
            self.scalar,
            self.same,
            self.reshaped,
            self.conv,
            self.conv,
            self.pool,
        )
        kind()

    def unary(self) -> None:
        x = self.pick()
        self.add(str(self.draw("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Neg", "Abs")), [x], self.values[x])

    def sum(self) -> None:
        x = self.pick()
        self.add(
            str(self.draw("Add", "Add", "Sum", "Mul", "Sub", "Max")), [x, self.pick(self.values[x])], self.values[x]
        )

    def scalar(self) -> None:
        x = self.pick()
        n, c, h, w = self.values[x]
        other = self.floats(*self.draw((1,), (c, 1, 1), (1, c, 1, 1), (n, 1, h, w), (n, c, h, w)))
        pair = [x, other] if self.rng.random() < 0.7 else [other, x]
        self.add(str(self.draw("Add", "Mul", "Sub")), pair, self.values[x])

    def same(self) -> None:
        """What gives its input back, or a view of it."""
        x = self.pick()
        shape = self.values[x]
        ones, zeros = np.ones(4, np.float32), np.zeros(8, np.int64)
        op, extra = self.draw(
            ("Identity", []), ("Dropout", []), ("Sum", []), ("Max", []), ("Resize", ["", self.constant(ones)]),
            ("Pad", [self.constant(zeros)]), ("Expand", [self.constant(np.ones(1, np.int64))]),
            ("Reshape", [self.constant(np.array(shape, np.int64))]), ("Transpose", []),
        )  # fmt: skip
        self.add(op, [x, *extra], shape, **({"perm": [0, 1, 2, 3]} if op == "Transpose" else {}))

    def reshaped(self) -> None:
        x = self.pick()
        n, c, h, w = self.values[x]
        if self.rng.random() < 0.5:
            self.add("Transpose", [x], (n, c, w, h), perm=[0, 1, 3, 2])
        else:
            self.add("Reshape", [x, self.constant(np.array([n, c, w, h], np.int64))], (n, c, w, h))

    def conv(self) -> None:
        x = self.pick()
        n, c, h, w = self.values[x]
        oc, group, k = (c, int(self.draw(1, 2, c)), 3) if c % 2 == 0 else (c, 1, 3)
        pads, stride = self.draw(([1, 1, 1, 1], 1), ([1, 1, 1, 1], 1), ([0, 0, 2, 2], 1), ([2, 1, 0, 2], 2))
        out = [(size + pads[at] + pads[at + 2] - k) // stride + 1 for at, size in enumerate((h, w))]
        bias = [self.floats(oc)] if self.rng.random() < 0.6 else []
        self.add(
            "Conv", [x, self.floats(oc, c // group, k, k), *bias], (n, oc, out[0], out[1]), pads=pads, group=group,
            strides=[stride, stride],
        )  # fmt: skip

    def pool(self) -> None:
        x = self.pick()
        n, c, h, w = self.values[x]
        op, k, stride = str(self.draw("MaxPool", "AveragePool")), int(self.draw(2, 3)), int(self.draw(1, 2))
        pads, ceil = [int(self.rng.integers(k)) for _ in range(4)], int(self.rng.integers(2))
        out = []
        for at, size in enumerate((h, w)):
            whole = size + pads[at] + pads[at + 2] - k
            count = (-(-whole // stride) if ceil else whole // stride) + 1
            # A last window that starts in the padding: ONNX's shape inference counts it, ONNX Runtime does not.
            out.append(count if (count - 1) * stride < size + pads[at] else 0)
        if min(out) < 1 or min(h, w) < k:
            return
        more = {"count_include_pad": int(self.rng.integers(2))} if op == "AveragePool" else {}
        self.add(
            op, [x], (n, c, out[0], out[1]), kernel_shape=[k, k], strides=[stride] * 2, pads=pads, ceil_mode=ceil, **more
        )  # fmt: skip

    def model(self) -> onnx.ModelProto:
        """The last value, what nothing reads and some that are read are outputs."""
        read = {name for node in self.nodes for name in node.input}
        made = [name for name in self.values if name != "x"]
        outputs = [name for name in made if name not in read or self.rng.random() < 0.15]

        def info(name: str) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, self.values[name])

        graph = helper.make_graph(
            self.nodes, "g", [info("x")], [info(name) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("seed", range(40))
def test_random_graph(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCHW, and for every other graph channels last, which a runner tries on a GPU only."""
    if seed % 2:
        monkeypatch.setattr(torch_runner, "Builder", lambda owner, _: Builder(owner, "nhwc"))
    grown = Graph(np.random.default_rng(seed))
    while len(grown.nodes) < 14:
        grown.grow()
    path = saved(grown.model(), tmp_path)
    runner = torch_runner.load_torch(path, device="cpu")
    rng = np.random.default_rng(seed + 1000)
    for _ in range(2):  # the second run finds what the first did to constants
        x = rng.standard_normal((2, 4, 7, 6)).astype(np.float32)
        array = torch.from_numpy(x.copy())
        got, expected = runner.run({"x": array}), run_file(path, {"x": x})
        assert list(got) == list(expected)
        for name, want in expected.items():
            np.testing.assert_allclose(got[name].numpy(), want, rtol=0, atol=1e-4 * max(1.0, np.abs(want).max()))
        np.testing.assert_array_equal(array.numpy(), x)
