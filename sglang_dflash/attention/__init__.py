"""Attention of blocks and trees in SGLang's attention backends."""
