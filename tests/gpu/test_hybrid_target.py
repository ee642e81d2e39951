"""Targets with Gated DeltaNet layers on a GPU, with random weights and drafts that are their own text with errors.

They run in bf16, up to ties, because SGLang's kernels for prompts take no float32. tests/e2e runs float32 on a CPU.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engines import ADAPTIVE, BACKENDS, COMMON, RETRACTED, EngineConfig, Engines, greedy
from support import hybrid
from support.targets import NUM_CANDIDATES, candidate_logits, drafts, expected_cycles
from support.ties import TIE, TIE_OF_EXPERTS, compare, first_difference

INTERVAL = 64
# Sizes of heads in published models.
SIZES = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Every token takes all experts of a mixture. Rounding would exchange two of about equal score, and change any logit.
SIZES_OF_EXPERTS = SIZES | {"num_experts_per_tok": hybrid.EXPERTS["num_experts"]}
ARCHITECTURES = ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]
NEW_TOKENS = 170
# Tokens of a text after its prompt, from which it is continued.
CUTS = (NEW_TOKENS, NEW_TOKENS - 1, NEW_TOKENS - 16)
CONTINUED = 50
PROMPTS = [hybrid.prompt_of(length, length) for length in (1, 63, 64, 65, 129, 301, 20, 200)]
# A prompt whose drafts are all wrong.
UNDRAFTED = hybrid.prompt_of(77, 5)
# Usual numbers of identical texts, of 32: a random target is uncertain about every token, and bf16 creates ties in most
# of its texts.
USUAL = dict(zip(ARCHITECTURES, (4, 2, 3)))
# Least share of tokens that agree.
AGREED = 0.2


@dataclass(frozen=True)
class Case:
    """A random target, and Engines that serve it. Folders of one run have the same names in all processes."""

    folder: Path
    architecture: str
    backend: str

    @property
    def name(self) -> str:
        return f"hybrid-{self.architecture}-{self.backend}"

    @property
    def tie(self) -> float:
        return TIE if self.architecture == ARCHITECTURES[0] else TIE_OF_EXPERTS

    def plain(self) -> EngineConfig:
        target = self.folder / self.architecture
        if not target.exists():
            sizes = SIZES if self.architecture == ARCHITECTURES[0] else SIZES_OF_EXPERTS
            hybrid.write_target(target, self.architecture, **sizes)
        arguments = {"model_path": str(target), "attention_backend": self.backend, "max_mamba_cache_size": 100}
        arguments |= {"skip_tokenizer_init": True, "enable_multimodal": False}
        return EngineConfig(f"{self.name}-plain", COMMON | arguments)

    def texts(self, engines: Engines) -> tuple[list[dict], dict]:
        """Return what the target writes alone, after `PROMPTS` and after `UNDRAFTED`."""
        calls = [greedy(PROMPTS, NEW_TOKENS + CONTINUED), greedy([UNDRAFTED], 513)]
        of_prompts, [undrafted] = engines.reference(self.plain(), calls)
        return of_prompts, undrafted

    def served(self, engines: Engines, flags: dict, env: dict) -> EngineConfig:
        """Return an Engine whose drafts are the target's own text with errors."""
        drafter = self.folder / "drafter"
        if not drafter.exists():
            hybrid.write_drafter(drafter, head_dim=SIZES["head_dim"])
        of_prompts, undrafted = self.texts(engines)
        known = {tuple(UNDRAFTED): [token ^ 1 for token in undrafted["output_ids"]]}
        for call in written(of_prompts):
            for asked, prompt, answer in zip(call["input_ids"], PROMPTS, of_prompts):
                begin = len(asked) - len(prompt)
                known[tuple(asked)] = drafts(prompt, answer["output_ids"])[begin:]
        path = self.folder / f"{self.name}-drafts.json"
        path.write_text(json.dumps([{"input_ids": p, "output_ids": d} for p, d in known.items()]))
        env = env | {"ORACLE_DRAFTS": str(path)}
        if flags["speculative_eagle_topk"] > 1:
            candidates = self.folder / "candidates.json"
            candidates.write_text(json.dumps(candidate_logits()))
            env["ORACLE_CANDIDATES"] = str(candidates)
        dflash = {"speculative_algorithm": "DFLASH", "mamba_track_interval": INTERVAL}
        dflash |= {"speculative_draft_model_path": str(drafter)}
        arguments = dict(self.plain().arguments) | dflash | flags
        return EngineConfig(self.name, arguments, env, ("oracle_drafts",))


CHAINS = {"speculative_eagle_topk": 1}


