"""Kernels run on the GPU where there is one, else through Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when Triton is imported, which must not have happened yet: run this folder in a process of its own.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
