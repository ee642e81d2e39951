"""Logits over a vocabulary that tensor-parallel ranks share: the largest, and the largest k."""
