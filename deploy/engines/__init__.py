"""TensorRT: building, describing and loading engines, and what builds them elsewhere (trtexec, Triton)."""
