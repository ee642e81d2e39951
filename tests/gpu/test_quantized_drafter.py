"""A drafter in float8: the text is the target's, up to ties, with nearly the acceptance of the unquantised drafter."""

import pytest
from engines import tiny
from pairs import TIE, check_texts, pair_calls, plain_answers


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
