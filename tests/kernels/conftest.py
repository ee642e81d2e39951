"""Kernels run on the GPU where there is one, else through Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when Triton is imported, which must not have happened yet: run this folder in a process of its own.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def patch_triton_once():
    """The interpreter patches Triton's language again at every call of a device function, most of the time it takes."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
