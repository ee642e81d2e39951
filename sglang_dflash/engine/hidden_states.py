"""The target's hidden states: the layers that the drafter needs, and the last ones for requests that ask for them.

SGLang returns either the captured layers or the last hidden states. A server that was started with
`--enable-return-hidden-states` gets the last ones as one more captured layer.
Shapes: T tokens, F captured target layers, H hidden size.
"""

from __future__ import annotations

import weakref

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn

_targets: weakref.WeakSet[LogitsProcessor] = weakref.WeakSet()


def capture_last_hidden_states(target_model: nn.Module) -> None:
    """From now on this model's captured hidden states are [T, (F + 1) * H]."""
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
