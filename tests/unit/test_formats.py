"""Reading of `config.json` in every checkpoint format."""

import json

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.runtime_context import get_context
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.checkpoint.config import Convolutions, DFlashConfig, LayerAttention, Pairs, TargetFacts
from sglang_dflash.checkpoint.formats import is_dflash, refuse_others, to_qwen3_config
from sglang_dflash.checkpoint.tensors import (
    Tensor,
    draft_to_target,
    expected_tensors,
    part_tensors,
    tensor_problems,
)
from sglang_dflash.errors import ConfigError
from sglang_dflash.requests.update_weights import differences

ZLAB = json.loads((DRAFTER_DIR / "config.json").read_text())
LAYERS = {name: ZLAB[name] for name in ZLAB if name not in ("architectures", "block_size", "dflash_config")}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYERS,
    "aux_hidden_state_layer_ids": [1, 2, 3],
    "mask_token_id": 1,
    "block_size": 16,
    "draft_vocab_size": 1024,
    "sliding_window_non_causal": False,
}
TARGET = TargetFacts.from_dict(json.loads((TARGET_DIR / "config.json").read_text()), "target")

FULL, CAUSAL = LayerAttention(None, causal=False), LayerAttention(None, causal=True)
LEFT, BOTH = LayerAttention(64, causal=True), LayerAttention(64, causal=False)


def read(raw: dict) -> DFlashConfig:
    refuse_others(raw, "here")
    return DFlashConfig.from_dict(to_qwen3_config(raw, "here").to_dict(), "here")


def without(raw: dict, *names: str) -> dict:
    return {name: value for name, value in raw.items() if name not in names}


def with_dflash(**fields) -> dict:
    return ZLAB | {"dflash_config": ZLAB["dflash_config"] | fields}


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "layers"),
    [
        (ZLAB, (LEFT, LEFT, FULL)),
        (ZLAB | {"is_causal": False}, (BOTH, BOTH, FULL)),
        (ZLAB | {"is_causal": True}, (LEFT, LEFT, CAUSAL)),
        (with_dflash(is_causal=False), (BOTH, BOTH, FULL)),
        (with_dflash(is_causal=True), (LEFT, LEFT, CAUSAL)),
        (without(ZLAB, "use_sliding_window"), (LEFT, LEFT, FULL)),
        (without(ZLAB, "use_sliding_window") | {"use_swa": True}, (LEFT, LEFT, FULL)),
        (ZLAB | {"use_sliding_window": False}, (FULL, FULL, FULL)),
        (without(ZLAB, "use_sliding_window") | {"use_swa": False}, (FULL, FULL, FULL)),
        (
            without(ZLAB, "use_sliding_window") | {"dflash_config": ZLAB["dflash_config"] | {"use_swa": False}},
            (FULL,) * 3,
        ),
        (without(ZLAB, "layer_types"), (FULL, FULL, FULL)),
        (without(ZLAB, "layer_types") | {"max_window_layers": 1}, (FULL, LEFT, LEFT)),
        (without(ZLAB, "layer_types", "use_sliding_window") | {"max_window_layers": 1}, (FULL, FULL, FULL)),
        (SPECULATORS, (LEFT, LEFT, FULL)),
        (SPECULATORS | {"sliding_window_non_causal": True}, (BOTH, BOTH, FULL)),
    ],
)
def test_masks(raw, layers):
    assert read(raw).layers == layers


def test_sliding_layers_without_their_names():
    raw = without(ZLAB, "layer_types", "use_sliding_window", "max_window_layers") | {"use_swa": True}
    with pytest.raises(ConfigError, match=r"layer_types=None .* use_swa is true"):
        read(raw)


def test_backend_that_cannot_limit_the_right_side():
    both = read(ZLAB | {"is_causal": False, "sliding_window": 8})
    with pytest.raises(ConfigError) as caught:
        both.check_attention_backend("flashinfer", 16, ("fa3", "flashinfer", "triton"))
    for named in ("layer 0 of drafter here", "sliding_window=8", "flashinfer", "backend fa3 or triton."):
        assert named in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "is_causal", "block_size"),
    [
        ("fa3", False, 16),
        ("torch_native", False, 16),
        ("triton", False, 16),
        ("flashinfer", False, 8),
        ("flashinfer", None, 16),
    ],
)
def test_backend_that_can(backend, is_causal, block_size):
    read(ZLAB | {"is_causal": is_causal, "sliding_window": 8}).check_attention_backend(backend, block_size, (backend,))


