"""Targets with Gated DeltaNet layers on a GPU, with random weights and drafts that are their own text with errors.

They run in bf16, up to ties, because SGLang's kernels for prompts take no float32. tests/e2e runs float32 on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch
from support import hybrid
from support.engine_process import run
from support.plugins import python_path
from support.targets import NUM_CANDIDATES, candidate_logits, drafts
from support.ties import TIE, TIE_OF_EXPERTS, describe_difference, first_difference

INTERVAL = 64
ENGINE = {
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "max_mamba_cache_size": 100,
    "mem_fraction_static": 0.9,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "enable_multimodal": False,
}
DFLASH = {"speculative_algorithm": "DFLASH", "mamba_track_interval": INTERVAL}
# Sizes of heads in published models.
SIZES = {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
BACKENDS = ["fa3", "flashinfer", "triton"]
ARCHITECTURES = ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"]
NEW_TOKENS = 170
# Tokens of a text after its prompt, from which it is continued.
CUTS = (NEW_TOKENS, NEW_TOKENS - 1, NEW_TOKENS - 16)
CONTINUED = 50
# Requests lose their slots now and then, and are prefilled again.
RETRACTED = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "11",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}


def call(prompts: list[list[int]], num_tokens: int) -> dict:
    """Return arguments of `Engine.generate`."""
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"input_ids": prompts, "sampling_params": [sampling] * len(prompts)}


class Case:
    """A target's own text, and its text with DFLASH."""

    def __init__(self, folder: Path, architecture: str, backend: str) -> None:
        self._folder = folder
        has_experts = architecture != ARCHITECTURES[0]
        self.tie = TIE_OF_EXPERTS if has_experts else TIE
        # A random target is uncertain about every token, and bf16 creates ties in most of its texts.
        self.identical_share = 0.05 if has_experts else 0.15
        target = hybrid.write_target(folder / "target", architecture, **SIZES)
        self._drafter = hybrid.write_drafter(folder / "drafter", head_dim=SIZES["head_dim"])
        self._engine = ENGINE | {"dtype": "bfloat16", "attention_backend": backend, "model_path": str(target)}

    def write(self, prompts: list[list[int]], num_tokens: int) -> list[dict]:
        """Return the target's own text."""
        asked = call(prompts, num_tokens) | {"return_logprob": True, "top_logprobs_num": 2}
        [answers], _ = run(self._folder, self._engine, [asked], {})
        return answers

    def draft(self, calls: list[dict], texts: list[list[int]], flags: dict, env: dict) -> tuple[list, dict]:
        """Return the answers to calls. `texts`: the drafts for each of their prompts, after the prompt."""
        prompts = [prompt for each in calls for prompt in each["input_ids"]]
        known = [{"input_ids": p, "output_ids": d} for p, d in zip(prompts, texts, strict=True)]
        path = self._folder / "drafts.json"
        path.write_text(json.dumps(known))
        env = env | {"ORACLE_DRAFTS": str(path), "PYTHONPATH": python_path("oracle_drafts")}
        if "speculative_eagle_topk" in flags:
            candidates = self._folder / "candidates.json"
            candidates.write_text(json.dumps(candidate_logits()))
            env["ORACLE_CANDIDATES"] = str(candidates)
        engine = self._engine | DFLASH | {"speculative_draft_model_path": str(self._drafter)} | flags
        answers, described = run(self._folder, engine, calls, env)
        assert described["worker"] == "DFlashWorker"
        return answers, described


def part_of(plain: dict, begin: int, num_tokens: int) -> dict:
    """Return a part of an answer: its tokens and their log probabilities."""
    span = slice(begin, begin + num_tokens)
    top = plain["meta_info"]["output_top_logprobs"][span]
    return {"output_ids": plain["output_ids"][span], "meta_info": {"output_top_logprobs": top}}


def lead(want: dict, got: dict) -> float:
    """Return the lead of the best token over the second, in nats, where two answers differ."""
    best, second = (entry[0] for entry in want["meta_info"]["output_top_logprobs"][first_difference(want, got)][:2])
    return best - second


