"""Triton kernels; each has a torch twin of the same name and signature in `sglang_dflash.ops.reference`."""
