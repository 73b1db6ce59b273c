"""TensorRT 10 as fake_trt plays it."""

import fake_trt
from fake_trt import *  # noqa: F403

fake_trt.MAGIC = b"ftrt"
__version__ = "10.14.1.48"
