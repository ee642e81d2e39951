"""`--speculative-adaptive`: the draft length of each decode cycle that gives the highest throughput.

A drafter proposes all tokens of a block at once, and the last ones are rarely accepted. Verifying them is free while
the GPU waits for weights. In a large batch each token costs its share of compute, and in a mixture of experts it loads
experts of its own. A drafter drafts the first tokens of a block equally well without the last ones
(scripts/results/cycle_notes.md), so a shorter draft shortens its forward too. Length 1 disables drafting.

acceptance.py  how many tokens a cycle of each draft length commits
cost.py        how long a cycle of each draft length takes
controller.py  the draft length with the most tokens per second

The draft length is the number N of tokens of a request that the target verifies, the bonus token included. These are
the N nodes of a tree, or a chain of W = N tokens. Smaller trees and shorter chains are the beginnings of larger ones.
"""
