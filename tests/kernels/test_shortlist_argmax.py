import pytest
import torch

from sglang_dflash.ops.kernels.shortlist_argmax import shortlist_argmax
from sglang_dflash.ops.reference.shortlist_argmax import quantize_rows
from sglang_dflash.ops.reference.shortlist_argmax import shortlist_argmax as reference


def operands(bs: int, rows: int, columns: int, depth: int, dtype: torch.dtype, device: str):
    """Rows behind the first of each block, as a drafter's are, like one column each; and a weight with columns of many
    sizes."""
    sizes = torch.logspace(-0.3, 0, columns, device=device)[torch.randperm(columns, device=device)]
    weight = torch.randn(columns, depth, device=device) * sizes[:, None]
    like = torch.randint(columns, (bs, rows + 1), device=device)
    x = weight[like] / sizes[like][..., None] + torch.randn(bs, rows + 1, depth, device=device) / 2
    weight = weight.to(dtype)
    return x.mul(3).to(dtype)[:, 1:], weight, *quantize_rows(weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bs", "rows", "columns", "depth"),
    [
        (0, 15, 200, 256),
        (1, 15, 5000, 256),
        (1, 1, 1, 256),
        (3, 7, 127, 768),
        (2, 3, 129, 1280),
        (8, 15, 500, 256),
        (20, 15, 1500, 256),
    ],
)
def test_matches_reference(bs, rows, columns, depth, dtype, device):
    arguments = operands(bs, rows, columns, depth, dtype, device)
    torch.testing.assert_close(shortlist_argmax(*arguments), reference(*arguments))


def test_is_the_argmax(device):
    x, weight, *quantized = operands(8, 15, 3000, 512, torch.bfloat16, device)
    logits = (x.flatten(0, 1).float() @ weight.float().T).to(x.dtype)
    maxima, columns = shortlist_argmax(x, weight, *quantized)
    torch.testing.assert_close(maxima, logits.gather(1, columns[:, None])[:, 0])
    assert torch.equal(columns, logits.argmax(dim=-1))


def test_first_of_equal_columns(device):
    x, weight, *_ = operands(2, 5, 1000, 256, torch.bfloat16, device)
    weight[130] = 3 * torch.randn(256, device=device)
    weight[600] = weight[130]
    x[:] = weight[130]
    _, columns = shortlist_argmax(x, weight, *quantize_rows(weight))
    assert set(columns.tolist()) == {130}


def test_only_infinities_and_nan(device):
    """Whatever a broken model computes, the token is one of the vocabulary."""
    x, weight, *quantized = operands(4, 1, 300, 256, torch.bfloat16, device)
    x[0], x[1], x[2, 0, 5], x[3] = float("nan"), float("inf"), float("nan"), 0.0
    _, columns = shortlist_argmax(x, weight, *quantized)
    assert columns.min() >= 0 and columns.max() < 300
