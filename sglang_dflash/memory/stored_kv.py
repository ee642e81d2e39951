"""KV in a storage backend of SGLang's hierarchical cache: its names tell whose drafter wrote it.

SGLang keeps the drafter's KV next to the target's, in host memory and in storage, under the same slots and pages. In
host memory both belong to one server. Storage outlives servers, and its names have the target only.
"""

from __future__ import annotations

import hashlib

from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.runtime_context import get_spec

from sglang_dflash.server_args.arguments import serves_dflash

# Checkpoints that the drafter was updated from since the start of this process.
_updates: list[str] = []


def note_update(path: str) -> None:
    """Give KV that is stored from now on another name: the drafter has the weights of another checkpoint."""
    _updates.append(path)


def storage_model_name(original, model_name: str | None, host_pool: HostKVCache) -> str | None:
    """AROUND `cache_controller.storage_model_name`: add a digest of the drafter's weights and KV dtype.

    Another drafter computes other KV from the same target. Names of files are too short for paths.
    """
    name = original(model_name, host_pool)
    if not serves_dflash():
        return name
    spec = get_spec()
    fields = (
        spec.speculative_draft_model_path,
        spec.speculative_draft_model_revision,
        spec.speculative_draft_model_quantization,
        spec.speculative_draft_kv_cache_dtype,
        *_updates,
    )
    digest = hashlib.sha256("\n".join(map(str, fields)).encode()).hexdigest()[:12]
    return f"{name or ''}-dflash-{digest}"
