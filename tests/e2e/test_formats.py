"""A drafter drafts the same in every format: the text is the target's, and every cycle is the oracle's."""

import pytest
from checkpoints import CONFIG, FORMATS, speculators_anchor, speculators_dflash2, speculators_gated, zlab_dflash2
from oracle import Oracle, assert_same_cycles
from serving import Settings, trees

MAX_NEW_TOKENS = 64


def assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths, *flags):
    """Check that servers with these drafters, and flags, accept in every cycle what the oracle accepts."""
    oracles = [Oracle(path) for path in paths]
    settings = [
        Settings(
            "-".join((path.name, *(str(value) for _, value in flags))),
            dflash_flags=(("speculative-draft-model-path", str(path)), *flags),
            trained=oracle.block_size,
        )
        for path, oracle in zip(paths, oracles)
    ]
    servers = keeper.two(*settings)
    # Contexts shorter and longer than the window of 64.
    some = [*prompts[:6], mixed_prompts[0], mixed_prompts[-1]]
    # The target's row of the mask token stays its own.
    some.append([*prompts[0], CONFIG["dflash_config"]["mask_token_id"]])

    for path, oracle, server in zip(paths, oracles, servers):
        answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS)

        expected = [oracle.generate(prompt, MAX_NEW_TOKENS, **server.settings.cycles) for prompt in some]
        for answer, output in zip(answers, expected):
            assert_same_cycles(answer, output)
        assert any(length > 1 for output in expected for length in output.accept_lengths), f"{path.name} never helped"


@pytest.mark.parametrize("writers", FORMATS, ids=lambda writers: "-".join(write.__name__ for write in writers))
def test_formats(writers, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths)


@pytest.mark.parametrize(
    ("writers", "flags"),
    [
        # All candidates of the selector, and three of them.
        ((zlab_dflash2, speculators_gated), trees(16, 16)),
        ((speculators_anchor, speculators_dflash2), trees(3, 20)),
        # Fewer rows than the drafter was trained with.
        ((speculators_anchor, speculators_dflash2), (("speculative-dflash-block-size", 5),)),
    ],
    ids=["trees", "narrow trees", "short blocks"],
)
def test_parts(writers, flags, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths, *flags)
