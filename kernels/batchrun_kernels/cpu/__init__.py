"""Kernels for the CPU in numba: compiled at first use without a compiler on the machine, then kept on disk.

They run on the thread that calls them and release the GIL. numba's own thread pool is not used: next to
torch's, both spin for work on the same cores and a step gets many times slower.
"""
