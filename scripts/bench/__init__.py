"""Parts of bench_sweep.py and profile_cycle.py: model pairs, prompts, engines and results."""
