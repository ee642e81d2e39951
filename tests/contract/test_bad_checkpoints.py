"""A drafter that is missing, inconsistent or does not fit its target: no server starts.

One sentence names the flag or field and its value.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError
from resolving import checkpoint, drafter_with, refusal, resolve

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint import mask_embedding
from sglang_dflash.errors import ConfigError

# --- the drafter's path ---------------------------------------------------------------------------------------------


def test_path_left_out():
    assert "set --speculative-draft-model-path" in refusal(speculative_draft_model_path=None)


def test_path_does_not_exist(tmp_path):
    path = str(tmp_path / "none")
    assert refusal(speculative_draft_model_path=path).startswith(f"--speculative-draft-model-path {path}: there is no")


def test_path_without_config(tmp_path):
    message = refusal(speculative_draft_model_path=str(tmp_path))
    assert str(tmp_path) in message and "config.json" in message


@pytest.mark.skipif(os.environ.get("HF_HUB_OFFLINE") != "1", reason="would ask the Hugging Face hub")
def test_path_is_no_repository():
    message = refusal(speculative_draft_model_path="nobody/no-such-drafter")
    assert message.startswith("--speculative-draft-model-path nobody/no-such-drafter cannot be read: ")


def test_path_is_not_even_a_repository_name():
    message = refusal(speculative_draft_model_path="~/drafter of mine")
    assert message.startswith("--speculative-draft-model-path ~/drafter of mine cannot be read: ")


def test_config_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    message = refusal(speculative_draft_model_path=str(tmp_path))
    assert message.startswith(f"--speculative-draft-model-path {tmp_path} cannot be read: ")


def test_model_type_is_unknown(tmp_path):
    message = refusal(speculative_draft_model_path=drafter_with(tmp_path, model_type="no-such-type"))
    assert message.startswith("model_type='no-such-type' in config.json of drafter ")


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (b"", "cannot be read"),
        ([1, 2], "a dict with a tensor under 'embedding'"),
        ({"embedding": torch.zeros(4, 256), "per_position": True}, "per_position=True"),
        ({"embedding": torch.zeros(256), "mask_token_id": 2}, "mask_token_id=2"),
        ({"embedding": torch.zeros(255), "mask_token_id": 1}, "an embedding [255] in torch.float32"),
        ({"embedding": torch.zeros(256, dtype=torch.int8)}, "in torch.int8"),
    ],
)
def test_mask_embedding(tmp_path, found, named):
    path = drafter_with(tmp_path)
    file = tmp_path / "drafter" / "mask_embedding.pt"
    if isinstance(found, bytes):
        file.write_bytes(found)
    else:
        torch.save(found, file)
    message = refusal(speculative_draft_model_path=path)
    assert message.startswith(f"mask_embedding.pt of drafter {path}") and named in message


def test_mask_embedding_of_a_repository_that_cannot_be_asked(monkeypatch, caplog):
    """Its server starts, and the log says what is not known."""

    def fail(*args, **kwargs):
        raise OSError("no connection") from cause

    monkeypatch.setattr(mask_embedding, "cached_file", fail)
    drafter = SimpleNamespace(path="somebody/drafter", mask_token_id=1, hidden_size=256)
    cause = RemoteEntryNotFoundError("404", response=Response(404, request=Request("GET", "http://hub")))
    assert mask_embedding.read_mask_embedding(drafter) is None and not caplog.records
    cause = LocalEntryNotFoundError("offline")
    for _ in range(2):
        assert mask_embedding.read_mask_embedding(drafter) is None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "somebody/drafter has a mask_embedding.pt" in record.getMessage()
    cause = PermissionError("denied")
    with pytest.raises(ConfigError, match="of drafter somebody/drafter cannot be read: no connection"):
        mask_embedding.read_mask_embedding(drafter)


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        ({}, "auto"),
        ({"load_format": "dummy"}, "dummy"),
        ({"load_format": "sharded_state"}, "auto"),
        ({"load_format": "bitsandbytes"}, "auto"),
        ({"load_format": "gguf", "speculative_draft_load_format": "safetensors"}, "safetensors"),
    ],
    ids=str,
)
def test_load_format_of_the_target_alone(flags, loaded):
    assert resolve(**flags).speculative_draft_load_format == loaded


def test_target_as_drafter():
    message = refusal(speculative_draft_model_path=str(TARGET_DIR))
    assert "is not a DFlash checkpoint" in message and "Qwen3ForCausalLM" in message


def test_dflash_config_is_no_object(tmp_path):
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", config={"dflash_config": [1, 2]})
    assert "is not a DFlash checkpoint" in refusal(speculative_draft_model_path=path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["DominoDraftModel"]}, "a checkpoint of Domino "),
        ({"architectures": ["DSparkDraftModel"]}, "a checkpoint of DSpark "),
        ({"speculators_model_type": "xpress", "model_type": "speculator_model"}, "a checkpoint of XPress "),
        ({"speculators_model_type": "eagle3", "model_type": "speculator_model"}, "speculators_model_type='eagle3'"),
    ],
)
def test_other_drafters(tmp_path, config, named):
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", config=config)
    message = refusal(speculative_draft_model_path=path)
    assert message.startswith(f"--speculative-draft-model-path {path} is ") and named in message


# --- a drafter's tensors that are found to be wrong before anything is loaded ----------------------------------------


def test_wrong_tensors(tmp_path):
    tensors = {"fc.weight": torch.zeros(256, 512), "norm.weight": None, "hidden_norm.weight": torch.ones(256).char()}
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", tensors=tensors)
    message = refusal(speculative_draft_model_path=path)
    assert message.startswith(f"drafter {path} does not load: ")
    for problem in (
        "fc.weight has shape [256, 512], expected [256, 768]",
        "hidden_norm.weight is in int8, expected one of float64, float32, float16, bfloat16",
        "missing norm.weight [256]",
    ):
        assert problem in message
    # Tensors that are never read.
    resolve(speculative_draft_model_path=path, speculative_draft_load_format="dummy")


def test_file_that_is_cut(tmp_path):
    path = drafter_with(tmp_path)
    file = tmp_path / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert refusal(speculative_draft_model_path=path).startswith(f"the tensors of {file} cannot be read: ")


# --- a drafter that is inconsistent, or was trained for another target -----------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": 128}, "hidden_size=128"),
        ({"vocab_size": 2048}, "vocab_size=2048"),
        ({"num_target_layers": 6}, "num_target_layers=6"),
        ({"target_layer_ids": [0, 1, 3]}, "names [3]"),
        ({"target_layer_ids": [0, 1, 40]}, "names [40]"),
        ({"target_layer_ids": [-1, 0, 1]}, "names [-1]"),
        ({"target_layer_ids": [2, 1, 0]}, "target_layer_ids=[2, 1, 0]"),
        ({"target_layer_ids": [1, 1, 2]}, "target_layer_ids=[1, 1, 2]"),
        ({"target_layer_ids": []}, "target_layer_ids=[]"),
        ({"target_layer_ids": 2}, "target_layer_ids=2"),
        ({"target_layer_ids": ["0"]}, "target_layer_ids=['0']"),
        ({"mask_token_id": 1024}, "mask_token_id=1024"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": "16"}, "block_size='16'"),
        ({"block_size": None}, "block_size=None"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"max_position_embeddings": 1024}, "max_position_embeddings=1024"),
    ],
)
def test_drafter_field(tmp_path, fields, named):
    path = drafter_with(tmp_path, **fields)
    message = refusal(speculative_draft_model_path=path)
    assert named in message and path in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention']"),
        ({"layer_types": ["full_attention", "odd", "odd"]}, "'odd'"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 0}, "sliding_window=0"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 1}, "sliding_window=1"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window=None"),
        ({"use_swa": False}, "use_sliding_window, use_swa=[True, False]"),
        ({"use_swa": 1}, "use_swa=1"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 10**30}, "sliding_window=1"),
        ({"is_causal": "no"}, "is_causal='no'"),
        ({"is_causal": 0}, "is_causal=0"),
    ],
)
def test_drafter_layers(tmp_path, fields, named):
    """The sentence of transformers is passed on if it refuses the value itself."""
    layers = json.loads((DRAFTER_DIR / "config.json").read_text())["num_hidden_layers"]
    if len(fields.get("layer_types", ())) == 3:
        fields = fields | {"layer_types": (fields["layer_types"] * layers)[:layers]}
    path = drafter_with(tmp_path, use_sliding_window=True, **fields)
    message = refusal(speculative_draft_model_path=path)
    assert path in message
    assert named in message or "layer_types" in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": -1}, "rope_theta=-1"),
        ({"rope_theta": "x"}, "rope_theta='x'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor='4'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0}}, "attention_factor=0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": "fp8"}, "quantization_config='fp8'"),
        ({"dtype": "x"}, "dtype='x'"),
        ({"block_size": 10**30}, "block_size=1"),
        ({"architectures": 5}, "architectures=5"),
    ],
)
def test_values_without_a_meaning(tmp_path, fields, named):
    path = drafter_with(tmp_path, **fields)
    message = refusal(speculative_draft_model_path=path)
    assert named in message and path in message


@pytest.mark.parametrize("config", [None, 3, [], "x"])
def test_config_is_no_object(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(speculative_draft_model_path=str(tmp_path))
    assert message.startswith(f"--speculative-draft-model-path {tmp_path} cannot be read: ")


def test_shorter_context_is_allowed_where_it_is_served(tmp_path):
    path = drafter_with(tmp_path, max_position_embeddings=1024)
    assert resolve(speculative_draft_model_path=path, context_length=1024).context_length == 1024


@pytest.mark.parametrize(
    ("tp_size", "fields", "named"),
    [
        (3, {}, "num_attention_heads=4"),
        (2, {"intermediate_size": 385}, "intermediate_size=385"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "num_key_value_heads=6"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ],
)
def test_tensor_parallel_size(tmp_path, tp_size, fields, named):
    path = drafter_with(tmp_path, **fields)
    message = refusal(speculative_draft_model_path=path, tp_size=tp_size)
    assert named in message and f"--tp-size {tp_size}" in message


def test_more_ranks_than_kv_heads():
    assert resolve(tp_size=4).tp_size == 4


def test_recurrent_target(tmp_path):
    config = {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }
    target = checkpoint(TARGET_DIR, tmp_path / "target", config=config)
    message = refusal(model_path=target, disable_radix_cache=True)
    assert "Lfm2ForCausalLM" in message and "recurrent layers" in message
