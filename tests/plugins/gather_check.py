"""Test plugin: log whenever ranks gather each other's verification logits.

`support.plugins` installs it.
"""

import functools
import logging

logger = logging.getLogger(__name__)


def register():
    from sglang.srt.layers.logits_processor import LogitsProcessor

    get_logits = LogitsProcessor._get_logits

    @functools.wraps(get_logits)
    def logged(processor, hidden_states, lm_head, logits_metadata, *args, **kwargs):
        if logits_metadata.forward_mode.is_target_verify() and processor.do_tensor_parallel_all_gather:
            logger.warning("The logits of %d verified rows are gathered.", len(hidden_states))
        return get_logits(processor, hidden_states, lm_head, logits_metadata, *args, **kwargs)

    LogitsProcessor._get_logits = logged
