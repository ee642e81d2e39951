"""Attention backends of SGLang for other numbers of verified tokens than the server's default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_context, get_spec


@contextmanager
def override_num_draft_tokens(num_tokens: int) -> Iterator[None]:
    """Have SGLang build attention backends for `num_tokens` tokens of each request."""
    original = get_spec().speculative_num_draft_tokens
    get_context().override("sglang_dflash", speculative_num_draft_tokens=num_tokens)
    try:
        yield
    finally:
        get_context().override("sglang_dflash", speculative_num_draft_tokens=original)


def build_backend(runner: ModelRunner, num_tokens: int) -> AttentionBackend:
    """Return another attention backend of a model, for `num_tokens` tokens of each request."""
    with override_num_draft_tokens(num_tokens):
        return runner._get_attention_backend()
