"""A drafter drafts the same in every format: the text is the target's, and every cycle is the oracle's."""

import pytest
from checkpoints import FORMATS
from oracle import Oracle, assert_same_cycles
from serving import Settings

MAX_NEW_TOKENS = 64


@pytest.mark.parametrize("writers", FORMATS, ids=lambda writers: "-".join(write.__name__ for write in writers))
def test_formats(writers, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    oracles = [Oracle(path) for path in paths]
    servers = keeper.two(
        *(
            Settings(
                path.name,
                dflash_flags=(("speculative-draft-model-path", str(path)),),
                trained=oracle.block_size,
            )
            for path, oracle in zip(paths, oracles)
        )
    )
    # Contexts shorter and longer than the window of 64.
    some = [*prompts[:6], mixed_prompts[0], mixed_prompts[-1]]

    for path, oracle, server in zip(paths, oracles, servers):
        answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS)

        expected = [oracle.generate(prompt, MAX_NEW_TOKENS) for prompt in some]
        for answer, output in zip(answers, expected):
            assert_same_cycles(answer, output)
        assert any(length > 1 for output in expected for length in output.accept_lengths), f"{path.name} never helped"
