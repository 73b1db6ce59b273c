"""What runs a model: PyTorch, ONNX Runtime, TensorRT engines. The protocol is sparsedeploy.runtime."""
