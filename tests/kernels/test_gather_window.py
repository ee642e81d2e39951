import pytest
import torch

from sglang_dflash.ops.kernels.gather_window import gather_window
from sglang_dflash.ops.reference.gather_window import gather_window as reference


@pytest.mark.parametrize("bs", [0, 1, 5])
@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize(("window", "page_size"), [(1, 1), (7, 1), (16, 16), (20, 16), (64, 8), (1100, 64), (5000, 1)])
def test_matches_reference(bs, block_size, window, page_size, device):
    width = 3000
    # A view with its own row stride, as a slice of a larger pool.
    req_to_token = torch.randint(0, 10**6, (bs + 2, 2 * width), dtype=torch.int32, device=device)[:, :width]
    rows = torch.randperm(bs + 2, device=device)[:bs]
    seq_lens = torch.randint(1, width - block_size + 1, (bs,), device=device)
    edges = torch.tensor([1, window, window + 1, width - block_size], device=device).clamp(max=width - block_size)
    seq_lens[: len(edges)] = edges[:bs]
    # Poisoned: only the context and the block may be written.
    got_rows = torch.full((bs + 2, window + page_size - 1 + block_size), -7, dtype=torch.int32, device=device)
    want_rows = got_rows.clone()
    shape = (window, page_size, block_size)

    got = gather_window(req_to_token, rows, seq_lens, *shape, got_rows)
    want = reference(req_to_token, rows, seq_lens, *shape, want_rows)

    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert torch.equal(got_rows, want_rows)


def test_window_that_starts_inside_a_page(device):
    """The window of 5 tokens starts in the middle of a page of 4, so that page's first token is copied too."""
    req_to_token = torch.arange(2 * 40, dtype=torch.int32, device=device).view(2, 40)
    out = torch.full((2, 12), -7, dtype=torch.int32, device=device)

    context_lens = gather_window(
        req_to_token, torch.tensor([1], device=device), torch.tensor([18], device=device), 5, 4, 3, out
    )

    assert context_lens.tolist() == [6]
    assert out[1].tolist() == [52, 53, 54, 55, 56, 57, 58, 59, 60, -7, -7, -7]
    assert out[0].tolist() == [-7] * 12
