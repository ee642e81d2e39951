"""Drafters whose checkpoint has float8 weights: what is served, and what is refused before anything is loaded."""

import json
import math
from copy import deepcopy

import pytest
import torch
from resolving import asked, checkpoint, refusal, resolve
from safetensors.torch import load_file
from sglang.srt.configs.model_config import ModelConfig
from support.quantized import compressed_config, linear_layers, quantize

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint.config import DFlashConfig
from sglang_dflash.checkpoint.formats import to_qwen3_config
from sglang_dflash.checkpoint.tensors import quantized_shapes
from sglang_dflash.draft.float8 import Float8Weights
from sglang_dflash.errors import ConfigError
from sglang_dflash.inspect import main

CONFIG = json.loads((DRAFTER_DIR / "config.json").read_text())
TOKEN = {"dynamic": True, "strategy": "token"}
CHANNELS = compressed_config("channel", TOKEN, ["lm_head"])
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ALL = linear_layers(load_file(DRAFTER_DIR / "model.safetensors"))


def drafter(tmp_path, config=CHANNELS, scales="channel", tensors=None, **options) -> str:
    """Write the tiny pair's drafter quantised, with some tensors replaced; None removes one."""
    quantized, _ = quantize(load_file(DRAFTER_DIR / "model.safetensors"), ALL, scales, **options)
    return checkpoint(DRAFTER_DIR, tmp_path / "drafter", {"quantization_config": config}, quantized | (tensors or {}))


def blocks(tmp_path, **changes) -> str:
    return drafter(tmp_path, FP8 | changes, "block", inverse=True)


def covered(config) -> set[str]:
    """Return the quantised layers of the tiny pair's drafter with this `quantization_config`."""
    raw = CONFIG | {"quantization_config": config}
    return set(quantized_shapes(DFlashConfig.from_dict(to_qwen3_config(raw, "here").to_dict(), "here")))


def with_scheme(**fields) -> dict:
    """Return llm-compressor's config with fields of its scheme replaced: `weights__`, `inputs__` and others."""
    config = deepcopy(CHANNELS)
    group = config["config_groups"]["group_0"]
    for name, value in fields.items():
        kind, _, field = name.rpartition("__")
        place = {"weights": group["weights"], "inputs": group["input_activations"], "": group}[kind]
        place[field] = value
    return config


def test_method_is_the_checkpoints(tmp_path):
    server_args = asked(speculative_draft_model_path=drafter(tmp_path), quantization="fp8")

    config = ModelConfig.from_server_args(server_args, str(tmp_path / "drafter"), is_draft_model=True)
    assert config.quantization == "compressed-tensors"
    assert ModelConfig.from_server_args(server_args).quantization == "fp8"


@pytest.mark.parametrize("asked_for", ["fp8", "unquant"])
def test_flag(tmp_path, asked_for):
    message = refusal(speculative_draft_model_path=drafter(tmp_path), speculative_draft_model_quantization=asked_for)
    assert message.startswith(f"--speculative-draft-model-quantization {asked_for}: ") and "already" in message


NAME = "layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({f"{NAME}.weight_scale": None}, f"missing {NAME}.weight_scale [256, 1]"),
        (
            {f"{NAME}.weight_scale": torch.ones(1)},
            f"{NAME}.weight_scale has shape [1], expected [256, 1]",
        ),
        (
            {f"{NAME}.weight_scale": torch.ones(256, 1).to(torch.uint8)},
            f"{NAME}.weight_scale is in uint8, expected one of float64, float32",
        ),
        (
            {f"{NAME}.weight": torch.zeros(256, 256)},
            f"{NAME}.weight is in float32, expected one of float8_e4m3fn",
        ),
        ({f"{NAME}.input_scale": torch.ones(1)}, f"unexpected {NAME}.input_scale [1]"),
        (
            {"norm.weight": torch.ones(256).to(torch.float8_e4m3fn)},
            "norm.weight is in float8_e4m3fn, expected one of float64, float32, float16, bfloat16",
        ),
    ],
)
def test_tensors(tmp_path, tensors, named):
    path = drafter(tmp_path, tensors=tensors)
    message = refusal(speculative_draft_model_path=path)
    assert message.startswith(f"drafter {path} does not load: ") and named in message


def test_scales_of_inputs(tmp_path):
    config = compressed_config("tensor", {"dynamic": False, "strategy": "tensor"}, [])
    message = refusal(speculative_draft_model_path=drafter(tmp_path, config, "tensor"))
    assert "missing fc.input_scale [1]" in message


