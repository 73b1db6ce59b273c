"""The sparse convolution: nodes, launch plans, kernels and their weight formats. Knows CUDA, knows no ONNX graph."""
