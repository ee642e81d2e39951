"""Targets with recurrent layers (Gated DeltaNet): a block is verified without changing their states.

A recurrent layer keeps one state per request, which every token changes. Verification of a block must not change it,
because some of the block's tokens may be rejected. So verification stores what each token adds to the state (its
inputs), not the state after each token, which is fifty times larger. When the accepted length is known, the state is
advanced by the inputs of the accepted tokens.

SGLang calls these states mamba states. Only this package knows how SGLang keeps them.

    arguments.py     which server arguments and checkpoints are served
    pool.py          memory: the states' pool, the inputs of verified tokens, and what SGLang reserves for them
    verify.py        the convolution and the delta rule of one layer over verified trees or chains
    state.py         the states of running requests, advanced by what is accepted
    prefix_cache.py  which states SGLang's prefix cache may keep
"""
