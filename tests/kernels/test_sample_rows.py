import pytest
import torch
from support.chi_square import chi_square

from sglang_dflash.ops.kernels.sample_rows import sample_rows
from sglang_dflash.ops.reference.row_max import row_max
from sglang_dflash.ops.reference.sample_rows import allowed_distribution
from sglang_dflash.ops.reference.sample_rows import sample_rows as reference
from sglang_dflash.types import DrawParameters

BOTH = pytest.mark.parametrize("implementation", [sample_rows, reference], ids=["kernel", "reference"])
ALL = 1 << 30


def parameters_of(*requests: dict, device: str) -> DrawParameters:
    """Return parameters of requests. A parameter that a request does not name filters nothing."""

    def tensor(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([request.get(name, default) for request in requests], dtype=dtype, device=device)

    return DrawParameters(
        tensor("temperature", 1.0, torch.float32),
        tensor("top_k", ALL, torch.int32),
        tensor("top_p", 1.0, torch.float32),
        tensor("min_p", 0.0, torch.float32),
    )


def draw(implementation, logits: torch.Tensor, parameters: DrawParameters, first: int = 0, key: int = 77):
    """Return the tokens that are drawn at positions `first`, `first` + 1 and so on."""
    maxima, tokens = row_max(logits)
    positions = torch.arange(first, first + len(logits), device=logits.device)
    implementation(
        logits, maxima, tokens, parameters, torch.full_like(parameters.top_ks, key, dtype=torch.int64), positions
    )
    return tokens


# --- what may be drawn ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("restricted", ["top_k", "top_p", "min_p", "top_k and top_p", "top_k and min_p"])
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(1, torch.float32), (7, torch.bfloat16), (2049, torch.float16), (4097, torch.float32), (50003, torch.bfloat16)],
)
def test_every_allowed_token_is_drawn_and_no_other(columns, dtype, restricted, implementation, device):
    """A filter keeps, of a few likely tokens somewhere in the vocabulary, the best three."""
    generator = torch.Generator().manual_seed(columns)
    values = 0.3 * torch.randn(columns, generator=generator)
    values[torch.randperm(columns, generator=generator)[:6]] += 12
    values = values.to(dtype)
    # A low precision has ties, which are allowed together.
    exact = values.double()
    third = exact.sort(descending=True).values[min(2, columns - 1)]
    allowed = (exact >= third).nonzero()[:, 0]
    fourth = exact[exact < third].max() if len(allowed) < columns else third - 1
    top_k = max(2, int((exact > third).sum()) + 1)
    top_p = float((exact.softmax(dim=0) * ((exact > third) + 0.5 * (exact == third))).sum())
    min_p = float(((third + fourth) / 2 - exact.max()).exp())
    request = {
        "top_k": {"top_k": top_k},
        "top_p": {"top_p": top_p},
        "min_p": {"min_p": min_p},
        "top_k and top_p": {"top_k": 50, "top_p": top_p},
        "top_k and min_p": {"top_k": top_k, "min_p": 1e-9},
    }[restricted]
    parameters = parameters_of(request, device=device)
    # All rows are in one place: their stride is 0.
    logits = values.to(device).expand(35, columns)

    assert allowed_distribution(logits[:1], parameters)[0].nonzero()[:, 0].tolist() == allowed.tolist()
    assert sorted(set(draw(implementation, logits, parameters).tolist())) == allowed.tolist()


@BOTH
def test_greedy_rows_are_left_alone(implementation, device):
    logits = torch.randn(12, 300, device=device)
    greedy = {"top_k": 1, "temperature": 50.0}
    parameters = parameters_of(greedy, {"temperature": 50.0}, greedy | {"top_k": 0}, device=device)
    maxima = logits.amax(dim=1)
    tokens = torch.full((12,), -7, device=device)
    keys, positions = torch.zeros(3, dtype=torch.int64, device=device), torch.arange(12, device=device)
    implementation(logits, maxima, tokens, parameters, keys, positions)
    is_sampled = torch.arange(12) // 4 == 1
    assert tokens[~is_sampled].tolist() == [-7] * 8
    assert tokens[is_sampled].min() >= 0