# --- places of fields -----------------------------------------------------------------------------------------------


def test_new_places_are_read_as_the_old():
    inner = {"block_size": 16, "num_target_layers": 4}
    new = without(ZLAB, *inner) | {"dflash_config": ZLAB["dflash_config"] | inner}
    old = without(ZLAB, "dflash_config") | {"dflash_config": {}} | ZLAB["dflash_config"]
    assert read(new) == read(old) == read(ZLAB)


def test_speculators_are_read_as_z_lab():
    theirs, ours = vars(read(SPECULATORS)), vars(read(ZLAB))
    different = {name for name in ours if theirs[name] != ours[name]}
    assert different == {"format"}


def test_defaults_that_speculators_leave_out():
    """speculators writes only the fields of a layer config that differ from the defaults of its class."""
    drafter = read(SPECULATORS | {"transformer_layer_config": without(LAYERS, "hidden_size", "head_dim", "vocab_size")})
    assert (drafter.hidden_size, drafter.head_dim, drafter.vocab_size) == (4096, 128, 151936)
    llama = without(LAYERS, "head_dim", "hidden_size") | {"model_type": "llama"}
    drafter = read(SPECULATORS | {"transformer_layer_config": llama, "target_hidden_size": 4096})
    assert (drafter.hidden_size, drafter.head_dim) == (4096, 4096 // drafter.num_attention_heads)
    assert drafter.layers == (LEFT, LEFT, FULL)


@pytest.mark.parametrize(
    ("num_layers", "num_target_layers", "ids"),
    [(5, 36, (1, 9, 17, 25, 33)), (5, 32, (1, 8, 15, 22, 29)), (8, 48, (1, 7, 14, 20, 26, 32, 39, 45)), (1, 36, (18,))],
)
def test_default_target_layers(num_layers, num_target_layers, ids):
    raw = without(ZLAB, "layer_types") | {"num_hidden_layers": num_layers, "num_target_layers": num_target_layers}
    assert read(raw | {"dflash_config": {"mask_token_id": 1}}).target_layer_ids == ids


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None"),
        ({"aux_hidden_state_layer_ids": [3, 2]}, "target_layer_ids=[2, 1]"),
        ({"transformer_layer_config": None}, "transformer_layer_config=None"),
        ({"sliding_window_non_causal": "false"}, "sliding_window_non_causal='false'"),
        ({"target_hidden_size": 512}, "target_hidden_size=512"),
        ({"draft_vocab_size": 2048}, "draft_vocab_size=2048"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"mask_token_id": None}, "mask_token_id=None"),
        ({"transformer_layer_config": LAYERS | {"model_type": "odd"}}, "model_type='odd'"),
        ({"transformer_layer_config": without(LAYERS, "sliding_window")}, "sliding_window=None"),
    ],
)
def test_speculators_field(fields, named):
    with pytest.raises(ConfigError) as caught:
        read(SPECULATORS | fields)
    assert named in str(caught.value) and "here" in str(caught.value)


def test_speculators_layer_that_cannot_be_captured():
    """The message uses the checkpoint's own numbering, where 0 is the embedding."""
    drafter = read(SPECULATORS | {"aux_hidden_state_layer_ids": [0, 2, 4]})
    [mismatch] = drafter.mismatches(TARGET)
    assert mismatch.startswith("aux_hidden_state_layer_ids=[0, 2, 4] of drafter here names [0, 4]; ")
    assert mismatch.endswith("of which 1 to 3 can be captured.")


