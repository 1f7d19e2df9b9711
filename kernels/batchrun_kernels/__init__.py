"""Triton kernels of the batchrun engine, each in its own module beside the torch function that it must equal.

The package itself imports nothing, so it can be imported where Triton is not installed; its modules need Triton.
"""
