"""A drafter drafts the same in every format: the text is the target's, and every cycle is the oracle's."""

from dataclasses import replace

import pytest
from checkpoints import (
    CONFIG,
    FORMATS,
    hybrid_dflash2,
    identity_dflash2,
    speculators_anchor,
    speculators_dflash2,
    speculators_gated,
    zlab_dflash2,
)
from oracle import Oracle, assert_same_cycles
from serving import TREES_ON_A_GPU, TWO_CORES, Settings, trees
from transformers import AutoTokenizer

from models.hybrid import TARGET_DIR as HYBRID_TARGET_DIR
from models.tiny import load_prompts

MAX_NEW_TOKENS = 64


def some_prompts(prompts, mixed_prompts):
    """Return prompts with contexts shorter and longer than the window of 64."""
    some = [*prompts[:4], mixed_prompts[0], mixed_prompts[-1]]
    # The target's row of the mask token stays its own.
    some.append([*prompts[0], CONFIG["dflash_config"]["mask_token_id"]])
    return some


def assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths, *flags, env=()):
    """Check that servers with these drafters, and flags, accept in every cycle what the oracle accepts.

    Sampled answers of a seed are the same with every drafter.
    """
    oracles = [Oracle(path) for path in paths]
    settings = [
        Settings(
            "-".join((path.name, *(str(value) for _, value in flags))),
            dflash_flags=(("speculative-draft-model-path", str(path)), *flags),
            env=env,
            trained=oracle.block_size,
        )
        for path, oracle in zip(paths, oracles)
    ]
    servers = keeper.together(*settings)
    some = some_prompts(prompts, mixed_prompts)

    for path, oracle, server in zip(paths, oracles, servers):
        answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS)

        expected = [oracle.generate(prompt, MAX_NEW_TOKENS, **server.settings.cycles) for prompt in some]
        for answer, output in zip(answers, expected):
            assert_same_cycles(answer, output)
        assert any(length > 1 for output in expected for length in output.accept_lengths), f"{path.name} never helped"
    options = {"max_new_tokens": 24, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
    first, *others = ([answer["output_ids"] for answer in server.generate(some, **options)] for server in servers)
    assert all(other == first for other in others)


@pytest.mark.parametrize("writers", FORMATS, ids=lambda writers: "-".join(write.__name__ for write in writers))
def test_formats(writers, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths)


ON_A_CPU = pytest.mark.cpu(reason=TREES_ON_A_GPU)


@pytest.mark.parametrize(
    ("writers", "flags"),
    [
        # All candidates of the selector. Three of them are in test_draft_window.py.
        pytest.param((zlab_dflash2, speculators_gated, speculators_anchor), trees(16, 20), marks=ON_A_CPU, id="trees"),
        # Fewer rows than the drafter was trained with.
        pytest.param(
            (speculators_anchor, speculators_dflash2), (("speculative-dflash-block-size", 5),), id="short blocks"
        ),
    ],
)
def test_parts(writers, flags, keeper, prompts, mixed_prompts, tmp_path):
    paths = [write(tmp_path / write.__name__) for write in writers]
    assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths, *flags)


@ON_A_CPU
def test_parts_that_change_nothing(keeper, prompts, mixed_prompts, tmp_path):
    """Every cycle, of chains and of trees, is that of the drafter without parts."""
    path, plain = identity_dflash2(tmp_path / "identity")
    chains = Settings("identity", dflash_flags=(("speculative-draft-model-path", str(path)),))
    of_trees = replace(chains, name="identity-trees", dflash_flags=(*chains.dflash_flags, *trees(16, 16)))
    some, oracle = some_prompts(prompts, mixed_prompts), Oracle(plain)
    for server in keeper.together(chains, of_trees):
        for prompt, answer in zip(some, server.generate(some, max_new_tokens=MAX_NEW_TOKENS)):
            assert_same_cycles(answer, oracle.generate(prompt, MAX_NEW_TOKENS, **server.settings.cycles))


@pytest.mark.cpu(reason="two ranks need two GPUs; see tests/gpu")
def test_parts_on_two_ranks(keeper, prompts, mixed_prompts, tmp_path):
    """What depends on hidden states is computed in parts, and convolutions act on parts of sums."""
    paths = [write(tmp_path / write.__name__) for write in (speculators_gated, speculators_dflash2)]
    assert_drafts_as_oracle(keeper, prompts, mixed_prompts, paths, ("tp-size", 2), env=TWO_CORES)


@pytest.mark.cpu(reason="SGLang's kernels for prompts of recurrent layers take no float32; see tests/gpu")
def test_parts_with_a_recurrent_target(keeper, tmp_path):
    """Chains and trees, whose rejected drafts the states never see."""
    path = hybrid_dflash2(tmp_path / "hybrid")
    oracle = Oracle(path, HYBRID_TARGET_DIR)
    chains = Settings(
        "hybrid-parts",
        flags=(("model-path", str(HYBRID_TARGET_DIR)), ("max-mamba-cache-size", 100)),
        dflash_flags=(("speculative-draft-model-path", str(path)),),
        env=(("SGLANG_MAMBA_CONV_DTYPE", "float32"),),
        trained=oracle.block_size,
    )
    settings = (chains, replace(chains, name="hybrid-parts-trees", dflash_flags=(*chains.dflash_flags, *trees(16, 16))))
    some = AutoTokenizer.from_pretrained(HYBRID_TARGET_DIR)(load_prompts()[:4]).input_ids
    for server in keeper.together(*settings):
        answers = server.generate(some, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)

        expected = [oracle.generate(ids, MAX_NEW_TOKENS, ignore_eos=True, **server.settings.cycles) for ids in some]
        for answer, output in zip(answers, expected):
            assert_same_cycles(answer, output)
        assert any(length > 2 for output in expected for length in output.accept_lengths)
