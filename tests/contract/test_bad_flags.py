"""Flags that DFLASH cannot honour: no server starts, and one sentence names the flag and its value. Those that it can
honour are accepted, and what it changes is logged."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from resolving import DEVICE_ARGS, ON_CPU, asked, drafter_with, refusal, resolve
from safetensors.torch import save_file
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.engine import simulate, transfer
from sglang_dflash.errors import ConfigError
from sglang_dflash.requests import admin
from sglang_dflash.server_args import pair
from sglang_dflash.server_args.arguments import is_dflash
from sglang_dflash.server_args.backends import DRAFT_BACKENDS, draft_attention_backend
from sglang_dflash.server_args.refusals import (
    IGNORED,
    IGNORED_PREFIXES,
    UNSUPPORTED,
    check_disaggregation,
    check_host_cache,
    check_storage,
)


def test_good_arguments():
    args = resolve()
    assert args.speculative_num_draft_tokens == 16
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)


BLOCK_SIZE_FLAGS = ["speculative_dflash_block_size", "speculative_num_draft_tokens"]


@pytest.mark.parametrize("flag", BLOCK_SIZE_FLAGS)
@pytest.mark.parametrize("value", [-1, 0, 1, 17, 32])
def test_block_size(flag, value):
    message = refusal(**{flag: value})
    assert message.startswith(f"--{flag.replace('_', '-')} {value}:")
    assert "at least 2" in message and "at most 16" in message
    assert "With --speculative-eagle-topk 16, --speculative-num-draft-tokens is the number of nodes" in message


def test_block_sizes_contradict():
    message = refusal(speculative_dflash_block_size=8, speculative_num_draft_tokens=4)
    assert "--speculative-dflash-block-size 8 and --speculative-num-draft-tokens 4 contradict" in message


@pytest.mark.parametrize("flags", [BLOCK_SIZE_FLAGS[:1], BLOCK_SIZE_FLAGS[1:], BLOCK_SIZE_FLAGS])
def test_smaller_block_size_is_served_and_logged(flags, caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dflash.server_args"):
        args = resolve(**dict.fromkeys(flags, 8))
    assert args.speculative_num_draft_tokens == 8
    lines = [record.getMessage() for record in caplog.records if "blocks of" in record.getMessage()]
    assert lines == ["DFLASH serves blocks of 8; the drafter was trained with 16."]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("speculative_num_steps", 3),
        ("speculative_num_steps", 0),
        ("speculative_eagle_topk", 0),
        ("speculative_eagle_topk", 17),
    ],
)
def test_eagle_shape(flag, value):
    assert refusal(**{flag: value}).startswith(f"--{flag.replace('_', '-')} {value}:")


def test_eagle_shape_of_one_is_accepted():
    assert resolve(speculative_num_steps=1, speculative_eagle_topk=1).speculative_num_steps == 1


# Flags beside --speculative-eagle-topk, and what comes of them: the block size, and the nodes of a tree.
TREES = [
    ({}, (16, 16)),
    ({"speculative_num_draft_tokens": 64}, (16, 64)),
    # No path is longer than its tree.
    ({"speculative_num_draft_tokens": 4}, (4, 4)),
    ({"speculative_dflash_block_size": 8}, (8, 8)),
    ({"speculative_dflash_block_size": 8, "speculative_num_draft_tokens": 24}, (8, 24)),
]


@pytest.mark.parametrize("num_candidates", [2, 16])
@pytest.mark.parametrize(("flags", "sizes"), TREES)
def test_trees(num_candidates, flags, sizes):
    args = resolve(speculative_eagle_topk=num_candidates, **flags)
    assert (args.speculative_dflash_block_size, args.speculative_num_draft_tokens) == sizes


@pytest.mark.parametrize("num_nodes", [-1, 0, 3, 65])
def test_trees_of_too_few_or_too_many_nodes(num_nodes):
    message = refusal(speculative_eagle_topk=8, speculative_num_draft_tokens=num_nodes)
    assert message.startswith(f"--speculative-num-draft-tokens {num_nodes}:")
    assert "at least 4 and at most 64" in message


def test_trees_of_a_block_that_is_too_small():
    message = refusal(speculative_eagle_topk=8, speculative_dflash_block_size=3)
    assert message.startswith("--speculative-dflash-block-size 3 without --speculative-num-draft-tokens:")
    assert "at least 4 and at most 64" in message


@pytest.mark.parametrize("block_size", [1, 17])
def test_blocks_of_trees(block_size):
    """Beside trees, the other flag does not name the block."""
    message = refusal(
        speculative_eagle_topk=8, speculative_num_draft_tokens=16, speculative_dflash_block_size=block_size
    )
    assert message.startswith(f"--speculative-dflash-block-size {block_size}:")


def test_what_trees_do_not_go_with():
    message = refusal(speculative_eagle_topk=8, enable_deterministic_inference=True)
    assert message.startswith("--enable-deterministic-inference with --speculative-eagle-topk 8 is not supported:")


# Values that SGLang itself lets through to the point where speculation is resolved.
UNSUPPORTED_VALUES = {
    "pp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "attn_dp_size": 2,
    "elastic_ep_backend": "mooncake",
    "startup_weight_load_mode": "overlap",
    "debug_tensor_dump_output_folder": "dumps",
    "kv_canary": "log",
    "debug_cuda_graph": True,
    "weight_cache_mode": "client",
    "dllm_algorithm": "LowConfidence",
    "hicache_host_memory_mode": "buffer_only",
    "speculative_token_map": "map.pt",
    "speculative_accept_threshold_single": 0.0,
    "speculative_accept_threshold_acc": 0.5,
    "speculative_draft_sink_size": 4,
    "speculative_domino_candidate_pool_size": 0,
    "speculative_dsa_topk_backend": "torch",
    "speculative_moe_runner_backend": "triton",
    "speculative_moe_a2a_backend": "deepep",
    "decrypted_draft_config_file": "config.json",
    "spec_trace_dir": "traces",
    "uno_lora_path": "adapter",
    "speculative_ngram_capacity": 5,
    "speculative_dspark_block_size": 4,
    "decoupled_spec_role": "verifier",
}
# What such a flag needs beside it to be let through.
COMPANIONS = {
    "dcp_size": {"tp_size": 2},
    "attn_cp_size": {"tp_size": 2},
    "attn_dp_size": {"tp_size": 2},
    "enable_prefill_cp": {"cp_strategy": "zigzag"},
    "enable_dp_attention": {"tp_size": 2, "dp_size": 2},
    "enable_mis": {"attention_backend": "flashinfer"},
}


def test_unsupported_fields_exist():
    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    assert {*UNSUPPORTED, *IGNORED} <= fields
    for prefix in IGNORED_PREFIXES:
        assert any(field.startswith(prefix) for field in fields)


def test_every_field_of_speculation_is_decided_on():
    served = {
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_attention_backend",
        "speculative_draft_window_size",
        "speculative_attention_mode",
        "speculative_dflash_block_size",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_adaptive",
        "speculative_adaptive_config",
        "speculative_use_block_verification",
    }
    # Without a flag: SGLang sets them.
    internal = {"speculative_boundary_reduction", "_speculative_draft_quantization_explicitly_set"}
    fields = {field.name for field in msgspec.structs.fields(Spec)}
    refused = {name for name in fields if name in IGNORED or name.startswith(IGNORED_PREFIXES)}
    assert not served & refused
    assert fields == served | internal | refused
    speculative = {field.name for field in msgspec.structs.fields(ServerArgs) if "speculative" in field.name}
    assert speculative <= fields


@pytest.mark.parametrize("field", [*UNSUPPORTED, *IGNORED, *sorted(set(UNSUPPORTED_VALUES) - {*UNSUPPORTED, *IGNORED})])
def test_unsupported_flag(field):
    value = UNSUPPORTED_VALUES.get(field, True)
    message = refusal(**{field: value} | COMPANIONS.get(field, {}))
    flag = "--" + field.replace("_", "-")
    assert message == f"{flag} {value} is not supported with --speculative-algorithm DFLASH."


def test_application_of_tokenizer_workers(monkeypatch):
    # Set first, so that pytest removes it afterwards.
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "")
    monkeypatch.delenv("SGLANG_HTTP_SERVER_APP_PATH")
    resolve()
    assert "SGLANG_HTTP_SERVER_APP_PATH" not in os.environ
    assert resolve(tokenizer_worker_num=2).tokenizer_worker_num == 2
    assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == "sglang_dflash.requests.http_app:app"
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "mine:app")
    assert refusal(tokenizer_worker_num=2).startswith("SGLANG_HTTP_SERVER_APP_PATH=mine:app is not supported with ")


def test_classes_of_transformers():
    assert refusal(model_impl="transformers").startswith("--model-impl transformers is not supported")
    assert resolve(model_impl="sglang").model_impl == "sglang"


def test_grammars_that_know_no_blocks():
    assert refusal(grammar_backend="outlines").startswith("--grammar-backend outlines is not supported")
    assert resolve(grammar_backend="llguidance").grammar_backend == "llguidance"


@pytest.mark.parametrize(
    ("preferred", "message"),
    [
        ({"top_k": 1 << 40}, "top_k=1099511627776 is too large: the largest value is 2147483647."),
        ({"min_new_tokens": 5.5}, "min_new_tokens=5.5: "),
        ({"max_new_tokens": "7"}, "max_new_tokens='7': "),
        ({"beam_width": 2}, "beam_width=2 is not supported with DFLASH."),
        ({"top": 1}, "Unknown sampling parameter 'top'."),
        ({"stop_token_ids": [1024]}, "stop_token_ids has 1024: give an integer from 0 to 1023."),
        ([1], "sampling_params=[1] is not an object: give an object of sampling parameters."),
    ],
)
def test_preferred_sampling_params(preferred, message):
    """They would pass the check of requests, which are completed by them behind it."""
    flag = json.dumps(preferred)
    assert refusal(preferred_sampling_params=flag).startswith(f"--preferred-sampling-params {flag}: {message}")


def test_preferred_sampling_params_that_are_not_json():
    assert refusal(preferred_sampling_params="{").startswith("--preferred-sampling-params {: ")


def test_good_preferred_sampling_params():
    assert resolve(preferred_sampling_params='{"top_k": 20}').preferred_sampling_params == {"top_k": 20}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"rope_scaling": None}, "rope_scaling=None"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type='dynamic'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures=['Qwen3ForCausalLM']"),
    ],
)
def test_overrides_that_the_drafter_cannot_follow(overrides, field):
    message = refusal(json_model_override_args=json.dumps(overrides))
    assert message.startswith(f"--json-model-override-args is for the drafter, too. {field} in config.json of drafter ")


@pytest.mark.parametrize(
    ("constant", "value", "message"),
    [
        ("LEN", float("nan"), "SGLANG_SIMULATE_ACC_LEN=nan: expected a number."),
        ("METHOD", "foo", "SGLANG_SIMULATE_ACC_METHOD='foo': expected 'match-expected' or 'multinomial'."),
        ("TOKEN_MODE", "foo", "SGLANG_SIMULATE_ACC_TOKEN_MODE='foo': expected 'fixed' or 'real-draft-token'."),
    ],
)
def test_simulated_acceptance(monkeypatch, constant, value, message):
    monkeypatch.setattr(simulate, "SIMULATE_ACC_LEN", 3.0)
    assert isinstance(simulate.simulation(1, "cpu"), simulate.FixedLength)
    monkeypatch.setattr(simulate, f"SIMULATE_ACC_{constant}", value)
    with pytest.raises(ConfigError) as caught:
        simulate.simulation(1, "cpu")
    assert str(caught.value) == message


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Drafts of one answer of two tokens, for a server that reads them."""
    tensors = {
        "answers": torch.tensor([[7, 8, 9, 900, 11]], dtype=torch.int32),
        "num_tokens": torch.tensor([2]),
        "candidates": torch.full((1, 2, 2, 4), 30, dtype=torch.uint16),
        "sixteenths": torch.zeros((1, 2, 2, 4), dtype=torch.uint8),
    }
    file = tmp_path / "drafts.safetensors"
    save_file(tensors, file)
    monkeypatch.setenv(simulate.RECORDED_DRAFTS, str(file))
    return file


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "num_candidates", "has_pairs", "reason"),
    [
        (901, 3, 4, False, "drafts per block 3 is above 2."),
        (901, 2, 8, False, "candidates 8 is above 4."),
        (901, 2, 4, True, "not for drafters that score pairs of drafts."),
        (900, 2, 4, False, "token 900 is above 899."),
    ],
)
def test_recorded_drafts_that_a_server_cannot_use(recorded, vocab_size, num_drafts, num_candidates, has_pairs, reason):
    simulation = simulate.simulation(1, "cpu")
    simulation.check(901, 2, 4, has_pairs=False)
    with pytest.raises(ConfigError) as caught:
        simulation.check(vocab_size, num_drafts, num_candidates, has_pairs)
    assert str(caught.value) == f"SGLANG_DFLASH_RECORDED_DRAFTS={recorded}: {reason}"


