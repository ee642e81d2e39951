import pytest
import torch

from sglang_dflash.ops.kernels.argmax_product import argmax_product
from sglang_dflash.ops.reference.argmax_product import CONFIDENCE, GROUP, quantize_randomly
from sglang_dflash.ops.reference.argmax_product import argmax_product as reference


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Return arguments of `argmax_product`. Each row resembles one column, whose product is little above the rest."""
    generator = torch.Generator(device).manual_seed(rows + columns + depth)
    sizes = torch.logspace(-0.3, 0, columns, device=device)[torch.randperm(columns, device=device)]
    weight = torch.randn(columns, depth, device=device) * sizes[:, None]
    like = torch.randint(columns, (rows,), device=device)
    x = weight[like] / sizes[like][:, None] / 4 + torch.randn(rows, depth, device=device)
    # A hidden state has a few numbers that are far larger than the rest.
    x[:, ::97] *= 20
    weight = weight.to(dtype)
    return x.mul(4 / depth**0.5).to(dtype), weight, *quantize_randomly(weight, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (0, 40, 256),
        (1, 1, 256),
        (1, 1000, 1280),
        (3, 127, 768),
        (16, 129, 256),
        (17, 1500, 512),
        (128, 300, 256),
        (130, 700, 256),
        (5, 2100, 2304),
    ],
)
def test_matches_reference(rows, columns, depth, dtype, device):
    arguments = operands(rows, columns, depth, dtype, device)
    (maxima, found), (expected, expected_columns) = argmax_product(*arguments), reference(*arguments)
    assert maxima.dtype == dtype
    assert found.dtype == torch.int64
    # Triton's interpreter truncates to bfloat16 where a GPU rounds. A GPU sums in another order than torch.
    torch.testing.assert_close(maxima, expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)
    x, weight, *_ = arguments
    exact = x.float() @ weight.float().T
    of_found = exact.gather(1, found[:, None])[:, 0]
    best = exact.amax(dim=-1) if columns else of_found
    torch.testing.assert_close(of_found, best, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)
    if dtype == torch.float16 and rows:
        assert (found == expected_columns).float().mean() > 0.98


def test_first_of_equal_columns(device):
    x, weight, *_ = operands(4, 900, 256, torch.bfloat16, device)
    weight[600] = 4 * torch.randn(256, device=device)
    for column in (601, 130, 850):
        weight[column] = weight[600]
    x[:] = weight[600]
    _, columns = argmax_product(x, weight, *quantize_randomly(weight, torch.Generator(device)))
    assert columns.tolist() == [130] * 4


def test_first_of_equal_columns_with_a_low_bound(device):
    """A group whose bound is the best product, rounded, may have the same product in a lower column."""
    x, weight = torch.ones(1, 1024, device=device), torch.zeros(3 * GROUP, 1024, device=device)
    weight[3], weight[2 * GROUP], weight[2 * GROUP, 0] = 1, 0.90625, 97
    x, weight = x.bfloat16(), weight.bfloat16()
    assert set(reference(x, weight[[3, 2 * GROUP]], *[None] * 3)[0].tolist()) == {1024.0}
    maxima, columns = argmax_product(x, weight, *quantize_randomly(weight, torch.Generator(device)))
    assert maxima.tolist() == [1024.0]
    assert columns.tolist() == [3]


def test_strided_rows(device):
    x, *others = operands(6, 300, 256, torch.float16, device)
    _, columns = argmax_product(x.repeat(1, 2)[:, :256], *others)
    assert torch.equal(columns, argmax_product(x, *others)[1])


def test_errors_of_the_copy_decide_nothing(device):
    """The best of two close columns is found, where the copy often ranks the other one first."""
    x, weight, *_ = operands(64, 200, 512, torch.float16, device)
    weight = torch.cat((weight, (weight.float() * (1 - 2**-9)).half()))
    numbers, scales, norms = quantize_randomly(weight, torch.Generator(device))
    expected = reference(x, weight, numbers, scales, norms)[1]
    in_copy = (x.float() @ (numbers * scales[:, None]).T).argmax(dim=-1)
    assert (in_copy != expected).float().mean() > 0.2
    assert torch.equal(argmax_product(x, weight, numbers, scales, norms)[1], expected)


def test_error_of_x_counts(device):
    """The best column of a row whose small numbers are lost in its parts is found."""
    columns, depth = 5 * GROUP, 4096
    x = torch.full((1, depth), 0.0149, device=device)
    x[0, 0] = 1000
    weight = torch.zeros(columns, depth, device=device)
    # A product of 61, which is 0 in the copy's, and one of 50, which is exact.
    weight[3 * GROUP, 1:] = 1
    weight[7, 0] = 0.05
    x, weight = x.half(), weight.half()
    copied = quantize_randomly(weight, torch.Generator(device))
    assert argmax_product(x, weight, *copied)[1].tolist() == [3 * GROUP]


def test_groups_below_the_best_are_not_read(device):
    x, weight, *_ = operands(16, 640, 512, torch.float16, device)
    x = x.abs()
    others = quantize_randomly(weight, torch.Generator(device))
    expected = argmax_product(x, weight, *others)
    products = x.float() @ weight.float().T
    # The bound of the weights' error, and twice of it for that of x.
    bounds = products + 3 * CONFIDENCE * others[1] * x.float().norm(dim=-1, keepdim=True)
    is_low = (bounds < products.amax(dim=-1, keepdim=True)).all(dim=0).view(-1, GROUP).all(dim=-1)
    assert is_low.float().mean() > 0.2
    weight.view(-1, GROUP, weight.shape[1])[is_low] = 100
    for got, want in zip(argmax_product(x, weight, *others), expected, strict=True):
        assert torch.equal(got, want)


def test_all_groups_may_be_visited(device):
    """No product reaches its bound, so that each group has to be computed."""
    x, weight, *_ = operands(3, 10 * GROUP + 3, 256, torch.bfloat16, device)
    x[:, 128:], weight[:, :128] = 0, 0
    weight[9 * GROUP + 5, 0], x[:, 0] = 2**-8, 1
    maxima, columns = argmax_product(x, weight, *quantize_randomly(weight, torch.Generator(device)))
    assert maxima.tolist() == [2**-8] * 3
    assert columns.tolist() == [9 * GROUP + 5] * 3


def test_row_of_zeros(device):
    x, weight, *others = operands(3, 10 * GROUP + 3, 256, torch.bfloat16, device)
    x[1] = 0
    maxima, columns = argmax_product(x, weight, *others)
    assert maxima[1] == 0 and columns[1] == 0
    assert torch.equal(columns, reference(x, weight, *others)[1])


def test_only_infinities_and_nan(device):
    """The columns exist, even if a broken model computes NaN or infinity."""
    x, weight, *others = operands(4, 300, 256, torch.bfloat16, device)
    x[0], x[1], x[2, 5] = float("nan"), float("inf"), float("nan")
    _, columns = argmax_product(x, weight, *others)
    assert columns.min() >= 0 and columns.max() < 300
    assert columns[3] == reference(x, weight, *others)[1][3]


def test_copy_has_no_bias_and_a_bounded_error(device):
    # All numbers of a row but one have the same remainder, which rounding to nearest would leave out of every product.
    weight = torch.full((512, 1024), 0.4 / 127, device=device)
    weight[:, 0] = 1.0
    x = torch.ones(1, 1024, device=device)
    numbers, scales, norms = quantize_randomly(weight, torch.Generator(device).manual_seed(1))
    errors = x @ (weight - numbers * scales[:, None]).T
    bound = scales * x.norm()
    assert (errors.abs() <= CONFIDENCE * bound).all()
    # The mean of 512 products of random errors.
    assert errors.mean().abs() < 0.1 * bound.mean()
    assert errors.abs().max() > bound.mean()
    torch.testing.assert_close(norms, (numbers * scales[:, None]).norm(dim=-1))
    zeros, scales, norms = quantize_randomly(torch.zeros(2, 128, device=device), torch.Generator(device))
    assert not zeros.any() and not scales.any() and not norms.any()
