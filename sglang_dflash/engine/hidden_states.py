"""Hidden states of the target: the layers that the drafter needs, and the last ones for requests that ask for them.

SGLang returns either the captured layers or the last hidden states. With `--enable-return-hidden-states`, the last ones
are captured as one more layer.
Shapes as in :mod:`sglang_dflash.types`: bs requests, T tokens, F captured target layers, H hidden size.
"""

from __future__ import annotations

import weakref

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import get_server_return_hidden_states_mode
from torch import nn

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


def capture_last_hidden_states(target_model: nn.Module) -> None:
    """Capture the last hidden states too: this model returns [T, (F + 1) * H] from now on."""
    _targets.update(module for module in target_model.modules() if isinstance(module, LogitsProcessor))


def append_last_hidden_states(
    original, processor: LogitsProcessor, hidden_states, hidden_states_before_norm, aux_hidden_states, *args, **kwargs
):
    """AROUND `LogitsProcessor._get_hidden_states_to_store`; `aux_hidden_states` are the captured layers."""
    if processor in _targets and aux_hidden_states is not None:
        captured = [aux_hidden_states] if isinstance(aux_hidden_states, torch.Tensor) else aux_hidden_states
        aux_hidden_states = [*captured, hidden_states]
    return original(processor, hidden_states, hidden_states_before_norm, aux_hidden_states, *args, **kwargs)


def capture_layers(
    original,
    *,
    model: nn.Module,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: list[int] | None,
    **others,
) -> None:
    """AROUND `attention_backend_setup.configure_aux_hidden_state_capture`, which tells the target what to capture."""
    if dflash_use_aux_hidden_state and type(model).__name__ == "Qwen3VLForConditionalGeneration":
        # As its own method does for Qwen3-VL-MoE, by one that the dense language model does not have.
        model.capture_aux_hidden_states = True
        model.model.layers_to_capture = [layer_id + 1 for layer_id in dflash_target_layer_ids]
        return
    original(
        model=model,
        dflash_use_aux_hidden_state=dflash_use_aux_hidden_state,
        dflash_target_layer_ids=dflash_target_layer_ids,
        **others,
    )


def prompt_hidden_states(
    batch: ScheduleBatch, hidden_states: torch.Tensor, extend_lens: torch.Tensor
) -> torch.Tensor | None:
    """Return a prefill's last hidden states as the scheduler takes them (`_get_prefill_hidden_capture_mode`).

    Args:
        batch: the prefill.
        hidden_states: [T, H].
        extend_lens: [bs] int32, tokens of each request.

    Returns:
        [T, H] of all prefilled tokens, or [bs, H] of each request's last one; None: no request asks for them.
    """
    if not batch.return_hidden_states:
        return None
    mode = max(batch.return_hidden_states_mode, get_server_return_hidden_states_mode())
    return hidden_states[extend_lens.cumsum(0) - 1] if mode.is_last() else hidden_states
