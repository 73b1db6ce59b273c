"""sparsedeploy: make the zeros of a pruned CNN pay on NVIDIA devices."""

__version__ = "0.1.0"