def test_bad_files_of_recorded_drafts(recorded, monkeypatch):
    def message() -> str:
        with pytest.raises(ConfigError) as caught:
            simulate.simulation(1, "cpu")
        return str(caught.value)

    monkeypatch.setattr(simulate, "SIMULATE_ACC_LEN", 3.0)
    assert message() == f"SGLANG_SIMULATE_ACC_LEN=3.0 and SGLANG_DFLASH_RECORDED_DRAFTS={recorded}: unset one."
    monkeypatch.setattr(simulate, "SIMULATE_ACC_LEN", 0.0)
    save_file({"answers": torch.zeros(1)}, recorded)
    expected = "['answers', 'candidates', 'num_tokens', 'sixteenths']"
    assert message() == f"SGLANG_DFLASH_RECORDED_DRAFTS={recorded}: has ['answers'], expected {expected}."
    recorded.write_bytes(b"no tensors")
    assert message().startswith(f"SGLANG_DFLASH_RECORDED_DRAFTS={recorded}: ")
    recorded.unlink()
    assert message().startswith(f"SGLANG_DFLASH_RECORDED_DRAFTS={recorded}: ")


@pytest.mark.parametrize("field", ["enable_two_batch_overlap", "enable_hisparse", "enable_lora", "lora_paths"])
def test_flag_that_is_off_is_accepted(field):
    resolve(**{field: [] if field == "lora_paths" else False})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative_draft_model_quantization": "awq"}, "--speculative-draft-model-quantization awq"),
        (
            {"quantization": "fp8", "speculative_draft_model_quantization": "w8a8_int8"},
            "--speculative-draft-model-quantization w8a8_int8",
        ),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        (
            {"speculative_draft_attention_backend": "flashmla"},
            "--speculative-draft-attention-backend flashmla: DFLASH's drafter runs on",
        ),
        (
            {"speculative_draft_attention_backend": "no-such"},
            "--speculative-draft-attention-backend no-such: DFLASH's drafter runs on",
        ),
    ],
)
def test_drafter_flags(flags, named):
    assert named in refusal(**flags)


