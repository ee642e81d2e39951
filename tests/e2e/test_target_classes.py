"""A target of another class than Qwen3, with random weights and drafts that are its own text, one in ten wrong."""

import pytest
from serving import DEVICE_ENV
from support.targets import assert_exact, generate

pytestmark = pytest.mark.cpu(reason="tests/gpu/test_target_classes.py does the same with every class")

ENGINE = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 8192, "max_running_requests": 8}


# Of the classes that SGLang supports on a CPU, the one that needs its own hook.
@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_exact(name, tmp_path):
    # Trees have more nodes than a block has tokens. Chains of this class are compared in tests/gpu.
    assert_exact(generate(tmp_path, name, "float32", ENGINE, DEVICE_ENV, num_nodes=24))