# --- other drafters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"architectures": ["MiniMaxDFlash2DraftModel"], "dflash_config": {}}, "a checkpoint of DFlash2 of MiniMax "),
        (with_dflash(attention_mode="mla"), "a checkpoint of DFlash with latent attention (attention_mode) "),
        ({"speculators_model_type": "xpress"}, "a checkpoint of XPress "),
        (with_dflash(projector_type="domino"), "a checkpoint of Domino "),
        ({"architectures": ["DominoDraftModel"]}, "a checkpoint of Domino "),
        ({"architectures": ["LingDSparkModel"]}, "a checkpoint of DSpark "),
        ({"architectures": ["Gemma4DSparkModel"]}, "a checkpoint of DSpark of Gemma 4 "),
        (with_dflash(projector_type="dspark"), "a checkpoint of DSpark "),
        (with_dflash(lilicorr_enabled=True, lilicorr_rank=8), "a checkpoint of LiLiCoRR "),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures=['Qwen3ForCausalLM'] and no dflash_config"),
        ({}, "architectures=[] and no dflash_config"),
    ],
)
def test_other_drafters(raw, named):
    assert not is_dflash(raw)
    with pytest.raises(ConfigError) as caught:
        refuse_others(raw, "here")
    assert str(caught.value).startswith("--speculative-draft-model-path here is ") and named in str(caught.value)


# --- optional parts -------------------------------------------------------------------------------------------------

DFLASH2 = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 7, "selector_top_k": 5}
DEEPSPEC = without(ZLAB, "dflash_config") | ZLAB["dflash_config"] | {"architectures": ["Qwen3DSparkModel"]}
DEEPSPEC |= {"block_size": 7, "layer_types": None, "use_sliding_window": False}


def test_parts_of_v1():
    drafter = read(ZLAB)
    assert (drafter.conv, drafter.pairs, drafter.predicts_from_anchor) == (None, None, False)
    assert (drafter.block_size, drafter.draft_rows(16), part_tensors(drafter)) == (16, 16, {})


@pytest.mark.parametrize("raw", [ZLAB | DFLASH2, with_dflash(**DFLASH2)])
@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlash2DraftModel", "DFlash2BeamDraftModel"])
def test_convolutions_and_selector(raw, architecture):
    """They are read wherever they are, and whatever the class is called."""
    drafter = read(raw | {"architectures": [architecture]})
    assert drafter.conv == Convolutions(taps=3, group_size=4)
    assert drafter.pairs == Pairs("selector", rank=7, num_candidates=5)
    assert not drafter.predicts_from_anchor


def test_speculators_dflash2():
    """speculators' defaults, where a config leaves fields out."""
    drafter = read(
        without(SPECULATORS, "block_size", "sliding_window_non_causal") | {"speculators_model_type": "dflash2"}
    )
    assert drafter.conv == Convolutions(taps=2, group_size=16)
    assert drafter.pairs == Pairs("selector", rank=256, num_candidates=16)
    assert (drafter.block_size, drafter.predicts_from_anchor, drafter.layers) == (8, False, (BOTH, BOTH, FULL))


@pytest.mark.parametrize("raw", [with_dflash(sample_from_anchor=True, block_size=7), DEEPSPEC])
def test_anchor_rows(raw):
    """`block_size` counts the drafts of such checkpoints. The package counts verified tokens."""
    drafter = read(raw)
    assert drafter.predicts_from_anchor and drafter.pairs is None
    assert (drafter.block_size, drafter.draft_rows(8), drafter.draft_rows(3)) == (8, 7, 2)
    assert drafter.mismatches(TARGET) == []


@pytest.mark.parametrize(("head_type", "kind"), [(None, "markov"), ("vanilla", "markov"), ("gated", "gated")])
def test_markov_heads(head_type, kind):
    fields = {"markov_rank": 9, "markov_head_type": head_type}
    theirs = SPECULATORS | {"speculators_model_type": "dspark", "block_size": 7}
    for raw in (DEEPSPEC | fields, theirs | fields):
        drafter = read(raw)
        assert drafter.pairs == Pairs(kind, rank=9, num_candidates=16)
        assert (drafter.block_size, drafter.predicts_from_anchor) == (8, True)


