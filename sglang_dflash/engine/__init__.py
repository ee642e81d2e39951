"""The decode cycle: worker, CUDA graphs, and what travels between two cycles."""