@pytest.mark.parametrize("flags", [{}, {"speculative_draft_model_quantization": "unquant"}])
def test_unquantised_drafter_of_a_quantised_target(flags):
    server_args = asked(quantization="fp8", **flags)

    assert ModelConfig.from_server_args(server_args).quantization == "fp8"
    assert ModelConfig.from_server_args(server_args, str(DRAFTER_DIR), is_draft_model=True).quantization is None


def test_quantised_drafter():
    server_args = asked(speculative_draft_model_quantization="fp8")

    assert ModelConfig.from_server_args(server_args).quantization is None
    assert ModelConfig.from_server_args(server_args, str(DRAFTER_DIR), is_draft_model=True).quantization == "fp8"


KV_DTYPE_FLAGS = ["kv_cache_dtype", "speculative_draft_kv_cache_dtype"]


@pytest.mark.parametrize("flag", KV_DTYPE_FLAGS)
@pytest.mark.parametrize("dtype", ["auto", "bf16"] if ON_CPU else ["auto", "bf16", "fp8_e4m3"])
def test_kv_dtype(flag, dtype):
    assert getattr(resolve(**{flag: dtype}), flag) == dtype


@pytest.mark.skipif(not ON_CPU, reason="a GPU has it")
@pytest.mark.parametrize("flag", KV_DTYPE_FLAGS)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_kv_dtype_that_the_cpu_does_not_have(flag, dtype):
    assert refusal(**{flag: dtype}).startswith(f"--{flag.replace('_', '-')} {dtype}:")


