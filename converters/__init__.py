"""A model file in, a clean graph out: knows ONNX, knows no device and no CUDA."""
