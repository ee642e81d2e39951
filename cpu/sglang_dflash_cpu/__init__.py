"""Serve SGLang and sglang-dflash on a machine without a GPU, for tests and trials."""
