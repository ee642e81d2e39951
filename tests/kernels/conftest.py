"""Fixtures of kernel tests. Kernels run on a GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it on import, which must come later: run this folder in its own process.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def patch_triton_once():
    """Make the interpreter patch Triton's language once, not in every call of a device function, which takes long."""
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
