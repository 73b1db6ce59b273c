"""TensorRT-RTX as fake_trt plays it."""

from fake_trt import *  # noqa: F403
from fake_trt import FAULT

__version__ = "1.6.1.120" if FAULT == "old" else "1.7.1.116"
