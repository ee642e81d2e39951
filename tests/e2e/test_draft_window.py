"""`--speculative-draft-window-size`: the drafter sees the last tokens of the context, and the text is the target's."""

import pytest
from oracle import assert_same_cycles
from serving import SYNC, Settings, trees

MAX_NEW_TOKENS = 64


def settings(name: str, window: int, page_size: int, *flags: tuple) -> Settings:
    return Settings(
        name,
        flags=(("page-size", page_size),),
        dflash_flags=(("speculative-draft-window-size", window), *flags),
    )


# The second window is not a multiple of any page, and is shorter than the 64 tokens of the drafter's sliding layers.
WINDOWS = [
    settings("window80", 80, 1),
    settings("window37-page16-sync", 37, 16, SYNC),
    settings("window37-page16-trees", 37, 16, *trees(8, 20)),
]


@pytest.fixture
def server(keeper, settings):
    server = keeper.server(settings, dflash=True)
    yield server
    server.flush_cache()
    server.wait_until_empty()


@pytest.mark.parametrize("settings", WINDOWS, indirect=True, ids=str)
def test_cycles_are_the_oracles(server, settings, prompts, mixed_prompts, oracle):
    """Prompts are shorter than the window, grow out of it, or are many windows long."""
    window = {
        "draft_window": dict(settings.dflash_flags)["speculative-draft-window-size"],
        "page_size": dict(settings.flags)["page-size"],
    }
    sizes = settings.cycles
    some = [mixed_prompts[0], mixed_prompts[7], *mixed_prompts[12:], *prompts[:8]]
    assert server.internal_state()["sglang_dflash"]["draft_window_size"] == window["draft_window"]

    answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)

    outputs = [oracle.generate(prompt, MAX_NEW_TOKENS, ignore_eos=True, **window, **sizes) for prompt in some]
    for answer, output in zip(answers, outputs):
        assert_same_cycles(answer, output)
    # Otherwise the prompts would not distinguish a window from none.
    whole = [oracle.generate(prompt, MAX_NEW_TOKENS, ignore_eos=True, **sizes) for prompt in some]
    assert [output.tokens for output in outputs] == [output.tokens for output in whole]
    assert [output.accept_lengths for output in outputs] != [output.accept_lengths for output in whole]
