"""The CUDA backend: CUDA C++ kernels compiled by NVRTC, every device byte from the injected memory resource.

Nothing outside of this package imports it but the composition root, and that only when the device is a CUDA
one.
"""
