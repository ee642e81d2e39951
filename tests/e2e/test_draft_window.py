"""`--speculative-draft-window-size`: the drafter sees the last tokens of the context, and the text is the target's."""

import pytest
from checkpoints import zlab_dflash2
from oracle import Oracle, assert_same_cycles
from serving import SYNC, TREES_ON_A_GPU, Settings, trees

from models.tiny import DRAFTER_DIR

MAX_NEW_TOKENS = 64


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Paths of a drafter without parts, and of one with convolutions and pairs."""
    return {"v1": DRAFTER_DIR, "parts": zlab_dflash2(tmp_path_factory.mktemp("drafters") / "parts")}


@pytest.mark.parametrize(
    ("drafter", "window", "page_size", "flags"),
    [
        ("v1", 80, 1, ()),
        # Not a multiple of any page, and shorter than the 64 tokens of the drafter's sliding layers.
        ("parts", 37, 16, (SYNC,)),
        # Three of the drafter's five candidates may follow a node.
        pytest.param("parts", 37, 16, trees(3, 20), marks=pytest.mark.cpu(reason=TREES_ON_A_GPU)),
    ],
)
def test_cycles_are_the_oracles(keeper, prompts, mixed_prompts, drafters, drafter, window, page_size, flags):
    """Prompts are shorter than the window, grow out of it, or are many windows long."""
    settings = Settings(
        f"window{window}-page{page_size}-{drafter}",
        flags=(("page-size", page_size),),
        dflash_flags=(
            ("speculative-draft-model-path", str(drafters[drafter])),
            ("speculative-draft-window-size", window),
            *flags,
        ),
    )
    oracle, sizes = Oracle(drafters[drafter]), settings.cycles
    windowed = {"draft_window": window, "page_size": page_size}
    some = [mixed_prompts[0], mixed_prompts[7], *mixed_prompts[12:], *prompts[:4]]
    server = keeper.server(settings, dflash=True)
    assert server.internal_state()["sglang_dflash"]["draft_window_size"] == window

    answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)

    outputs = [oracle.generate(prompt, MAX_NEW_TOKENS, ignore_eos=True, **windowed, **sizes) for prompt in some]
    for answer, output in zip(answers, outputs):
        assert_same_cycles(answer, output)
    server.flush_cache()
    server.wait_until_empty()
    # Otherwise the prompts would not distinguish a window from none. Long ones do.
    long = range(2, 6)
    whole = [oracle.generate(some[i], MAX_NEW_TOKENS, ignore_eos=True, **sizes) for i in long]
    assert [outputs[i].tokens for i in long] == [output.tokens for output in whole]
    assert [outputs[i].accept_lengths for i in long] != [output.accept_lengths for output in whole]
