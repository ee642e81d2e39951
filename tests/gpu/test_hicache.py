"""KV that comes back from host memory and files, by SGLang's copy kernels and beside graphs: text and acceptance.

Without the drafter's KV the text is the same, and drafts are worse.
"""

from dataclasses import replace

import pytest
from engines import greedy, tiny
from pairs import TIE
from support.stored_kv import PAGE_SIZE, long_texts, stored_lens, wait_until_stored
from support.ties import compare, tokens_per_cycle

# Nine prompts of several hundred tokens do not fit.
FLAGS = {"attention_backend": "fa3", "max_total_tokens": 2100}
HOST = FLAGS | {"enable_hierarchical_cache": True, "hicache_ratio": 6}
NEW_TOKENS = 60


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["chains", "trees"])
def test_prompts_come_back(shape, engines, prompts):
    texts = long_texts(prompts, 9)
    asked = [greedy([text], NEW_TOKENS, flush=i == 0) for i, text in enumerate(texts)]
    # Alone, and beside others whose KV is evicted meanwhile.
    asked += [greedy([text], NEW_TOKENS) for text in texts[:3]] + [greedy(texts[:8], NEW_TOKENS)]
    plain = engines.reference(tiny("hicache-plain", **FLAGS), asked)
    answers = engines.ask(tiny(f"hicache-{shape}", shape, **HOST), asked)

    compared = compare(sum(plain, []), sum(answers, []))
    first, alone, [together] = sum(answers[:9], []), sum(answers[9:12], []), answers[12:]
    rates = [tokens_per_cycle(part) for part in (first[:3], alone, first[:8], together)]
    print(f"\nhicache, {shape}: {compared}, tokens per cycle at first and again: {rates}")
    compared.assert_ties(TIE)
    for text, answer in zip(texts, alone):
        assert answer["meta_info"]["cached_tokens"] >= len(text) - 64
        assert answer["meta_info"]["cached_tokens_details"]["host"] > 0
    # Prompts from the cache are rounded otherwise, so some texts part.
    assert rates[1] > 0.85 * rates[0]
    assert rates[3] > 0.9 * rates[2]


@pytest.mark.gpu
@pytest.mark.group("hicache-files")
def test_prompts_come_back_from_files(engines, prompts, tmp_path):
    texts = long_texts(prompts, 3)
    asked = [greedy([text], NEW_TOKENS) for text in texts]
    files = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
    config = tiny("hicache-files", "trees", page_size=PAGE_SIZE, **HOST, **files)
    config = replace(config, env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)})
    plain = engines.reference(tiny("hicache-plain", **FLAGS), asked)
    first = engines.ask(config, asked)
    wait_until_stored(tmp_path, texts)
    engines.stop()
    again = engines.ask(config, asked)

    first, again = sum(first, []), sum(again, [])
    stored = [answer["meta_info"]["cached_tokens_details"]["storage"] for answer in again]
    compared = compare(sum(plain, []), again)
    rates = [tokens_per_cycle(answers) for answers in (first, again)]
    print(f"\nhicache-files: {compared}, {stored} tokens from files, tokens per cycle at first and again: {rates}")
    compared.assert_ties(TIE)
    assert stored == stored_lens(texts)
    assert rates[1] > 0.9 * rates[0]
