"""Training for `scripts/train_pair.py`: code that the pairs share, and a folder of stages for each pair."""
