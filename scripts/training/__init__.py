"""How `scripts/train_pair.py` trains: what its pairs share, and a folder of stages for each pair."""