def test_a_config_without_its_tensors(tmp_path):
    path = checkpoint(DRAFTER_DIR, tmp_path / "drafter", {"quantization_config": CHANNELS})
    assert "fc.weight is in bfloat16, expected one of float8_e4m3fn" in refusal(speculative_draft_model_path=path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method='awq'"),
        ({}, "fc.weight is in float8_e4m3fn, expected one of float64"),
        (CHANNELS | {"quant_method": None}, "quantization_config.quant_method=None"),
        # INT4, as W4A16 has it.
        (CHANNELS | {"format": "pack-quantized"}, "quantization_config.format='pack-quantized'"),
        (with_scheme(weights__num_bits=4), "quantization_config.config_groups.group_0.weights.num_bits=4"),
        (with_scheme(weights__type="int"), "group_0.weights.type='int'"),
        (with_scheme(weights__symmetric=False), "group_0.weights.symmetric=False"),
        (with_scheme(weights__dynamic=True), "group_0.weights.dynamic=True"),
        (with_scheme(weights__strategy="group"), "group_0.weights.strategy='group'"),
        (with_scheme(weights__strategy="block"), "group_0.weights.block_structure=None"),
        (with_scheme(weights=None), "group_0.weights=None"),
        (with_scheme(inputs__num_bits=4), "group_0.input_activations.num_bits=4"),
        (with_scheme(inputs__dynamic="local"), "group_0.input_activations.dynamic='local'"),
        (with_scheme(inputs__dynamic=False), "group_0.input_activations.strategy='token'"),
        (with_scheme(output_activations={}), "group_0.output_activations={}"),
        (with_scheme(targets="Linear"), "group_0.targets='Linear'"),
        (with_scheme(format="nvfp4-pack-quantized"), "group_0.format='nvfp4-pack-quantized'"),
        (CHANNELS | {"config_groups": {}}, "quantization_config.config_groups={}"),
        (CHANNELS | {"ignore": ["re:("]}, "quantization_config.ignore='re:('"),
        (CHANNELS | {"kv_cache_scheme": {"num_bits": 8}}, "quantization_config.kv_cache_scheme={'num_bits': 8}"),
        (CHANNELS | {"sparsity_config": {"format": "x"}}, "quantization_config.sparsity_config="),
        (
            CHANNELS
            | {
                "config_groups": {
                    name: each["config_groups"]["group_0"]
                    for name, each in {"a": CHANNELS, "b": compressed_config("tensor", TOKEN, [])}.items()
                }
            },
            "quantization_config.config_groups=['a', 'b']",
        ),
        (CHANNELS | {"ignore": [NAME]}, "covers some of layers.0.self_attn.q_proj, layers.0.self_attn.k_proj"),
        ({"quant_method": "fp8"}, "quantization_config.activation_scheme=None"),
        (FP8 | {"activation_scheme": "static"}, "quantization_config.activation_scheme='static'"),
        (FP8 | {"weight_block_size": [128]}, "quantization_config.weight_block_size=[128]"),
        (FP8 | {"weight_block_size": [128, 100]}, "quantization_config.weight_block_size=[128, 100]"),
        (FP8 | {"weight_block_size": [256, 128]}, "layers.0.self_attn.k_proj of drafter"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt='e5m2'"),
        (FP8 | {"modules_to_not_convert": "fc"}, "quantization_config.modules_to_not_convert='fc'"),
        (5, "quantization_config=5"),
    ],
)
def test_schemes_that_are_not_served(tmp_path, config, named):
    path = drafter(tmp_path, config)
    message = refusal(speculative_draft_model_path=path)
    assert path in message and named in message


def test_blocks_divide_over_ranks(tmp_path):
    path = blocks(tmp_path)
    resolve(speculative_draft_model_path=path)
    message = refusal(speculative_draft_model_path=path, tp_size=2)
    assert "layers.0.self_attn.k_proj" in message and "128 x 128" in message and "--tp-size 2" in message


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (CHANNELS, set()),
        (CHANNELS | {"ignore": ["fc"]}, {"fc"}),
        (CHANNELS | {"ignore": ["model.fc", "re:.*layers\\.1\\.mlp.*"]}, {"fc", *(n for n in ALL if "1.mlp" in n)}),
        # A parent in `ignore` does not stand for its layers.
        (CHANNELS | {"ignore": ["layers.1.mlp", "down_proj"]}, {n for n in ALL if "down_proj" in n}),
        (with_scheme(targets=["re:.*self_attn.*"]), {n for n in ALL if "self_attn" not in n}),
        (FP8 | {"modules_to_not_convert": ["layers.1"]}, {n for n in ALL if n.startswith("layers.1.")}),
        (FP8 | {"ignored_layers": ["model.layers.1.mlp"]}, {n for n in ALL if "1.mlp" in n}),
    ],
)
def test_layers_that_a_config_covers(config, plain):
    assert covered(config) == set(ALL) - plain


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_scales_are_positive_and_finite(scale):
    raw = CONFIG | {"quantization_config": CHANNELS}
    float8 = Float8Weights(DFlashConfig.from_dict(to_qwen3_config(raw, "here").to_dict(), "here"))
    with pytest.raises(ConfigError, match=r"fc\.weight_scale of drafter here .*positive and finite"):
        list(float8.to_load("fc.weight_scale", torch.tensor([[1.0], [scale]])))


def test_inspect(tmp_path, capsys):
    assert main([str(TARGET_DIR), blocks(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    scheme = "fp8, float8_e4m3fn with a scale per block of 128 x 128, dynamic quantisation of inputs"
    assert f"quantisation {scheme}; 22 linear layers" in lines
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert f"weights {sum(tensor.nbytes for tensor in tensors.values())} bytes, loaded in bfloat16" in lines
