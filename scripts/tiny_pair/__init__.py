"""The stages of `scripts/train_tiny_pair.py`."""