def test_defaults_of_dspark():
    drafter = read(SPECULATORS | {"speculators_model_type": "dspark"})
    assert drafter.pairs == Pairs("markov", rank=256, num_candidates=16)
    # The hidden state, and the vector of the token before.
    assert drafter.confidence_inputs == 256 + 256


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        *((with_dflash(**without(DFLASH2, name)), f"{name}=None") for name in DFLASH2),
        *(
            (with_dflash(**without(DFLASH2, name)) | {"architectures": ["DFlash2DraftModel"]}, f"{name}=None")
            for name in DFLASH2
        ),
        (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size=None"),
        (with_dflash(**DFLASH2 | {"conv_kernel_size": 17}), "conv_kernel_size=17"),
        (with_dflash(**DFLASH2 | {"conv_group_size": 7}), "conv_group_size=7"),
        (with_dflash(**DFLASH2 | {"selector_rank": -1}), "selector_rank=-1"),
        (with_dflash(**DFLASH2 | {"selector_top_k": 1}), "selector_top_k=1"),
        (with_dflash(**DFLASH2 | {"selector_top_k": 17}), "selector_top_k=17"),
        (with_dflash(**DFLASH2, markov_rank=8), "markov_rank=8"),
        (with_dflash(sample_from_anchor=1), "sample_from_anchor=1"),
        (DEEPSPEC | {"markov_rank": 8, "markov_head_type": "rnn"}, "markov_head_type='rnn'"),
        (DEEPSPEC | {"markov_rank": "8"}, "markov_rank='8'"),
        (DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": True}, "enable_confidence_head=True"),
        (DEEPSPEC | {"sample_from_anchor": False}, "sample_from_anchor=False"),
        (DEEPSPEC | {"has_embed_tokens": True}, "has_embed_tokens=True"),
        (DEEPSPEC | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method='gptq'"),
        (DEEPSPEC | {"target_layer_ids": None}, "target_layer_ids=None"),
        (SPECULATORS | {"speculators_model_type": "dflash2", "draft_vocab_size": 512}, "draft_vocab_size=512"),
        (SPECULATORS | {"speculators_model_type": "dspark", "draft_vocab_size": 512}, "draft_vocab_size=512"),
    ],
)
def test_parts_that_make_no_sense(raw, named):
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert named in str(caught.value) and "here" in str(caught.value)


def test_tensors_of_parts():
    drafter = read(with_dflash(**DFLASH2))
    parts = part_tensors(drafter)
    assert len(expected_tensors(drafter)) == 15 * 3 + 6
    assert parts["convolutions"]["layers.2.mlp_conv.base_kernel"] == (2, 3, 256)
    # Sides, taps and groups of 4 channels.
    assert parts["convolutions"]["layers.0.attention_conv.kernel_projection.weight"] == (2 * 3 * 64, 256)
    assert parts["pairs"] == {
        "candidate_selector.predecessor_codebook": (1024, 7),
        "candidate_selector.successor_codebook": (1024, 7),
        "candidate_selector.hidden_projection.weight": (7, 256),
    }
    gated = read(DEEPSPEC | {"markov_rank": 9, "markov_head_type": "gated"})
    assert part_tensors(gated)["pairs"] == {
        "markov_head.markov_w1.weight": (1024, 9),
        "markov_head.markov_w2.weight": (1024, 9),
        "markov_head.gate_proj.weight": (9, 256 + 9),
        "markov_head.gate_proj.bias": (9,),
    }


def test_codebooks_under_both_names():
    """z-lab publishes them without `.weight`, and its library writes them with it."""
    drafter = read(with_dflash(**DFLASH2))
    published = tensors(expected_tensors(drafter))
    saved = [
        tensor._replace(name=f"{tensor.name}.weight") if tensor.name.endswith("_codebook") else tensor
        for tensor in published
    ]
    assert tensor_problems(drafter, published) == tensor_problems(drafter, saved) == []
    [problem] = tensor_problems(drafter, [tensor for tensor in saved if "successor" not in tensor.name])
    assert problem == "missing candidate_selector.successor_codebook [1024, 7]"


def test_muse():
    """The library of the target captures inputs of layers; some drafters for it name outputs."""
    raw = without(ZLAB, "vocab_size", "dflash_config", "model_type") | ZLAB["dflash_config"]
    assistant = read(raw | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"})
    assert (assistant.vocab_size, assistant.layers) == (202048, (BOTH, BOTH, FULL))
    found = {
        {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(
            name, name
        ): shape
        for name, shape in expected_tensors(assistant).items()
    }
    assert tensor_problems(assistant, tensors(found)) == []
    selecting = read(with_dflash(**DFLASH2) | {"architectures": ["DFlash2DraftModel"]})
    for drafter in (assistant, selecting):
        assert drafter.captured_layers("muse_glimmer") == [1, 2, 3] and drafter.captured_layers("qwen3") == [0, 1, 2]
    assert read(ZLAB).captured_layers("muse_glimmer") == [0, 1, 2]


def test_copies_of_deepspec():
    """Frozen copies of the target's embedding and lm_head, and the confidence head, are there and not loaded."""
    head = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    drafter = read(DEEPSPEC | {"markov_rank": 9} | head)
    copies = {"embed_tokens.weight": (1024, 256), "lm_head.weight": (1024, 256)}
    confidence = {"confidence_head.proj.weight": (1, 256 + 9), "confidence_head.proj.bias": (1,)}
    assert tensor_problems(drafter, tensors(expected_tensors(drafter) | copies | confidence)) == []
    plain = read(DEEPSPEC)
    assert tensor_problems(plain, tensors(expected_tensors(plain) | confidence)) == [
        "unexpected confidence_head.proj.weight [1, 265]",
        "unexpected confidence_head.proj.bias [1]",
    ]


# --- fields that change the drafter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["input_embedding_scale", "attention_value_scale"])
def test_scales(field):
    assert getattr(read(ZLAB), field) == 1.0
    for raw in (ZLAB | {field: 16}, with_dflash(**{field: 16.0})):
        assert getattr(read(raw), field) == 16.0


@pytest.mark.parametrize(
    ("field", "value", "off"),
    [("attention_sink_bias", True, False), ("gating", True, False)],
)
def test_field_of_related_drafters(field, value, off):
    assert read(with_dflash(**{field: off})) == read(ZLAB)
    for raw in (with_dflash(**{field: value}), ZLAB | {field: value}):
        with pytest.raises(ConfigError, match=f"{field}={value}"):
            read(raw)


@pytest.mark.parametrize(
    "field", ["input_embedding_scale", "attention_value_scale", "output_multiplier", "final_logit_softcapping"]
)
@pytest.mark.parametrize("value", [0, -1.0, "1", float("nan"), float("inf")])
def test_scale_that_is_no_scale(field, value):
    with pytest.raises(ConfigError, match=field):
        read(with_dflash(**{field: value}))


ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn with a factor of its own": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.5,
    },
    "yarn as gpt-oss has it": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "attention_factor": 1.5,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


def sglang_config_of(**arguments):
    on_cpu = {} if torch.cuda.is_available() else {"device": "cpu", "attention_backend": "torch_native"}
    return get_context().override_server_args(model_path=str(TARGET_DIR), **on_cpu, **arguments)


@pytest.fixture(scope="module")
def sglang_config():
    """Publish a server's arguments, which SGLang's layers read while they are built."""
    with sglang_config_of():
        yield


@pytest.mark.parametrize("scaling", ROPE.values(), ids=ROPE)
def test_rope_of_sglang_is_that_of_transformers(scaling, sglang_config):
    config = to_qwen3_config(ZLAB | {"rope_scaling": scaling}, "here")
    rope = config.rope_parameters
    positions = torch.tensor([0, 1, 17, 511, 512, 513, 2047])

    sglang = get_rope(
        config.head_dim,
        rotary_dim=config.head_dim,
        max_position=config.max_position_embeddings,
        base=rope["rope_theta"],
        rope_scaling=rope,
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])

    half = config.head_dim // 2
    expected = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    torch.testing.assert_close(sglang.cos_sin_cache[positions], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0]}},
            "longrope",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}},
            "one RoPE",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_dim": 32}}, "rope_dim=32"),
    ],
)
def test_rope_that_is_refused(fields, named):
    with pytest.raises(ConfigError, match=named):
        read(without(ZLAB, "rope_scaling", "rope_theta") | fields)


