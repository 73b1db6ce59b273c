"""Kernels compiled from the weights: PTX emitter, reader and interpreter."""
