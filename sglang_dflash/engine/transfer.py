"""Prefill and decode on different servers: what SGLang does not know of requests and KV that travel.

A prefill server sends the drafter's KV with the target's, under the same page numbers. The decode server makes a
"prebuilt" batch of the requests that have arrived, without a prefill. So :class:`DFlashWorker` begins their state here.
"""

from __future__ import annotations

import hashlib
import json

import torch
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpeculativeAlgorithm

from sglang_dflash.checkpoint import formats
from sglang_dflash.engine.relay import DFlashDraftInput
from sglang_dflash.errors import ConfigError
from sglang_dflash.server_args.arguments import serves_dflash


def build_draft_input(
    original,
    algorithm: SpeculativeAlgorithm,
    batch: ScheduleBatch,
    last_tokens_tensor: torch.Tensor,
    future_map: FutureMap,
) -> SpecInput | None:
    """AROUND `SpeculativeAlgorithm.build_disagg_draft_input`: make the input of the first cycle.

    Args:
        batch: requests that have arrived.
        last_tokens_tensor: [bs] int64. Their last tokens, which have no KV yet.
        future_map: relays both tensors to the next step, with overlap scheduling.
    """
    if not algorithm.is_dflash():
        return original(algorithm, batch, last_tokens_tensor, future_map)
    draft_input = DFlashDraftInput(bonus_tokens=last_tokens_tensor, new_seq_lens=batch.seq_lens)
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(batch.req_pool_indices, batch.seq_lens)
        future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last_tokens_tensor))
    return draft_input


def begin_transferred(batch: ScheduleBatch | None, scheduler: Scheduler, running_batch: ScheduleBatch) -> None:
    """AFTER `Scheduler.get_new_prebuilt_batch`: begin the state that requests have by slot.

    Another request may have left its own there.
    """
    if batch is not None and scheduler.spec_algorithm.is_dflash():
        scheduler.draft_worker.begin_transferred(batch)


def describe_drafter(original, token_to_kv_pool: KVCache) -> str | None:
    """AROUND `get_pd_kv_layout`: what prefill and decode server must have in common, for SGLang to compare.

    A digest of the drafter's config, the dtype of its KV, and the ranks that share its heads.
    """
    layout = original(token_to_kv_pool)
    if not serves_dflash():
        return layout
    spec = get_spec()
    config = formats.read_config(spec.speculative_draft_model_path, spec.speculative_draft_model_revision)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
    kv_dtype = spec.speculative_draft_kv_cache_dtype or "as the target"
    return f"{layout or ''}DFLASH drafter {digest}, KV {kv_dtype}, --tp-size {get_parallel().tp_size}"


def check_prefill_server(original, manager: CommonKVManager, info: PrefillServerInfo) -> None:
    """AROUND `CommonKVManager._resolve_rank_mapping`: refuse a prefill server without a drafter.

    SGLang compares layouts only if both servers have one.

    Raises:
        ConfigError: the prefill server sends no KV of this server's drafter.
    """
    if serves_dflash() and info.kv_layout != manager.kv_layout:
        raise ConfigError(
            f"The prefill server has kv_layout={info.kv_layout}, and this decode server {manager.kv_layout}: start "
            "both with the same --speculative-algorithm DFLASH and --speculative-draft-model-path."
        )
    original(manager, info)