@pytest.mark.parametrize("flag", KV_DTYPE_FLAGS)
def test_kv_dtype_that_the_drafters_backend_cannot_read(flag):
    """On a machine without a GPU, the device changes once everything else is resolved."""
    args = asked()
    declare_resolution(args, "test", device="cuda", speculative_draft_attention_backend="fa3", **{flag: "fp8_e4m3"})
    assert draft_attention_backend(args, DRAFT_BACKENDS["cuda"]) == "fa3"
    declare_resolution(args, "test", **{flag: "fp8_e5m2"})
    with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')} fp8_e5m2.*backend flashinfer or triton"):
        draft_attention_backend(args, DRAFT_BACKENDS["cuda"])


def test_drafters_own_kv_dtype_counts():
    args = asked()
    own = {"kv_cache_dtype": "fp8_e5m2", "speculative_draft_kv_cache_dtype": "bf16"}
    declare_resolution(args, "test", device="cuda", speculative_draft_attention_backend="fa3", **own)
    assert draft_attention_backend(args, DRAFT_BACKENDS["cuda"]) == "fa3"


@pytest.mark.parametrize("window", [0, -5])
def test_draft_window_size(window):
    assert f"--speculative-draft-window-size must be at least 1, got {window}" in refusal(
        speculative_draft_window_size=window
    )


