"""CUDA graphs of prefills: one for a whole prefill, where SGLang's default cuts it at every attention.

A graph in parts leaves the attention of every layer to the host. One graph needs less of the host, and a slow host is
what small targets wait for (scripts/results/cycle_notes.md).
"""

from __future__ import annotations

import logging

from sglang.srt.arg_groups.model_override_base import attention_backends_of, model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, Phase, with_phase
from sglang.srt.runtime_context import get_platform
from sglang.srt.server_args import ServerArgs

from sglang_dflash.checkpoint.config import TargetFacts
from sglang_dflash.server_args.adaptive import lora_flag

logger = logging.getLogger(__name__)

# Major version of the compute capability.
_HOPPER = 9
# Most requests in a graph. Its page table has a row for each.
_MAX_REQUESTS = 64
# Values of `--kv-cache-dtype` for KV in the model's dtype.
_KV_DTYPES = ("auto", "bf16", "bfloat16")
# Fields of a target's config that give its number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def choose(server_args: ServerArgs, target: TargetFacts) -> None:
    """Put each prefill into one CUDA graph where that has been tried, unless a flag names the graphs of prefills.

    Where SGLang captures none, nothing changes. A graph has a fixed number of requests, and a prefill of more runs
    without one. So graphs have as many as run at a time, and not SGLang's default of a request for each 512 tokens of
    a chunk.

    Args:
        server_args: `max_running_requests` is resolved.
        target: of the server.
    """
    cfg = resolving_view(server_args)
    graphs = cfg.cuda_graph_config
    if are_named(server_args) or graphs.prefill.backend != Backend.BREAKABLE or not graphs.prefill.bs:
        return
    reason = obstacle(server_args, target)
    if reason is not None:
        logger.info("Each prefill runs in many CUDA graphs, SGLang's default: one has not been tried %s.", reason)
        return
    num_requests = graphs.prefill.full_prefill_max_req
    if num_requests is None:
        num_requests = min(cfg.max_running_requests, _MAX_REQUESTS)
    graphs = with_phase(graphs, Phase.PREFILL, backend=Backend.FULL, full_prefill_max_req=num_requests)
    declare_resolution(server_args, "sglang_dflash", cuda_graph_config=graphs)
    logger.info(
        "A prefill of up to %d requests runs in one CUDA graph. SGLang's default is --cuda-graph-backend-prefill %s.",
        num_requests,
        Backend.BREAKABLE,
    )


def are_named(server_args: ServerArgs) -> bool:
    """Return whether `--cuda-graph-backend-prefill` or `--cuda-graph-config` names the graphs of prefills.

    A :class:`CudaGraphConfig` names all of them.
    """
    graphs = server_args.cuda_graph_config or {}
    if server_args.cuda_graph_backend_prefill is not None or isinstance(graphs, CudaGraphConfig):
        return True
    return "backend" in graphs.get(Phase.PREFILL, {})


def obstacle(server_args: ServerArgs, target: TargetFacts) -> str | None:
    """Return with what one graph for a prefill has not been tried: "on ..." or "with ..."; None: it has been."""
    cfg = resolving_view(server_args)
    if get_platform().device_capability[0] != _HOPPER:
        return f"on sm_{get_platform().device_sm}"
    backends = attention_backends_of(cfg)
    if backends != ("fa3", "fa3"):
        return f"on {' and '.join(dict.fromkeys(backends))}"
    model_config = model_config_of(server_args)
    text_config = model_config.hf_text_config.to_dict()
    kinds = {
        "recurrent layers": target.is_recurrent,
        "sliding windows": model_config.sliding_window_size is not None,
        "latent attention": model_config.attention_arch != AttentionArch.MHA,
        "experts": any(text_config.get(name) for name in _EXPERTS),
        "parts for images or sound": model_config.hf_config is not model_config.hf_text_config,
        "quantized weights": model_config.quantization is not None,
    }
    for kind, has in kinds.items():
        if has:
            return f"with a target that has {kind}"
    flags = {
        "--tp-size": cfg.tp_size > 1,
        "--page-size": cfg.page_size > 1,
        "--kv-cache-dtype": cfg.kv_cache_dtype not in _KV_DTYPES,
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache,
        "--disaggregation-mode": cfg.disaggregation_mode != "null",
        "--enable-mixed-chunk": cfg.enable_mixed_chunk,
        "--enable-memory-saver": cfg.enable_memory_saver,
        "--enable-deterministic-inference": cfg.enable_deterministic_inference,
    }
    given = [flag for flag, is_given in flags.items() if is_given]
    flag = lora_flag(server_args) or next(iter(given), None)
    return None if flag is None else f"with {flag}"
