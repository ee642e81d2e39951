"""A target that is not a Qwen3, with random weights and drafts that are its own text but for one in ten."""

import pytest
from serving import DEVICE_ENV
from support.targets import assert_exact, generate

pytestmark = pytest.mark.cpu(reason="tests/gpu/test_target_classes.py does the same with every class")

ENGINE = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 8192, "max_running_requests": 8}


# Of the classes that SGLang has on a CPU, the one that takes a hook of its own.
@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_exact(name, tmp_path):
    # Trees of more nodes than a block has rows; chains of this class are compared in tests/gpu.
    assert_exact(generate(tmp_path, name, "float32", ENGINE, DEVICE_ENV, num_nodes=24))
