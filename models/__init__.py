"""Reference networks as code, sparsity recipes, and the shapes that tests and benchmarks share. No weights in git."""