@pytest.mark.parametrize(
    "flags", [{"cuda_graph_backend_decode": "breakable"}, {"cuda_graph_config": {"decode": {"backend": "breakable"}}}]
)
def test_graphs_in_pieces(flags):
    message = refusal(attention_backend="triton", **flags)
    assert message.startswith("--cuda-graph-backend-decode breakable:")


LORA = {
    "--enable-lora": {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj"]},
    "--lora-paths": {"lora_paths": ["adapter"]},
}


@pytest.mark.parametrize("flag", LORA)
def test_adapters(flag):
    asks = LORA[flag]
    resolve(**asks)
    assert refusal(**asks, speculative_adaptive=True).startswith(f"{flag} with --speculative-adaptive is not supported")
    message = refusal(**asks, lora_backend="triton_v2")
    assert message.startswith(f"{flag} with --lora-backend triton_v2 is not supported")
    # Paths that are ignored.
    assert not resolve(**asks | {"enable_lora": False}, speculative_adaptive=True).enable_lora


def test_hierarchical_cache():
    args = asked(enable_hierarchical_cache=True, hicache_io_backend="direct", hicache_mem_layout="layer_first")
    drafter, facts = pair.load_drafter_config(args), pair.target_facts(args)
    for target, named in (
        (replace(facts, is_recurrent=True), "recurrent layers"),
        (replace(facts, num_layers=2), "num_hidden_layers=3, and the target only 2"),
    ):
        with pytest.raises(ConfigError, match=named) as caught:
            check_host_cache(args, drafter, target)
        assert str(caught.value).startswith("--enable-hierarchical-cache")
        check_host_cache(asked(), drafter, target)


def test_storage_of_a_target_with_latent_attention():
    """Whoever attaches a storage later gets the same message."""
    latent, others = (SimpleNamespace(attention_arch=arch) for arch in (AttentionArch.MLA, AttentionArch.MHA))
    for served in ((None, latent, 2), ("mooncake", latent, 2), ("file", latent, 1), ("file", others, 2)):
        check_storage(*served)
    with pytest.raises(ConfigError) as caught:
        check_storage("file", latent, 2)
    message = str(caught.value)
    assert message.startswith("--hicache-storage-backend file with --tp-size 2 is not supported with DFLASH")

    def attach(request):
        raise AssertionError("attached")

    handlers = dict.fromkeys((*admin._ANSWERS, *admin._MUTE_ANSWERS), attach)
    scheduler = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        model_config=latent,
        _request_dispatcher=SimpleNamespace(_mapping=handlers),
    )
    admin.answer_errors(None, scheduler)
    with get_parallel().override(tp_size=2):
        answer = handlers[AttachHiCacheStorageReqInput](AttachHiCacheStorageReqInput(hicache_storage_backend="file"))
    assert not answer.success and answer.message == message