def trees(num_nodes: int, **flags) -> dict:
    return {"speculative_eagle_topk": NUM_CANDIDATES, "speculative_num_draft_tokens": num_nodes} | flags


def written(of_prompts: list[dict]) -> list[dict]:
    """Return calls for the texts: whole ones, and parts of them from the cuts on."""
    calls = [greedy(PROMPTS, NEW_TOKENS, flush=True)]
    for cut in CUTS:
        continued = [prompt + answer["output_ids"][:cut] for prompt, answer in zip(PROMPTS, of_prompts)]
        calls.append(greedy(continued, CONTINUED))
    return calls


def part_of(plain: dict, begin: int) -> dict:
    """Return an answer from a token on: its tokens and their log probabilities."""
    top = plain["meta_info"]["output_top_logprobs"][begin:]
    return {"output_ids": plain["output_ids"][begin:], "meta_info": {"output_top_logprobs": top}}


def check_texts(engines: Engines, case: Case, flags: dict, env: dict) -> None:
    of_prompts, undrafted = case.texts(engines)
    # Texts that repeat would not depend on a state's content.
    assert sum(len(set(answer["output_ids"])) > 60 for answer in of_prompts) >= len(PROMPTS) / 2
    config = case.served(engines, flags, env)
    answers = engines.ask(config, written(of_prompts))

    described = engines.describe(config)
    assert described["worker"] == "DFlashWorker"
    states = described["recurrent_states"]
    # The bytes of one state for each token of a block.
    dense = hybrid.BLOCK_SIZE * states["bytes_per_slot"]
    num_tokens = described["verified_rows"] / hybrid.BLOCK_SIZE
    assert states["slots"] == 100 and states["verify_bytes_per_request"] < 0.2 * num_tokens * dense
    hits = sum(answer["meta_info"]["cached_tokens"] >= INTERVAL for of_call in answers[1:] for answer in of_call)
    want = [part_of(answer, begin) for begin in (0, *CUTS) for answer in of_prompts]
    compared = compare(want, [answer for of_call in answers for answer in of_call])
    num_continued = len(CUTS) * len(PROMPTS)
    print(f"\n{case.name}, {flags}: {compared}; {hits} of {num_continued} from the cache")
    compared.assert_ties(case.tie)
    compared.assert_floor(USUAL[case.architecture])
    compared.assert_agreed(AGREED)
    # Retracted requests may have lost their cached tokens.
    assert hits >= (0.25 if env else 0.75) * num_continued
    if not env and not flags.get("speculative_adaptive"):
        check_cycles(of_prompts, answers[0], flags.get("speculative_num_draft_tokens"))
        # Nothing is accepted of any of 512 blocks, and nothing of them is left in a state.
        [answers] = engines.ask(config, [greedy([UNDRAFTED], 513)])
        compared = compare([undrafted], answers)
        print(f"wrong drafts: {compared}")
        compared.assert_ties(case.tie)
        assert not compared.identical or answers[0]["meta_info"]["spec_verify_ct"] == 512


def check_cycles(of_prompts: list[dict], answers: list[dict], num_nodes: int | None) -> None:
    """Check that identical answers took the cycles that follow from the errors of their drafts.

    The paths that were accepted are then those of the trees, and nothing else.
    """
    for prompt, own, answer in zip(PROMPTS, of_prompts, answers):
        if first_difference(own, answer) is None:
            text = own["output_ids"][:NEW_TOKENS]
            drafted = drafts(prompt, own["output_ids"])
            expected = expected_cycles(prompt, text, drafted, num_nodes, hybrid.VOCAB_SIZE)
            assert answer["meta_info"]["spec_verify_ct"] == expected


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hybrid")


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("hybrid-target-{backend}")
@pytest.mark.parametrize("kind", ["replayed", "retracted"])
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_chains_up_to_ties(backend, kind, engines, folder):
    check_texts(engines, Case(folder, ARCHITECTURES[0], backend), CHAINS, RETRACTED if kind == "retracted" else {})


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("hybrid-target-{backend}")
@pytest.mark.parametrize(
    ("backend", "flags", "env"),
    [
        ("fa3", trees(16), RETRACTED),
        ("fa3", trees(64), {}),
        ("flashinfer", trees(16), {}),
        ("triton", trees(24), {}),
    ],
    indirect=["backend"],
)
def test_trees_up_to_ties(backend, flags, env, engines, folder):
    check_texts(engines, Case(folder, ARCHITECTURES[0], backend), flags, env)