def test_copies_of_the_rope_of_a_target():
    """`rope_dim` says that all of a head is rotated, whatever fields of the target's RoPE are left next to it."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    copied = {"rope_dim": 64, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    plain = without(ZLAB, "rope_scaling", "rope_theta")
    assert read(plain | {"rope_parameters": rope | copied}) == read(plain | {"rope_parameters": rope})


def test_a_server_that_overrides_fields_takes_its_own_drafter_again():
    overrides = {"rms_norm_eps": 1e-5, "rope_scaling": ROPE["yarn"]}
    with sglang_config_of(json_model_override_args=json.dumps(overrides)):
        config = get_config(str(DRAFTER_DIR), trust_remote_code=False, model_override_args=overrides)
    serving = DFlashConfig.from_dict(config.to_dict(), str(DRAFTER_DIR))
    with sglang_config_of(json_model_override_args=json.dumps(overrides)):
        assert differences(str(DRAFTER_DIR), serving) == []
    with sglang_config_of():
        found = [problem.partition("=")[0] for problem in differences(str(DRAFTER_DIR), serving)]
    assert found == ["rope_type", "rope_parameters", "rms_norm_eps"]


# --- tensors --------------------------------------------------------------------------------------------------------


def tensors(shapes):
    """Return the tensors of a checkpoint in bfloat16."""
    dtypes = {"d2t": "int64", "t2d": "bool"}
    return [Tensor(name, shape, dtypes.get(name, "bfloat16")) for name, shape in shapes.items()]


def test_tensors_of_other_dtypes():
    drafter = read(SPECULATORS | {"draft_vocab_size": 8})
    found = expected_tensors(drafter) | {"embed_tokens.weight": (1024, 256)}
    # Tensors that are not loaded may have any dtype.
    odd = {"norm.weight": "int8", "d2t": "float32", "lm_head.weight": "F8_E4M3", "embed_tokens.weight": "int8"}
    found = [tensor._replace(dtype=odd.get(tensor.name, tensor.dtype)) for tensor in tensors(found)]
    problems = tensor_problems(drafter, found)
    assert sorted(problem.partition(",")[0] for problem in problems) == [
        "d2t is in float32",
        "lm_head.weight is in F8_E4M3",
        "norm.weight is in int8",
    ]


def test_tensor_under_two_names():
    drafter = read(ZLAB)
    twice = expected_tensors(drafter) | {"model.fc.weight": (256, 768)}
    assert tensor_problems(drafter, tensors(twice)) == ["fc.weight is there twice, as fc.weight and as model.fc.weight"]


def test_tensors_of_a_reduced_vocabulary():
    drafter = read(SPECULATORS | {"draft_vocab_size": 8})
    found = expected_tensors(drafter)
    assert found["lm_head.weight"] == (8, 256) and found["d2t"] == (8,)
    assert tensor_problems(drafter, tensors(found | {"t2d": (1024,), "embed_tokens.weight": (1024, 256)})) == []
    assert tensor_problems(drafter, tensors(without(found, "d2t") | {"t2d": (8,)})) == [
        "t2d has shape [8], expected [1024]",
        "missing d2t [8]",
    ]


def test_attention_bias_has_tensors():
    drafter = read(ZLAB | {"attention_bias": True})
    assert tensor_problems(drafter, tensors(expected_tensors(read(ZLAB)))) == [
        f"missing layers.{i}.self_attn.{name}.bias [{size}]"
        for i in range(3)
        for name, size in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256))
    ]


def test_draft_tokens_are_offsets():
    drafter = read(SPECULATORS | {"draft_vocab_size": 3})
    t2d = torch.zeros(1024, dtype=torch.bool)
    t2d[[5, 7, 1023]] = True
    tokens = draft_to_target(torch.tensor([5, 6, 1021]), t2d, drafter)
    assert tokens.tolist() == [5, 7, 1023]


@pytest.mark.parametrize("d2t", [[5, 7, 1023], [0, -1, 0], [-1, 0, 0]])
def test_draft_tokens_that_are_none(d2t):
    """The mapping has token ids instead of offsets, a token twice, or a token below 0."""
    drafter = read(SPECULATORS | {"draft_vocab_size": 3})
    with pytest.raises(ConfigError, match="d2t of drafter here"):
        draft_to_target(torch.tensor(d2t), None, drafter)


def test_draft_tokens_that_contradict():
    drafter = read(SPECULATORS | {"draft_vocab_size": 3})
    with pytest.raises(ConfigError, match="d2t and t2d"):
        draft_to_target(torch.tensor([0, 0, 0]), torch.arange(1024) % 2 == 0, drafter)
