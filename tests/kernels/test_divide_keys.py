import pytest
import torch

from sglang_dflash.ops.kernels.divide_keys import divide_keys
from sglang_dflash.ops.reference.divide_keys import divide_keys as reference

CONTEXTS = [[1], [5000], [131_000], [0, 1, 112, 113, 127, 128], [600] * 33, [1, 30_000, 7, 500]]


def divide(operation, contexts, window, unit, min_chunk, num_nodes, room, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks and the starts of parts. There is room for `room` chunks more than requests."""
    lens = torch.tensor(contexts, device=device)
    rows = torch.arange(len(contexts), device=device).flip(0) + 3
    chunks = torch.full((len(contexts) + room, 6), -7, dtype=torch.int32, device=device)
    part_indptr = torch.full((len(contexts) + 1,), -7, dtype=torch.int32, device=device)
    operation(lens, rows, window, num_nodes, unit, min_chunk, chunks, part_indptr)
    return chunks, part_indptr


@pytest.mark.parametrize("room", [0, 40])
@pytest.mark.parametrize(("unit", "min_chunk"), [(32, 96), (64, 768), (16, 1)])
@pytest.mark.parametrize("window", [None, 50, 1024])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=len)
def test_matches_reference(contexts, window, unit, min_chunk, room, device):
    arguments = (contexts, window, unit, min_chunk, 10, room, device)
    got, want = divide(divide_keys, *arguments), divide(reference, *arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("window", [None, 100])
def test_every_key_is_in_one_chunk(window, device):
    contexts, num_nodes = [1, 3000, 700, 0], 16
    chunks, part_indptr = divide(divide_keys, contexts, window, 32, 96, num_nodes, 20, device)
    parts = 0
    for request, context in enumerate(contexts):
        own = chunks[chunks[:, 0] == request].tolist()
        first = 0 if window is None else max(0, context - window)
        assert [key for _, begin, end, *_ in own for key in range(begin, end)] == [*range(first, context + num_nodes)]
        assert [part for *_, part, _, _ in own] == ([-1] if len(own) == 1 else [*range(parts, parts + len(own))])
        assert {tuple(row[4:]) for row in own} == {(context, len(contexts) - 1 - request + 3)}
        assert int(part_indptr[request]) == parts
        parts += len(own) if len(own) > 1 else 0
    assert int(part_indptr[-1]) == parts
    assert (chunks[:, 0] >= 0).sum() > len(contexts) or window == 100
    assert (chunks[chunks[:, 0] < 0] == -1).all()


def test_no_requests(device):
    chunks, part_indptr = divide(divide_keys, [], None, 32, 96, 16, 5, device)
    assert (chunks == -1).all() and part_indptr.tolist() == [0]
