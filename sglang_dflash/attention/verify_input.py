"""SGLang's `spec_info` of a TARGET_VERIFY batch: what attention needs to know of the drafts."""

from __future__ import annotations

from sglang.srt.speculative import dflash_info

from sglang_dflash.types import Trees


class DFlashVerifyInput(dflash_info.DFlashVerifyInput):
    """One chain or tree per request, which the target verifies.

    SGLang's graph capture builds its own base class for its dummy batches, and FlashInfer and the CPU backend dispatch
    on its type, so this one must be that class.

    Attributes:
        trees: set once they are grown; None: chains. Attention reads them here, because SGLang's layers hand their
            backend nothing but the batch.
    """

    trees: Trees | None = None
