"""Which targets with recurrent layers are served, and with which arguments."""

from __future__ import annotations

import json
import logging

import pytest
from resolving import asked, refusal, resolve
from support import hybrid

from sglang_dflash.server_args import trees


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return str(hybrid.write_drafter(tmp_path_factory.mktemp("hybrid") / "drafter"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Configs alone."""
    folder = tmp_path_factory.mktemp("targets")
    for architecture in hybrid.CONFIGS:
        hybrid.write_config(folder / architecture, architecture)
    return folder


@pytest.fixture
def arguments(checkpoints, drafter, monkeypatch):
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    return {"model_path": str(checkpoints / "Qwen3_5ForCausalLM"), "speculative_draft_model_path": drafter}


@pytest.mark.parametrize("architecture", hybrid.CONFIGS)
def test_targets_that_are_served(checkpoints, arguments, architecture):
    resolved = resolve(**arguments | {"model_path": str(checkpoints / architecture)})

    assert resolved.mamba_radix_cache_strategy == "extra_buffer" and not resolved.disable_overlap_schedule


@pytest.mark.parametrize(("num_nodes", "block_size"), [(None, 16), (8, 8), (32, 16), (64, 16)])
def test_trees(arguments, num_nodes, block_size):
    resolved = resolve(speculative_eagle_topk=8, speculative_num_draft_tokens=num_nodes, **arguments)

    sizes = (resolved.speculative_dflash_block_size, resolved.speculative_num_draft_tokens)
    assert sizes == (block_size, num_nodes or 16)


@pytest.mark.parametrize(("topk", "has_trees", "num_candidates"), [(None, True, 16), (1, False, 16), (8, True, 8)])
def test_trees_are_the_default_on_a_gpu(arguments, monkeypatch, caplog, topk, has_trees, num_candidates):
    monkeypatch.setattr("sglang_dflash.server_args.trees.TREE_DEVICES", ("cuda", "cpu"))
    with caplog.at_level(logging.INFO, logger="sglang_dflash.server_args"):
        server_args = asked(speculative_eagle_topk=topk, **arguments)

    assert (trees.verifies_trees(server_args), trees.num_candidates(server_args)) == (has_trees, num_candidates)
    assert not any("in chains" in record.getMessage() for record in caplog.records)


def test_more_tokens_than_an_int64_has_bits(arguments, tmp_path):
    drafter = str(hybrid.write_drafter(tmp_path / "drafter", block_size=80))
    message = refusal(**arguments | {"speculative_draft_model_path": drafter})
    assert message.startswith("--speculative-dflash-block-size 80: ") and "at most 64" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mamba_ssm_dtype", "bfloat16"),
        ("linear_attn_backend", "flashinfer"),
        ("linear_attn_decode_backend", "flashinfer"),
        ("linear_attn_prefill_backend", "flashinfer"),
        ("linear_attn_verify_backend", "flashinfer"),
        ("enable_int8_mamba_checkpoint", True),
        ("mamba_radix_cache_strategy", "extra_buffer_lazy"),
        ("enable_streaming_session", True),
        ("enable_mixed_chunk", True),
    ],
)
def test_arguments_that_are_refused(arguments, field, value):
    message = refusal(**arguments | {field: value})

    assert message.startswith(f"--{field.replace('_', '-')} {value} is not supported ")


def test_rounded_convolutions(arguments, monkeypatch):
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")

    assert refusal(**arguments).startswith("SGLANG_MAMBA_CONV_DTYPE=bfloat16: ")


@pytest.mark.parametrize("architecture", hybrid.CONFIGS)
def test_no_buffer_under_overlap_scheduling(checkpoints, arguments, architecture):
    """The state of a request that ends would be the prefix cache's while a cycle in flight writes it."""
    no_buffer = {"model_path": str(checkpoints / architecture), "mamba_radix_cache_strategy": "no_buffer"}

    with pytest.raises(AssertionError, match="no_buffer"):
        resolve(**arguments | no_buffer)
    assert resolve(**arguments | no_buffer, disable_overlap_schedule=True)


def test_another_activation(tmp_path, arguments, checkpoints):
    config = json.loads((checkpoints / "Qwen3_5ForCausalLM" / "config.json").read_text())
    hybrid.write_config(tmp_path / "target", "Qwen3_5ForCausalLM", config | {"hidden_act": "gelu"})

    message = refusal(**arguments | {"model_path": str(tmp_path / "target")})

    assert message.startswith("hidden_act is gelu in config.json of target ")


def test_another_recurrent_target(tmp_path, arguments, checkpoints):
    config = json.loads((checkpoints / "Qwen3NextForCausalLM" / "config.json").read_text())
    hybrid.write_config(tmp_path, "Qwen3NextForCausalLM", config | {"architectures": ["SomeNextForCausalLM"]})

    message = refusal(**arguments | {"model_path": str(tmp_path)})

    assert "(SomeNextForCausalLM) has recurrent layers" in message and "Qwen3NextForCausalLM" in message


def test_config_without_the_interval(tmp_path, arguments, checkpoints):
    config = json.loads((checkpoints / "Qwen3_5ForCausalLM" / "config.json").read_text())
    del config["full_attention_interval"]
    hybrid.write_config(tmp_path, "Qwen3_5ForCausalLM", config)

    message = refusal(**arguments | {"model_path": str(tmp_path)})

    assert message.startswith("full_attention_interval is missing in config.json of target ")