@pytest.mark.gpu
@pytest.mark.group("hybrid-target-cycles")
@pytest.mark.parametrize(
    "flags",
    [
        CHAINS | ADAPTIVE,
        CHAINS | {"disable_cuda_graph": True},
        trees(32, **ADAPTIVE),
        trees(24, disable_cuda_graph=True),
    ],
    ids=["adaptive", "eager", "adaptive-trees", "eager-trees"],
)
def test_other_cycles(flags, engines, folder):
    check_texts(engines, Case(folder, ARCHITECTURES[0], "fa3"), flags, {})


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.group("hybrid-target-{architecture}")
@pytest.mark.parametrize("flags", [CHAINS, trees(16)], ids=["chains", "trees"])
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_other_classes(architecture, flags, engines, folder):
    check_texts(engines, Case(folder, architecture, "fa3"), flags, {})


@pytest.mark.gpu
@pytest.mark.parametrize("accept_len", [1, 5, 16])
def test_states_are_those_of_decoding(accept_len):
    """After 512 tokens of the same inputs in bf16, SGLang's decoding kernel and blocks give the same states.

    `accept_len` tokens of each block are accepted, and the others are random.
    """
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode

    from sglang_dflash import ops
    from sglang_dflash.types import BlockInputs, States, StateSlots

    torch.manual_seed(0)
    block_size, heads, value_heads, size, bs, length = 16, 2, 4, 128, 3, 512
    device, dtype = "cuda", torch.bfloat16
    qkv = torch.randn(length + block_size, bs, (2 * heads + value_heads) * size, device=device).to(dtype)
    a, b = torch.randn(2, length + block_size, bs, value_heads, device=device).to(dtype)
    a_log, dt_bias = torch.linspace(-5, 0, value_heads, device=device), torch.zeros(value_heads, device=device)
    decoded = torch.zeros(bs + 1, value_heads, size, size, device=device)
    slots = torch.arange(1, bs + 1, dtype=torch.int32, device=device)
    states = States(torch.zeros(1, bs + 1, 8, 3, device=device, dtype=dtype), torch.zeros_like(decoded)[None])
    shape = (1, bs, block_size)
    inputs = BlockInputs(
        conv=torch.zeros(*shape, 8, device=device, dtype=dtype),
        key=torch.zeros(*shape, heads, size, device=device, dtype=dtype),
        change=torch.zeros(*shape, value_heads, size, device=device),
        log_decay=torch.zeros(*shape, value_heads, device=device),
    )
    table = StateSlots(
        torch.arange(bs + 1, dtype=torch.int32, device=device),
        None,
        torch.zeros(bs + 1, dtype=torch.int32, device=device),
    )
    is_due = torch.ones(1, dtype=torch.int64, device=device)
    nodes = torch.arange(block_size, device=device)
    path, ancestors = (x.expand(bs, -1) for x in (nodes, (1 << nodes).cumsum(0)))
    outputs, verified = [], []
    for t in range(0, length - accept_len + 1, accept_len):
        rows = slice(t, t + block_size)
        block = qkv[rows].transpose(0, 1)
        query, key, value = block.split([heads * size, heads * size, value_heads * size], 2)
        output = ops.verify_block(
            *(x.unflatten(2, (-1, size)) for x in (query, key, value)),
            *(x[rows].transpose(0, 1) for x in (a, b)),
            a_log,
            dt_bias,
            states.temporal[0],
            slots,
            ancestors,
            *(x[0] for x in (inputs.key, inputs.change, inputs.log_decay)),
        )
        verified += output[:, :accept_len].unbind(1)
        lens = torch.full((bs,), accept_len, device=device)
        ops.commit_state(states, inputs, table, slots.long(), torch.full_like(lens, t), lens, 1 << 20, is_due, path)
        for step in range(t, t + accept_len):
            out = torch.empty(bs, 1, value_heads, size, device=device, dtype=dtype)
            fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=qkv[step],
                a=a[step],
                b=b[step],
                A_log=a_log,
                dt_bias=dt_bias,
                scale=size**-0.5,
                initial_state=decoded,
                out=out,
                ssm_state_indices=slots,
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(out[:, 0])

    distance = (states.temporal[0] - decoded).norm() / decoded.norm()
    apart = (torch.stack(outputs) != torch.stack(verified)).float().mean()
    print(f"\n{accept_len} accepted: states {distance:.1e} apart, {apart:.2%} of outputs rounded otherwise")
    # Sums have another order. A strength that is not rounded would differ by 1e-3.
    assert distance < 1e-5
    assert apart < 1e-2
