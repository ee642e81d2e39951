"""Targets of every class, with random weights and drafts that are their own continuation with some errors.

So every token of a block and every acceptance length matters. In float32 on triton nothing depends on the batch: the
text is identical, in the number of cycles that follows from the errors. In bf16 on other backends it is, up to ties.
"""

import pytest
from support.targets import TARGETS, assert_exact, generate, report
from support.ties import TIE, TIE_OF_EXPERTS, describe_difference, first_difference

ENGINE = {
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "mem_fraction_static": 0.98,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "skip_server_warmup": True,
}
# As servers of tests/e2e are started on a GPU, so that larger batches do not round differently.
EXACT = {"attention_backend": "triton", "enable_deterministic_inference": True}
EXACT_ENV = {"TRITON_F32_DEFAULT": "ieee", "SGLANG_TRITON_PREFILL_TRUNCATION_ALIGN_SIZE": "1"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_exact(name, tmp_path):
    answers = generate(tmp_path, name, "float32", ENGINE | EXACT, EXACT_ENV)
    report(f"{name}, float32 on triton", answers)
    assert_exact(answers)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name, target in TARGETS.items() for backend in target.backends]
)
def test_up_to_ties(name, backend, tmp_path):
    answers = generate(tmp_path, name, "bfloat16", ENGINE | {"attention_backend": backend}, {})
    report(f"{name}, bf16 on {backend}", answers)
    assert_up_to_ties(name, answers)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.has_experts])
def test_trees_exact(name, tmp_path):
    """The tree has more nodes than a block has tokens.

    Servers that verify trees cannot be deterministic: rounding depends on the batch size. The differences are much
    smaller than those between float32 logits of different tokens.
    """
    engine = ENGINE | {"attention_backend": "triton"}
    # SGLang's CUDA kernels of norms take no float32, and graphs cannot capture its experts in torch.
    environment = EXACT_ENV | {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch"}
    answers = generate(tmp_path, name, "float32", engine, environment, num_nodes=24)
    report(f"{name}, float32 on triton, trees", answers)
    assert_exact(answers)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.backends or target.has_experts])
def test_trees_up_to_ties(name, tmp_path):
    """The backend only affects prompts."""
    backend = (*TARGETS[name].backends, "triton")[0]
    answers = generate(tmp_path, name, "bfloat16", ENGINE | {"attention_backend": backend}, {}, num_nodes=24)
    report(f"{name}, bf16 on {backend}, trees", answers)
    assert_up_to_ties(name, answers)


def assert_up_to_ties(name: str, answers: list[tuple[dict, dict, int]]) -> None:
    """Return answers without speculation, with DFLASH, and the cycles that they should have taken."""
    tie = TIE_OF_EXPERTS if TARGETS[name].has_experts else TIE
    for plain, got, cycles in answers:
        differs = first_difference(plain, got)
        if differs is None:
            assert got["meta_info"]["spec_verify_ct"] == cycles
        else:
            best, second = (entry[0] for entry in plain["meta_info"]["output_top_logprobs"][differs][:2])
            assert best - second <= tie, describe_difference(plain, got)
