"""DFLASH's command line: which flags are refused, and what the others mean."""
