"""Scheduling of running requests on fa3 and flashinfer in bf16: the text is the target's own.

Prompts are prefilled in chunks, some from the radix cache. Requests are retracted every few steps, aborted, or run into
the context limit while others continue. One Engine with DFLASH goes through all of it. One without speculation answers
the same requests undisturbed.
"""

from dataclasses import replace

import pytest
from engines import ADAPTIVE, ON_CPU, RETRACTED, tiny
from pairs import CONTEXT, TIE, flat, pair_calls, plain_answers, scheduling_calls
from support.ties import MARGIN, compare, tokens_per_cycle

ABORTED = [1, 2, 5]
# Identical answers of the 37 that are not aborted.
USUAL = {
    ("chains", "fa3", 64): 36,
    ("chains", "flashinfer", 1): 26,
    ("trees", "fa3", 1): 24,
    ("trees", "fa3", 64): 24,
    ("trees", "flashinfer", 16): 22,
    ("trees", "triton", 1): 22,
}


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("features-{backend}-{shape}")
@pytest.mark.parametrize(("shape", "backend", "page_size"), USUAL)
def test_text(backend, shape, page_size, engines, prompts):
    _, of_plain = plain_answers(engines, backend, prompts)
    asked = scheduling_calls(prompts)
    # It is about another pool.
    del asked["into a full pool"], of_plain[-1]
    asked["beside aborted ones"]["abort"] = ABORTED
    flags = {"attention_backend": backend, "context_length": CONTEXT, "chunked_prefill_size": 128}
    # There each prefill has one CUDA graph by default.
    flags["disable_prefill_cuda_graph"] = (backend, page_size) != ("fa3", 1)
    config = tiny(f"features-{backend}-{shape}-{page_size}", shape, page_size=page_size, **flags)
    config = replace(config, env=RETRACTED)
    answers = engines.ask(config, list(asked.values()))
    assert engines.describe(config)["worker"] == "DFlashWorker"

    retractions, every = 0, []
    for (name, call), plain_ones, ours in zip(asked.items(), of_plain, answers, strict=True):
        is_aborted = call.get("abort", [])
        for i, (want, got) in enumerate(zip(plain_ones, ours, strict=True)):
            reason = got["meta_info"]["finish_reason"]["type"]
            assert reason == ("abort" if i in is_aborted else "length"), name
            # SGLang ends an answer two tokens before the limit.
            full = min(len(want["output_ids"]), CONTEXT - 2 - len(call["input_ids"][i]))
            assert i in is_aborted or len(got["output_ids"]) == full
            retractions += got["meta_info"].get("num_retractions", 0)
        kept = [i for i in range(len(ours)) if i not in is_aborted]
        every.append(compare([plain_ones[i] for i in kept], [ours[i] for i in kept]))
        compare(plain_ones, ours).assert_ties(TIE)
        cached = sum(got["meta_info"]["cached_tokens"] for got in ours)
        print(f"\n{config}, {name}: {every[-1]}, {tokens_per_cycle(ours):.2f} tokens per cycle, {cached} tokens cached")
        assert name != "again" or cached > 0
    identical, total = sum(c.identical for c in every), sum(c.total for c in every)
    print(f"{identical} of {total} identical, {retractions} retractions")
    assert retractions > 0
    assert identical >= USUAL[shape, backend, page_size] - MARGIN * total


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("features-full-pool")
@pytest.mark.parametrize("shape", ["trees"])
def test_full_pool_of_few_tokens(shape, engines, prompts):
    """SGLang retracts requests when there are no KV slots for their next tree, without being told to."""
    # Requests are admitted as if they ended at once, unless they ignore the end of text.
    flags = {"max_total_tokens": 704, "schedule_conservativeness": 0.05, "attention_backend": "fa3"}
    *_, of_plain = plain_answers(engines, "fa3", prompts)[1]
    asked = scheduling_calls(prompts)["into a full pool"]
    for sampling in asked["sampling_params"]:
        sampling["ignore_eos"] = False
    config = tiny("features-full-pool", shape, **flags)
    [answers] = engines.ask(config, [asked])
    compared = compare(of_plain, answers)
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    print(f"\n{compared}, {retractions} retractions")
    assert retractions > 0
    assert sum(len(answer["output_ids"]) for answer in answers) > 1000
    compared.assert_ties(TIE)


@pytest.mark.gpu
@pytest.mark.skipif(ON_CPU, reason="a CPU chooses other lengths")
@pytest.mark.group("features-full-pool")
def test_adaptive_trees_with_requests_of_sglangs_sampler(engines, prompts):
    """Draft lengths are chosen by measured costs, while half of the requests have chains."""
    of_plain, _ = plain_answers(engines, "fa3", prompts)
    config = tiny("adaptive-mixed", "trees", attention_backend="fa3", **ADAPTIVE)
    # SGLang's sampler has the log probabilities.
    calls = [
        call | {"return_logprob": [i % 2 == 1 for i in range(len(call["input_ids"]))]} for call in pair_calls(prompts)
    ]
    answers = flat(engines.ask(config, calls))
    compared = compare(of_plain, answers)
    lengths = engines.describe(config)["blocks_by_verified_rows"]
    print(f"\n{compared}, {tokens_per_cycle(answers):.2f} tokens per cycle, {lengths}")
    compared.assert_ties(TIE)
    assert tokens_per_cycle(answers) > 3
