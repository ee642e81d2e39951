"""Targets of every class, with random weights and drafts that are their own continuation with some errors.

So every token of a block and every acceptance length matters. In float32 on triton nothing depends on the batch: the
text is identical, in the number of cycles that follows from the errors. In bf16 on other backends it is, up to ties.
"""

from pathlib import Path

import pytest
from engines import COMMON, IEEE, ON_CPU, EngineConfig, Engines
from support import targets
from support.targets import TARGETS, assert_exact
from support.ties import TIE, TIE_OF_EXPERTS, compare, tokens_per_cycle

# As servers of tests/e2e are started on a GPU, so that larger batches do not round differently.
EXACT = {"attention_backend": "triton", "enable_deterministic_inference": True}
EXACT_ENV = IEEE | {"SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "1"}
# Nodes of a tree: more than a block has tokens.
NUM_NODES = 24
# Classes with chains on other backends are tested there.
ON_TRITON = [name for name, target in TARGETS.items() if not target.backends]
CHAINS = [(name, "fa3") for name, target in TARGETS.items() if "fa3" in target.backends]
CHAINS += [(name, "flashinfer") for name in ("llama", "qwen3_vl")]
TREES = [(name, (*target.backends, "triton")[0]) for name, target in TARGETS.items()]
# Usual numbers of identical texts of bf16, of 8; 0: random texts in bf16 soon come to a tie.
USUAL = {"chains": {"fa3": 8, "flashinfer": 0}, "trees": {"fa3": 0, "flashinfer": 0, "triton": 0}}


def call() -> dict:
    asked = targets.requests()
    return {key: [request[key] for request in asked] for key in ("input_ids", "sampling_params")}


class Case:
    """A target, and Engines that serve it."""

    def __init__(self, folder: Path, name: str, dtype: str, flags: dict, env: dict) -> None:
        if ON_CPU and name not in ("llama", "qwen3_vl"):
            pytest.skip("SGLang's CPU engine does not serve it")
        # Both dtypes of a target have a config.
        self._folder, self._name = folder / f"{name}-{dtype}-{flags['attention_backend']}", name
        arguments = COMMON | targets.write_pair(self._folder, name, dtype)
        self._plain = EngineConfig(f"target-{self._folder.name}", arguments | flags, env, ("oracle_drafts",))

    def answers(
        self, engines: Engines, num_nodes: int | None, flags: dict | None = None, env: dict | None = None
    ) -> list[tuple[dict, dict, int]]:
        """Return what `targets.with_cycles` does; `flags` and `env` are added, or take the place of the target's."""
        [of_plain] = engines.reference(self._plain, [call()])
        env = (self._plain.env if env is None else env) | targets.drafting_environment(
            self._folder, of_plain, num_nodes
        )
        arguments = (self._plain.arguments if flags is None else flags) | targets.dflash(self._folder, num_nodes)
        config = EngineConfig(f"target-{self._name}", arguments, env, ("oracle_drafts",))
        [answers] = engines.ask(config, [call()])
        described = engines.describe(config)
        assert described["worker"] == "DFlashWorker"
        assert described["verified_rows"] == (num_nodes or targets.BLOCK_SIZE)
        variety = [len(set(answer["output_ids"])) for answer in of_plain]
        rate = tokens_per_cycle(answers)
        print(f"\n{self._folder.name}, nodes {num_nodes}: {compare(of_plain, answers)}, {rate:.2f} tokens per cycle, ")
        print(f"different tokens: {variety}")
        return targets.with_cycles(of_plain, answers, num_nodes)

    def arguments_without(self, *names: str) -> dict:
        return {name: value for name, value in self._plain.arguments.items() if name not in names}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("target-{name}-exact")
@pytest.mark.parametrize("name", [*ON_TRITON, "gpt_oss"])
def test_exact(name, engines, folder):
    assert_exact(Case(folder, name, "float32", EXACT, EXACT_ENV).answers(engines, None))


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("target-{name}-exact")
@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.has_experts])
def test_trees_exact(name, engines, folder):
    """The tree has more nodes than a block has tokens.

    Servers that verify trees cannot be deterministic: rounding depends on the batch size. The differences are much
    smaller than those between float32 logits of different tokens.
    """
    case = Case(folder, name, "float32", EXACT, EXACT_ENV)
    # SGLang's CUDA kernels of norms take no float32, and graphs cannot capture its experts in torch.
    env = EXACT_ENV | {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    flags = case.arguments_without("enable_deterministic_inference")
    assert_exact(case.answers(engines, NUM_NODES, flags, env))


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("target-{name}-{backend}")
@pytest.mark.parametrize(("name", "backend"), CHAINS)
def test_up_to_ties(name, backend, engines, folder):
    answers = Case(folder, name, "bfloat16", {"attention_backend": backend}, {}).answers(engines, None)
    assert_up_to_ties(name, answers, USUAL["chains"][backend])


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("target-{name}-{backend}")
@pytest.mark.parametrize(("name", "backend"), TREES)
def test_trees_up_to_ties(name, backend, engines, folder):
    """The backend only affects prompts."""
    answers = Case(folder, name, "bfloat16", {"attention_backend": backend}, {}).answers(engines, NUM_NODES)
    assert_up_to_ties(name, answers, USUAL["trees"][backend])


def assert_up_to_ties(name: str, answers: list[tuple[dict, dict, int]], usual: int) -> None:
    """Check answers without speculation, with DFLASH, and the cycles that they should have taken."""
    compared = compare([plain for plain, _, _ in answers], [got for _, got, _ in answers])
    compared.assert_ties(TARGETS[name].tie or (TIE_OF_EXPERTS if TARGETS[name].has_experts else TIE))
    compared.assert_floor(usual)
    for plain, got, cycles in answers:
        if got["output_ids"] == plain["output_ids"]:
            assert got["meta_info"]["spec_verify_ct"] == cycles
