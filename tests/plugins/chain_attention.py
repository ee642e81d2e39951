"""Test plugin: graphs verify chains with this package's attention, as on a GPU in place of FlashInfer's.

`support.plugins` installs it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    from sglang_dflash.attention.trees import ChainAttentionBackend
    from sglang_dflash.engine import stages

    class Logged(ChainAttentionBackend):
        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            logger.warning("Chains have our attention.")

    stages.chain_attention = lambda target_runner, block_size: Logged(target_runner)
