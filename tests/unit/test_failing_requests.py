"""Failing requests whose fate SGLang's scheduler decides."""

from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.requests.failing import fail_prefilled
from sglang_dflash.verify.failures import Failures


def test_a_prefill_that_was_thrown_away():
    """The prefill after a retraction may succeed, so an error of the first prefill must not end the request."""
    kept, retracted = (Req(rid, "", [0, 1], SamplingParams(max_new_tokens=9)) for rid in ("kept", "retracted"))
    retracted.is_retracted = True
    batch = SimpleNamespace(reqs=[kept, retracted], spec_algorithm=SpeculativeAlgorithm.DFLASH)
    failures = Failures.of(torch.ones(2, 1, dtype=torch.bool), None, {})

    fail_prefilled(None, batch, SimpleNamespace(extra_keep_alive_refs=[failures]))

    assert kept.discard_output_reason.message == "The target's logits are not numbers."
    assert retracted.discard_output_reason is None
