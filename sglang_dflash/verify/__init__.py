"""The target's decision: logits, sampling, penalties, acceptance."""
