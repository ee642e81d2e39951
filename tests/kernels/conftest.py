"""Fixtures of kernel tests. Kernels run on a GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it on import, which must come later: run this folder in its own process.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter():
    if DEVICE == "cpu":
        # It imports Triton.
        from support.interpreter import speed_up

        speed_up()


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
