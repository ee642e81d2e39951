"""Every field of a request is honoured, as a test proves, or refused, or of no concern to a decoder.

A field that a new SGLang adds fails the first test until somebody classifies it.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.requests.validate import (
    BY_SAMPLER,
    BY_SGLANG,
    INTERNAL,
    REFUSED_OUTPUTS,
    REFUSED_PARAMS,
    REFUSED_POSITIONS,
)

TESTS = Path(__file__).parents[1]

# Field -> the test that compares it with a server without speculation, or shows that it is refused.
PROVEN = {
    "rid": "e2e/test_pool.py::test_abort_in_mid_stream",
    "text": "contract/test_bad_requests.py::test_what_a_greedy_request_does_not_heed",
    "input_ids": "e2e/test_lossless.py::test_concurrent_requests_of_mixed_lengths",
    "input_embeds": "e2e/test_embeddings.py::test_input_embeddings",
    "return_logprob": "e2e/test_requests.py::test_log_probabilities",
    "logprob_start_len": "e2e/test_requests.py::test_log_probabilities",
    "top_logprobs_num": "e2e/test_requests.py::test_log_probabilities",
    "token_ids_logprob": "e2e/test_requests.py::test_log_probabilities",
    "return_text_in_logprobs": "e2e/test_requests.py::test_openai_log_probabilities",
    "stream": "e2e/test_http_api.py::test_stream_adds_up_to_the_whole_answer",
    "return_hidden_states": "e2e/test_requests.py::test_hidden_states",
    "session_params": "e2e/test_features.py::test_session",
    "custom_logit_processor": "e2e/test_requests.py::test_adjusted_logits",
    "priority": "e2e/test_features.py::test_priorities",
    "require_reasoning": "e2e/test_chat.py::test_reasoning",
    "return_sampling_mask": "contract/test_bad_requests.py::test_unsupported_is_refused_by_name",
    "return_routed_experts": "contract/test_bad_requests.py::test_unsupported_is_refused_by_name",
    "return_indexer_topk": "contract/test_bad_requests.py::test_unsupported_is_refused_by_name",
    "multi_item_delimiter_indices": "contract/test_bad_requests.py::test_scoring_at_some_tokens_is_refused",
    "token_indices_to_pool": "contract/test_bad_requests.py::test_scoring_at_some_tokens_is_refused",
    "lora_path": "contract/test_bad_requests.py::test_malformed_is_refused",
    "watermark": "contract/test_bad_requests.py::test_unsupported_is_refused_by_name",
    "cache_salt": "contract/test_bad_requests.py::test_what_a_greedy_request_does_not_heed",
    # Sampling parameters.
    "max_new_tokens": "e2e/test_lossless.py::test_few_tokens",
    "stop": "e2e/test_stopping.py::test_stop_string_inside_a_block",
    "stop_token_ids": "e2e/test_stopping.py::test_stop_token_inside_a_block",
    "stop_regex": "contract/test_bad_requests.py::test_stop_regex_is_honoured",
    "n": "e2e/test_pool.py::test_parallel_samples",
    "ignore_eos": "e2e/test_lossless.py::test_one_request",
    "skip_special_tokens": "e2e/test_features.py::test_detokenization",
    "spaces_between_special_tokens": "e2e/test_features.py::test_detokenization",
    "no_stop_trim": "e2e/test_features.py::test_detokenization",
    "stream_interval": "e2e/test_features.py::test_stream_interval",
    "temperature": "e2e/test_sampling.py::test_seeded",
    "top_k": "e2e/test_sampling.py::test_seeded",
    "top_p": "e2e/test_sampling.py::test_seeded",
    "min_p": "unit/test_sampling_distribution.py::test_distribution",
    "sampling_seed": "e2e/test_sampling.py::test_seeded",
    "frequency_penalty": "e2e/test_requests.py::test_adjusted_logits",
    "presence_penalty": "e2e/test_requests.py::test_adjusted_logits",
    "repetition_penalty": "e2e/test_requests.py::test_adjusted_logits",
    "min_new_tokens": "e2e/test_requests.py::test_adjusted_logits",
    "logit_bias": "e2e/test_requests.py::test_adjusted_logits",
    "custom_params": "e2e/test_requests.py::test_adjusted_logits",
    "json_schema": "e2e/test_requests.py::test_grammars",
    "regex": "e2e/test_requests.py::test_grammars",
    "ebnf": "e2e/test_requests.py::test_grammars",
    "structural_tag": "e2e/test_requests.py::test_grammars",
    "beam_width": "contract/test_bad_requests.py::test_unsupported_is_refused_by_name",
}
# The front end interprets these fields, or formats, counts, logs and routes by them. The scheduler's batches lack them.
OF_THE_FRONT_END = {
    "sampling_params",
    "session_id",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_bytes",
    "return_prompt_token_ids",
    "return_entropy",
    "log_metrics",
    "no_logs",
    "custom_labels",
    "external_trace_header",
    "received_time",
    "http_worker_ipc",
    "background",
    "conversation_id",
    # It selects the parser of a grammar; requests over HTTP cannot set it.
    "ebnf_full_assistant",
    "routing_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "lora_id",
}
# Parts of the prompt: they affect the target's prefill, and the drafter only sees the features of a prompt.
OF_THE_PROMPT = {
    "image_data",
    "video_data",
    "audio_data",
    "mm_hashes",
    "use_audio_in_video",
    "modalities",
    "positional_embed_overrides",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "mm_content_hashes",
    "mm_processor_kwargs",
    "video_config",
    "encoder_urls",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "image_max_dynamic_patch",
    "video_max_dynamic_patch",
    "images_config",
    # They decide which prompts share a prefix in the radix cache.
    "extra_key",
}
# Fields without effect unless the server has a flag that DFLASH refuses (`refusals.UNSUPPORTED`), or without an output
# that DFLASH refuses.
OF_WHAT_IS_REFUSED = {
    "sampling_logprobs_mode",
    "kv_hints",
    "routed_experts_start_len",
    "max_thinking_tokens",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
}


def test_every_field_is_classified():
    classified = [*PROVEN, *OF_THE_FRONT_END, *OF_THE_PROMPT, *OF_WHAT_IS_REFUSED, *INTERNAL]
    assert len(set(classified)) == len(classified)
    fields = {field.name for field in dataclasses.fields(GenerateReqInput)}
    sampling = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(classified) == fields | sampling
    assert sampling == {*BY_SGLANG, *BY_SAMPLER, *REFUSED_PARAMS, *INTERNAL}
    assert {*REFUSED_OUTPUTS, *REFUSED_PARAMS, *REFUSED_POSITIONS} < set(PROVEN)


def test_every_proof_exists():
    for proof in PROVEN.values():
        file, name = proof.split("::")
        functions = {
            node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, proof
