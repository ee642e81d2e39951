"""Tokens that the scheduler refuses. Front ends that check less hand them to it (`tests/e2e/test_smg_grpc.py`)."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_dflash.requests.received import refuse_request
from sglang_dflash.requests.validate import REFUSED_OUTPUTS

# Prompt, and the token that is named.
CASES = {
    "first and last": ([0, 1023], None),
    "after the last": ([5, 1024, 2000], 1024),
    "before the first": ([5, 6, -1], -1),
    "more than 32 bits": ([2**32 + 5], 2**32 + 5),
    "none": ([], "is empty"),
}


def request(prompt: list[int], images=None) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        vocab_size=1024,
        multimodal_inputs=images,
        sampling_params=SimpleNamespace(min_p=0),
        custom_logit_processor=None,
        **dict.fromkeys(REFUSED_OUTPUTS, False),
    )


@pytest.mark.parametrize("case", CASES)
def test_tokens(case):
    prompt, named = CASES[case]
    message = refuse_request(request(prompt), enable_overlap=True)
    if named is None:
        assert message is None
    else:
        assert message.startswith("input_ids ") and f" {named}" in message


def test_hashes_of_images():
    assert refuse_request(request([5, 2**40], images=object()), enable_overlap=True) is None
