"""A DFlash drafter for SmolLM2-135M-Instruct, trained on what that target writes.

Made by `scripts/train_pair.py --pair smollm2`. The target does not come with it: `make_target.py` writes it.
"""