def test_disaggregation():
    for mode in ("prefill", "decode"):
        assert resolve(disaggregation_mode=mode).disaggregation_mode == mode
    message = refusal(disaggregation_mode="decode", disaggregation_decode_retraction_backup="cpu_tensor")
    assert message.startswith("--disaggregation-decode-retraction-backup cpu_tensor with --disaggregation-mode decode")
    args = asked(disaggregation_mode="decode")
    facts = pair.target_facts(args)
    with pytest.raises(ConfigError, match=r"^--disaggregation-mode decode is not supported .* recurrent layers"):
        check_disaggregation(args, replace(facts, is_recurrent=True))
    check_disaggregation(asked(), replace(facts, is_recurrent=True))


@pytest.mark.parametrize("layout", [None, "another"])
def test_prefill_server_without_the_drafter(monkeypatch, layout):
    monkeypatch.setattr(transfer, "serves_dflash", lambda: True)
    manager, met = SimpleNamespace(kv_layout="mine"), []
    with pytest.raises(ConfigError, match=f"kv_layout={layout}, and this decode server mine"):
        transfer.check_prefill_server(lambda *args: met.append(args), manager, SimpleNamespace(kv_layout=layout))
    transfer.check_prefill_server(lambda *args: met.append(args), manager, SimpleNamespace(kv_layout="mine"))
    assert len(met) == 1


def test_block_verification_changes_nothing_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="sglang_dflash.server_args"):
        resolve(speculative_use_block_verification=True)
    assert any(
        record.getMessage().startswith("--speculative-use-block-verification changes nothing")
        for record in caplog.records
    )


@pytest.mark.parametrize("kept", [{}, {"enable_weights_cpu_backup": True}], ids=["drafter", "both"])
def test_drafter_outlives_the_release_of_its_memory(kept):
    args = resolved_view(asked(enable_memory_saver=True, **kept))
    assert args.enable_draft_weights_cpu_backup is not bool(kept)
    assert not resolved_view(asked()).enable_draft_weights_cpu_backup


def test_another_layout_of_kv():
    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        assert refusal().startswith("SGLANG_USE_HND_KVCACHE=1 is not supported")


@pytest.mark.skipif(not ON_CPU, reason="names what the CPU offers")
def test_target_backend_does_not_suit_the_drafter():
    message = refusal(attention_backend="fa3")
    assert message.startswith("--attention-backend fa3:") and "torch_native, triton on cpu" in message
    message = refusal(attention_backend="torch_native", decode_attention_backend="fa3")
    assert message.startswith("--decode-attention-backend fa3:")


# On the right side of a row, in one block.
NARROW_ON_BOTH_SIDES = {"use_sliding_window": True, "sliding_window": 8, "is_causal": False}


@pytest.mark.skipif(ON_CPU, reason="every backend of a CPU draws it")
def test_layer_that_the_drafters_backend_cannot_mask(tmp_path):
    path = drafter_with(tmp_path, **NARROW_ON_BOTH_SIDES)
    message = refusal(speculative_draft_model_path=path, speculative_draft_attention_backend="flashinfer")
    assert message == (
        f"layer 0 of drafter {path} has a bidirectional sliding_window=8, narrower than the block of 16: flashinfer "
        "cannot limit what a row sees to its right; set --speculative-draft-attention-backend fa3 or triton."
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative_draft_attention_backend": "torch_native" if ON_CPU else "fa3"},
        {"speculative_draft_attention_backend": "triton"},
        pytest.param(
            {"speculative_draft_attention_backend": "flashinfer", "speculative_dflash_block_size": 8},
            marks=pytest.mark.skipif(ON_CPU, reason="for a GPU"),
        ),
    ],
)
def test_layer_that_the_drafters_backend_can_mask(tmp_path, flags):
    resolve(speculative_draft_model_path=drafter_with(tmp_path, **NARROW_ON_BOTH_SIDES), **flags)


def test_other_servers_are_left_alone():
    args = ServerArgs(model_path=str(TARGET_DIR), **DEVICE_ARGS, enable_return_routed_experts=True)
    args.resolve_once()
    assert not is_dflash(args) and resolved_view(args).speculative_num_draft_tokens is None


def test_capture_without_a_drafter_is_left_alone():
    """There DFLASH names a convention, and SGLang takes the algorithm back."""
    capture = {"enable_return_aux_hidden_states": True, "return_aux_hidden_state_layer_ids": [1]}
    args = asked(speculative_draft_model_path=None, enable_return_routed_experts=True, **capture)
    assert not is_dflash(args) and resolved_view(args).aux_hidden_state_capture == "dflash"
