"""A drafter in float8: the text is the target's, up to ties, with nearly the acceptance of the unquantised drafter."""

import pytest
from checkpoints import CONFIG, quantized_dynamic, tensors, write_both
from engines import tiny
from pairs import CPU_TOKENS_PER_CYCLE, TIE, check_texts, pair_calls, plain_answers
from support.quantized import block_config, linear_layers, quantize


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("quantized-drafter")
@pytest.mark.parametrize(("shape", "backend"), [("chains", "flashinfer"), ("trees", "fa3")])
def test_text(shape, backend, engines, prompts):
    calls = pair_calls(prompts)
    of_plain, _ = plain_answers(engines, backend, prompts)
    rates = {}
    for quantization in (None, "fp8"):
        flags = {"attention_backend": backend, "speculative_draft_model_quantization": quantization}
        config = tiny(f"drafter-{quantization}-{shape}-{backend}", shape, **flags)
        compared, rates[quantization] = check_texts(engines, config, of_plain, calls)
        compared.assert_ties(TIE)
    assert rates["fp8"] > 0.95 * rates[None]


def quantized_blocks(path):
    """Write float8 in blocks of 128 x 128, and the weights that it stands for."""
    layers = [name for name in linear_layers(tensors()) if name != "fc"]
    config = CONFIG | {"quantization_config": block_config(["fc"])}
    return write_both(path, config, *quantize(tensors(), layers, "block", inverse=True))


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("quantized-drafter-checkpoints")
@pytest.mark.parametrize("writer", [quantized_dynamic, quantized_blocks])
def test_checkpoints(writer, engines, prompts, tmp_path):
    checkpoint, _ = writer(tmp_path / "drafter")
    of_plain, _ = plain_answers(engines, "fa3", prompts)
    flags = {"attention_backend": "fa3", "speculative_draft_model_path": str(checkpoint)}
    config = tiny(f"drafter-{writer.__name__}", "chains", **flags)
    compared, rate = check_texts(engines, config, of_plain, pair_calls(prompts))
    compared.assert_ties(TIE)
    assert rate > 0.9 * CPU_TOKENS_PER_CYCLE["chains"]
