import pytest
import torch
from support.peak_memory import PeakMemory

from sglang_dflash.draft.shortlist import Shortlist, row_bytes
from sglang_dflash.ops.kernels.shortlist_top import shortlist_top
from sglang_dflash.ops.reference.shortlist_top import (
    GROUP,
    MAX_INT4_ROWS,
    Float8Copy,
    Int4Copy,
    depth_factors,
    quantize_int4,
    unpack,
)
from sglang_dflash.ops.reference.shortlist_top import shortlist_top as reference


def int4_copy(weight: torch.Tensor) -> Int4Copy:
    return Shortlist(weight, 1).int4


def float8_copy(weight: torch.Tensor) -> Float8Copy:
    return Shortlist(weight, 1).float8


COPIES = [int4_copy, float8_copy]


def operands(bs: int, rows: int, columns: int, depth: int, k: int, dtype: torch.dtype, device: str, copied=int4_copy):
    """Return arguments of `shortlist_top`.

    x leaves out the first token of each block, as the drafter does. Each row resembles k columns in different groups,
    the first the most. The columns of the weight have many different norms.
    """
    sizes = torch.logspace(-0.3, 0, columns, device=device)[torch.randperm(columns, device=device)]
    weight = torch.randn(columns, depth, device=device) * sizes[:, None]
    num_groups = -(-columns // GROUP)
    groups = torch.rand(bs, rows + 1, num_groups, device=device).argsort(dim=-1)[..., :k]
    # The last place of a group may be empty.
    like = torch.randint(max(1, columns // num_groups), groups.shape, device=device) * num_groups + groups
    shares = torch.linspace(2, 1, k, device=device)[:, None] / sizes[like][..., None]
    x = (weight[like] * shares).sum(dim=-2) + torch.randn(bs, rows + 1, depth, device=device) / 2
    weight = weight.to(dtype)
    return x.mul(20 / depth).to(dtype)[:, 1:], weight, copied(weight), k


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bs", "rows", "columns", "depth", "k", "has_sums"),
    [
        (1, 1, 1, 256, 1, True),
        (3, 7, 127, 768, 1, False),
        (2, 3, 129, 1280, 2, True),
        (8, 15, 500, 256, 3, False),
        (18, 15, 700, 256, 2, True),
        (0, 15, 600, 256, 8, True),
        (1, 15, 1500, 512, 8, False),
        (3, 7, 129, 768, 2, True),
        (5, 15, 300, 768, 3, False),
        (2, 15, 1100, 1024, 16, True),
        # More groups than candidates, in all parts.
        (1, 15, 8191, 1024, 16, True),
        (4, 15, 4300, 1024, 16, False),
    ],
)
@pytest.mark.parametrize("copied", COPIES)
def test_matches_reference(bs, rows, columns, depth, k, has_sums, copied, dtype, device):
    if copied is int4_copy and bs * rows > MAX_INT4_ROWS:
        pytest.skip("for few rows")
    arguments = (*operands(bs, rows, columns, depth, k, dtype, device, copied), has_sums)
    (logits, columns, log_sums), (expected, expected_columns, expected_sums) = (
        shortlist_top(*arguments),
        reference(*arguments),
    )
    # Triton's interpreter truncates to bfloat16 where a GPU rounds, so it orders close values differently.
    torch.testing.assert_close(logits, expected, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=0)
    assert (log_sums is not None) == has_sums
    if has_sums:
        torch.testing.assert_close(log_sums, expected_sums, rtol=0, atol=0.25 if dtype == torch.bfloat16 else 1e-3)
    if dtype == torch.float16:
        assert torch.equal(columns, expected_columns)
    x, weight, *_ = arguments
    of_columns = (weight[columns].float() * x.flatten(0, 1).float()[:, None]).sum(dim=-1)
    torch.testing.assert_close(logits, of_columns, rtol=2**-7, atol=0)


@pytest.mark.parametrize("columns", [1024, 1100])
def test_memory_is_in_the_budget(columns, device):
    """The server leaves room for what exists at a time, besides the results."""
    bs, rows, depth, k = 2, 3, 512, 4
    x, weight, copy, k = operands(bs, rows, columns, depth, k, torch.bfloat16, device)
    with PeakMemory(x, weight, copy.numbers, copy.scales, copy.factors) as memory:
        results = shortlist_top(x, weight, copy, k, True)
    allocated = memory.peak - sum(result.nbytes for result in results)
    assert allocated <= bs * rows * row_bytes(columns, depth, k) <= 1.2 * allocated


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("copied", COPIES)
def test_is_the_top(k, copied, device):
    x, weight, *others = operands(2, 15, 1500, 1024, k, torch.float16, device, copied)
    logits = x.flatten(0, 1).float() @ weight.float().T
    best, columns, log_sums = shortlist_top(x, weight, *others, True)
    torch.testing.assert_close(best, logits.gather(1, columns), rtol=2**-10, atol=0)
    assert (columns == logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]).float().mean() > 0.97
    # For a sixteenth of x, the columns that are no candidates dominate the sum.
    _, _, of_sixteenth = shortlist_top(x / 16, weight, *others, True)
    torch.testing.assert_close(log_sums, logits.logsumexp(dim=-1), rtol=0, atol=0.02)
    torch.testing.assert_close(of_sixteenth, (logits / 16).logsumexp(dim=-1), rtol=0, atol=0.01)


@pytest.mark.parametrize("find", [shortlist_top, reference])
@pytest.mark.parametrize("first", [0, 57, 1084])
@pytest.mark.parametrize("copied", COPIES)
def test_best_are_neighbours(find, first, copied, device):
    """Frequent tokens are neighbours in most vocabularies."""
    k, weight = 16, torch.randn(1100, 512, device=device).half()
    neighbours = weight[first : first + k].float()
    # Their logits differ by 1.
    logits = torch.arange(40.0, 40 - k, -1, device=device)
    x = (torch.linalg.solve(neighbours @ neighbours.T, logits) @ neighbours).half().expand(1, 2, -1)
    _, columns, _ = find(x, weight, copied(weight), k, True)
    assert columns.tolist() == [list(range(first, first + k))] * 2


@pytest.mark.parametrize("copied", COPIES)
def test_first_of_equal_columns(copied, device):
    x, weight, *_ = operands(2, 5, 1000, 256, 1, torch.bfloat16, device)
    weight[130] = 1.5 * torch.randn(256, device=device)
    weight[600] = weight[130]
    x[:] = weight[130]
    _, columns, _ = shortlist_top(x, weight, copied(weight), 1, False)
    assert set(columns.flatten().tolist()) == {130}
    _, columns, _ = shortlist_top(x, weight, copied(weight), 2, False)
    assert columns.tolist() == [[130, 600]] * 10


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("copied", COPIES)
def test_only_infinities_and_nan(k, copied, device):
    """The tokens are in the vocabulary, even if a broken model computes NaN or infinity."""
    x, weight, *others = operands(4, 1, 300, 256, k, torch.bfloat16, device, copied)
    x[0], x[1], x[2, 0, 5], x[3] = float("nan"), float("inf"), float("nan"), 0.0
    _, columns, _ = shortlist_top(x, weight, *others, True)
    assert columns.min() >= 0 and columns.max() < 300


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("find", [shortlist_top, reference])
@pytest.mark.parametrize("copied", COPIES)
def test_one_broken_weight(number, find, copied, device):
    """Only its column is lost."""
    x, weight, *_ = operands(1, 4, 1500, 256, 4, torch.float16, device)
    _, expected, _ = find(x, weight, copied(weight), 4, True)
    broken = next(column for column in range(1500) if column not in expected)
    weight[broken, 7] = number
    _, columns, _ = find(x, weight, copied(weight), 4, True)
    assert torch.equal(columns, expected)


def test_int4_copy(device):
    """A number is within half of its scale of the weight over its factor, or at an end of the range."""
    weight = torch.randn(100, 512, device=device) * torch.logspace(-2, 2, 512, device=device)
    weight[3] = 0.0
    factors = depth_factors(weight)
    numbers, scales = quantize_int4(weight, factors)
    numbers = unpack(numbers)
    assert numbers.min() == -8 and numbers.max() == 7
    wanted = weight / factors / scales[:, None]
    assert ((numbers - wanted).abs() <= 0.5001).logical_or(numbers == wanted.clamp(-8, 7).round()).all()
    approximate = numbers * scales[:, None] * factors
    assert (approximate - weight).norm() < 0.15 * weight.norm()