def check_texts(case: Case, flags: dict, env: dict) -> None:
    prompts = [hybrid.prompt_of(length, length) for length in (1, 63, 64, 65, 129, 301, 20, 200)]
    plain = case.write(prompts, NEW_TOKENS + CONTINUED)
    # Texts that repeat would not depend on a state's content.
    assert sum(len(set(answer["output_ids"])) > 60 for answer in plain) >= len(prompts) / 2
    written = [call(prompts, NEW_TOKENS)]
    for cut in CUTS:
        continued = [prompt + answer["output_ids"][:cut] for prompt, answer in zip(prompts, plain)]
        written.append(call(continued, CONTINUED))
    begins = [0, *CUTS]
    texts = [drafts(p, a["output_ids"])[begin:] for begin in begins for p, a in zip(prompts, plain)]

    answers, described = case.draft(written, texts, flags, env)

    states = described["recurrent_states"]
    # The bytes of one state for each token of a block.
    dense = hybrid.BLOCK_SIZE * states["bytes_per_slot"]
    num_tokens = described["verified_rows"] / hybrid.BLOCK_SIZE
    assert states["slots"] == 100 and states["verify_bytes_per_request"] < 0.2 * num_tokens * dense
    same, hits, leads = 0, 0, [0.0]
    for begin, some in zip(begins, answers, strict=True):
        for answer, own in zip(some, plain, strict=True):
            want = part_of(own, begin, len(answer["output_ids"]))
            if first_difference(want, answer) is None:
                same += 1
            else:
                leads.append(lead(want, answer))
                assert leads[-1] <= case.tie, f"from {begin}: {describe_difference(want, answer)}"
            hits += begin > 0 and answer["meta_info"]["cached_tokens"] >= INTERVAL
    print(
        f"\n{same} of {len(texts)} identical, the others part at a tie, {max(leads):.4f} nats at most; "
        f"{hits} of {len(CUTS) * len(prompts)} from the cache"
    )
    assert same >= case.identical_share * len(texts)
    # Retracted requests may have lost their cached tokens.
    assert hits >= (0.25 if env else 0.75) * len(CUTS) * len(prompts)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["replayed", "retracted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_up_to_ties(backend, kind, tmp_path):
    case = Case(tmp_path, ARCHITECTURES[0], backend)
    check_texts(case, {}, RETRACTED if kind == "retracted" else {})


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_other_classes(architecture, tmp_path):
    check_texts(Case(tmp_path, architecture, "fa3"), {}, {})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags", [{"speculative_adaptive": True}, {"disable_cuda_graph": True}], ids=["adaptive", "eager"]
)
def test_other_cycles(flags, tmp_path):
    check_texts(Case(tmp_path, ARCHITECTURES[0], "fa3"), flags, {})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "num_nodes", "flags", "env"),
    [
        ("fa3", 16, {}, RETRACTED),
        ("flashinfer", 16, {}, {}),
        ("triton", 24, {}, {}),
        ("fa3", 32, {"speculative_adaptive": True}, {}),
        ("fa3", 24, {"disable_cuda_graph": True}, {}),
        ("fa3", 64, {}, {}),
    ],
)
def test_trees_up_to_ties(backend, num_nodes, flags, env, tmp_path):
    trees = {"speculative_eagle_topk": NUM_CANDIDATES, "speculative_num_draft_tokens": num_nodes}
    check_texts(Case(tmp_path, ARCHITECTURES[0], backend), trees | flags, env)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_drafts_leave_nothing(backend, tmp_path):
    """Nothing is accepted of any of 512 blocks."""
    prompts = [hybrid.prompt_of(77, 5)]
    case = Case(tmp_path, ARCHITECTURES[0], backend)
    [plain] = case.write(prompts, 513)

    wrong = [token ^ 1 for token in plain["output_ids"]]
    [[answer]], _ = case.draft([call(prompts, 513)], [wrong], {}, {})

    differs = first_difference(plain, answer)
    print(f"\n{backend}: identical" if differs is None else f"\n{backend}: {describe_difference(plain, answer)}")
    if differs is None:
        assert answer["meta_info"]["spec_verify_ct"] == 512
    else:
        assert lead(plain, answer) <= case.tie


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