@BOTH
def test_each_request_has_its_parameters(implementation, device):
    """An odd number of rows in strided memory; a draw from one token is no draw."""
    logits = torch.randn(9, 5000, device=device)[:, :4500]
    parameters = parameters_of({"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}, device=device)
    assert draw(implementation, logits, parameters).tolist() == logits.argmax(dim=1).tolist()


@BOTH
def test_the_padding_of_a_row_is_never_read(implementation, device):
    logits = torch.full((3, 4100), 100.0, device=device)[:, :4097]
    logits[:] = torch.randn(3, 4097, device=device)
    parameters = parameters_of({"temperature": 50.0}, device=device)
    tokens = torch.stack([draw(implementation, logits, parameters, 3 * i) for i in range(20)])
    assert tokens.max() < 4097


@BOTH
def test_infinities_and_nan(implementation, device):
    """Whatever a broken model computes, it ends, and the token is one of the vocabulary."""
    logits = torch.full((4, 5000), float("-inf"), device=device)
    logits[1] = float("nan")
    logits[2, 4321] = float("inf")
    logits[3, [17, 4500]] = 1.0
    logits[3, 20] = float("nan")
    for request in ({}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.1}):
        seen = [draw(implementation, logits, parameters_of(request, device=device), 4 * i) for i in range(12)]
        rows = torch.stack(seen).T.tolist()
        assert [set(row) for row in rows] == [{0}, {0}, {4321}, {17, 4500}]


@BOTH
def test_no_rows(implementation, device):
    empty = torch.empty(0, 10, device=device)
    assert draw(implementation, empty, parameters_of(device=device)).tolist() == []


# --- how often ------------------------------------------------------------------------------------------------------

# Triton's interpreter draws forty a second.
NUM_DRAWS = {"cuda": 200_000, "cpu": 360}
SETTINGS = {
    "unfiltered": {},
    "cold": {"temperature": 0.6},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_k splits a tie": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "top_p splits a tie": {"top_p": 0.7},
    "min_p": {"temperature": 1.3, "min_p": 0.15},
    "top_k and top_p": {"temperature": 2.0, "top_k": 7, "top_p": 0.8},
    "top_k and min_p": {"temperature": 2.0, "top_k": 7, "min_p": 0.3},
    "top_p and min_p": {"temperature": 2.0, "top_p": 0.9, "min_p": 0.2},
}
# Tokens 1, 8 and 4 are the fourth to the sixth of the order; four tokens would be sure to hold the mass of 0.7.
LOGITS = [0.5, 1.0, 2.25, -3.0, 1.0, 1.75, 0.0, -1.5, 1.0, 1.25, -0.5]


@BOTH
@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(name, implementation, device):
    launches, n = 4, NUM_DRAWS[device]
    logits = torch.tensor(LOGITS, device=device)
    parameters = parameters_of(SETTINGS[name], device=device)
    rows = logits.expand(n // launches, -1)
    tokens = torch.cat([draw(implementation, rows, parameters, i * len(rows)) for i in range(launches)])
    expected = n * allowed_distribution(logits[None], parameters)[0]
    assert chi_square(tokens.bincount(minlength=len(LOGITS)), expected) > 1e-3


@BOTH
@pytest.mark.parametrize("name", ["unfiltered", "top_p"])
def test_distribution_over_a_large_vocabulary(name, implementation, device):
    """The same tokens, far from each other, and nothing else."""
    launches, n = 4, NUM_DRAWS[device]
    places = torch.arange(len(LOGITS), device=device) * 1229
    logits = torch.full((int(places[-1]) + 7,), float("-inf"), device=device)
    logits[places] = torch.tensor(LOGITS, device=device)
    parameters = parameters_of(SETTINGS[name], device=device)
    rows = logits.expand(n // launches, -1)
    tokens = torch.cat([draw(implementation, rows, parameters, i * len(rows)) for i in range(launches)])
    expected = n * allowed_distribution(logits[None], parameters)[0]
    assert chi_square(tokens.bincount(minlength=len(logits)), expected) > 1e-3


@pytest.mark.parametrize(("name", "tokens"), [("top_k splits a tie", 6), ("top_p splits a tie", 6), ("top_p", 3)])
def test_ties_are_allowed_together(name, tokens, device):
    kept = allowed_distribution(torch.tensor([LOGITS], device=device), parameters_of(SETTINGS[name], device=device))
    assert int((kept > 0).sum()) == tokens


@BOTH
def test_positions_and_keys_are_independent(implementation, device):
    """Pairs of draws, at positions in a row and of neighbouring keys, are distributed as pairs."""
    n, vocab = NUM_DRAWS[device] // 2, 4
    logits = torch.zeros(vocab, device=device).expand(n, -1)
    first, second = (
        draw(implementation, logits, parameters_of({"top_k": 3, "temperature": 2.0}, device=device), key=key)
        for key in (5, 6)
    )
    expected = torch.full((vocab**2,), n / vocab**2)
    for one, other in ((first, second), (first, first.roll(1))):
        assert chi_square((vocab * one + other).bincount(minlength=vocab**2).cpu(), expected) > 1e-3


@pytest.mark.parametrize("request_", [{}, {"top_k": 40, "top_p": 0.9}, {"temperature": 0.7, "min_p": 0.05}])
def test_matches_reference(request_, device):
    """A draw is a function of key, position and logits: kernel and reference draw the same tokens."""
    logits = torch.randn(24, 6000, device=device).to(torch.bfloat16)
    parameters = parameters_of(request_, request_, device=device)
    for key in (2**62 + 3, 5):
        assert torch.equal(
            draw(sample_rows, logits, parameters, 100, key), draw(reference, logits, parameters, 100, key)
        )


@pytest.mark.parametrize("columns", [1, 2, 4095, 4096, 4097, 12_289])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 30.0])
def test_no_column_that_could_win_is_skipped(columns, temperature, device):
    """The kernel computes scores only where their upper bound reaches the best. Rows are flat, steep, and equal."""
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(4, 5, columns, generator=generator)
    # Confident rows, rows whose logits differ less than their noise, equal ones, and large negative ones.
    logits[0, :, columns // 2] += 12
    logits[1] *= 0.01 * temperature
    logits[2] = -3.0
    logits[3] = logits[3] * 5 - 300
    logits = logits.flatten(0, 1).to(torch.bfloat16).to(device)
    requests = ({}, {"top_k": 3}, {"min_p": 0.01}, {"top_p": 0.9})
    parameters = parameters_of(*({"temperature": temperature} | request for request in requests), device=device)
    # Each request has each kind of rows once.
    for key, shift in ((2**62 + 3, 0), (5, 5), (2**62 + 3, 10), (5, 15)):
        rows = logits.roll(shift, 0)
        assert torch.equal(draw(sample_rows, rows, parameters, 7, key), draw(reference, rows, parameters, 7, key))


@BOTH
def test_the_same_key_and_position_repeat_a_draw(implementation, device):
    """Wherever the row is in the batch, and whatever is beside it."""
    logits = torch.zeros(50, 5000, device=device)
    keys = (2**62 + 3, 2**62 + 3, 2**62 + 4, 3)
    parameters = parameters_of({}, device=device)
    first, same, *others = (draw(implementation, logits, parameters, key=key) for key in keys)
    assert torch.equal(first, same)
    assert all((first == other).sum() < 3 for other in others)
    alone = draw(implementation, logits[:1], parameters, 31, keys[0])
    assert alone.item() == first[31]
