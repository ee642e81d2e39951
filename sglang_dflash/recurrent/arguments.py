"""Server arguments and checkpoints that a target with recurrent layers is served with."""

from __future__ import annotations

import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.config import MAX_NODES
from sglang_dflash.errors import ConfigError

# Fields of `ServerArgs` and the values that a recurrent target is served with: the dtype and layout of the states, and
# the kernels that compute them. The flag is the field's name with dashes.
REQUIRED = {
    "mamba_ssm_dtype": (None, "float32"),
    "linear_attn_backend": (None, "triton"),
    "linear_attn_decode_backend": (None, "triton"),
    "linear_attn_prefill_backend": (None, "triton"),
    "linear_attn_verify_backend": (None, "triton"),
    "enable_linear_replayssm": (False,),
    "enable_linear_replayssm_spec": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "enable_mamba_cache_stochastic_rounding": (False,),
    "mamba_radix_cache_strategy": ("auto", "no_buffer", "extra_buffer"),
    "enable_streaming_session": (False,),
    "enable_mixed_chunk": (False,),
}


def check_arguments(server_args: ServerArgs) -> None:
    """Check the arguments of a server whose target has recurrent layers.

    Both the user's values and the values that SGLang resolved are checked.

    Raises:
        ConfigError: naming the first flag, field or variable that is not supported, and its value.
    """
    cfg, model_config = resolving_view(server_args), model_config_of(server_args)
    path = cfg.model_path
    if "full_attention_interval" not in hybrid_gdn_config(model_config).to_dict():
        raise ConfigError(
            f"full_attention_interval is missing in config.json of target {path}: SGLang takes from it, not from "
            "layer_types, which layers are recurrent."
        )
    activation = hybrid_gdn_config(model_config).hidden_act
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act is {activation} in config.json of target {path}: DFLASH verifies Gated DeltaNet layers with "
            "silu only."
        )
    for name, allowed in REQUIRED.items():
        for value in (getattr(server_args, name), getattr(cfg, name)):
            if value not in allowed:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is not supported with --speculative-algorithm DFLASH and a "
                    f"target with recurrent layers ({path})."
                )
    dtype = str(model_config.dtype).removeprefix("torch.")
    conv_dtype = envs.SGLANG_MAMBA_CONV_DTYPE.get()
    if conv_dtype != dtype:
        raise ConfigError(
            f"SGLANG_MAMBA_CONV_DTYPE={conv_dtype}: the target {path} is served in {dtype}, and a state that is "
            f"rounded once a block is not the one that is rounded after every token; set it to {dtype}."
        )


def check_num_nodes(num_nodes: int) -> None:
    """Check how many tokens are verified for a request.

    Raises:
        ConfigError: they are more than the bits of an int64, which say what a token sees.
    """
    if num_nodes > MAX_NODES:
        raise ConfigError(
            f"--speculative-dflash-block-size {num_nodes}: of a target with recurrent layers DFLASH verifies at most "
            f"{MAX_NODES} tokens at a time; set at most {MAX_NODES}."
        )


def check_state_dtype(dtype: torch.dtype) -> None:
    """Check the dtype of the states' pool.

    Raises:
        ConfigError: states in this dtype would differ from those of decoding.
    """
    if dtype != torch.float32:
        raise ConfigError(
            f"the recurrent states of the target would be kept in {dtype} (mamba_ssm_dtype in its config.json, or "
            "SGLANG_MAMBA_SSM_DTYPE), and rounded after every block, not after every token; set --mamba-ssm-dtype "
            "float32."
        )


def check_track_interval(interval: int, block_size: int) -> None:
    """Check that of two cycles that follow each other only one can reach a multiple of `interval` tokens.

    Under overlap scheduling two cycles are under way at a time, and only one of them may keep a state.

    Raises:
        ConfigError: two blocks of `block_size` tokens do not fit between two multiples.
    """
    if interval < 2 * block_size:
        raise ConfigError(
            f"--mamba-track-interval {get_exec().mamba.mamba_track_interval}: a state is kept every {interval} "
            f"tokens, and two blocks of {block_size} may lie between two of them; set at least {2 * block_size}."
        )
