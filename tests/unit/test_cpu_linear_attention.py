"""CPU operators of Gated DeltaNet against transformers' layer: prompts in parts, then single tokens."""

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from sglang_dflash_cpu.platform import cpu_engine

if not cpu_engine():
    pytest.skip("needs SGLANG_USE_CPU_ENGINE=1 and no CUDA device", allow_module_level=True)

from sglang_dflash_cpu import sgl_kernel_mamba as ops
from sglang_dflash_cpu.hooks import _gated

HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE, CHANNELS = 2, 6, 20, 12, 10
SLOTS = 5
# Three sequences, in batches of two or three, in slots that are not in order.
PARTS = [{0: 64, 1: 1, 2: 130}, {0: 3, 2: 64}, {1: 70, 2: 2}]
ROW = {0: 3, 1: 1, 2: 4}


def random(*shape):
    return torch.randn(shape, generator=random.generator)


@pytest.fixture(autouse=True)
def seed():
    random.generator = torch.Generator().manual_seed(0)


def batches(inputs):
    """Yield the parts of all sequences' inputs: rows, starts of sequences, and inputs [tokens, ...]."""
    at = dict.fromkeys(inputs, 0)
    for part in PARTS:
        taken = {i: inputs[i][at[i] : at[i] + length] for i, length in part.items()}
        at = {i: at[i] + part.get(i, 0) for i in at}
        starts = torch.tensor([0, *part.values()]).cumsum(0).int()
        yield list(part), torch.tensor([ROW[i] for i in part]), starts, torch.cat(list(taken.values()))


def test_convolution():
    weight = random(CHANNELS, 4)
    inputs = {i: random(sum(part.get(i, 0) for part in PARTS) + 6, CHANNELS) for i in ROW}
    expected = {i: reference.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T for i, x in inputs.items()}
    states = torch.full((SLOTS, CHANNELS, 3), torch.nan)
    done = dict.fromkeys(inputs, 0)

    for sequences, rows, starts, x in batches(inputs):
        has_state = torch.tensor([done[i] > 0 for i in sequences])
        lens = starts.diff().tolist()
        out = ops.causal_conv1d_fn_cpu(x.T, weight, None, states, starts, lens, rows, has_state, activation="silu")
        for i, part in zip(sequences, out.T.split(lens)):
            torch.testing.assert_close(part, expected[i][done[i] : done[i] + len(part)])
            done[i] += len(part)

    # The rest token by token.
    rows = torch.tensor(list(ROW.values()))
    before = states.clone()
    for step in range(6):
        x = torch.stack([inputs[i][done[i] + step] for i in ROW])
        out = ops.causal_conv1d_update_cpu(x, states, weight, None, "silu", conv_state_indices=rows)
        torch.testing.assert_close(out, torch.stack([expected[i][done[i] + step] for i in ROW]))
    for i, row in ROW.items():
        assert torch.equal(states[row], inputs[i][-3:].T)
    assert torch.equal(states[[0, 2]], before[[0, 2]]) or before[[0, 2]].isnan().all()


def test_delta_rule():
    lens = {i: sum(part.get(i, 0) for part in PARTS) + 2 for i in ROW}
    sizes = {"q": (HEADS, KEY_SIZE), "k": (HEADS, KEY_SIZE), "v": (VALUE_HEADS, VALUE_SIZE)}
    sizes |= {"a": (VALUE_HEADS,), "b": (VALUE_HEADS,)}
    # All inputs of a token are concatenated, and `batches` splits them.
    widths = [torch.Size(size).numel() for size in sizes.values()]
    inputs = {i: random(length, sum(widths)) for i, length in lens.items()}
    a_log, dt_bias = torch.linspace(-5, 1, VALUE_HEADS), random(VALUE_HEADS)

    def split(x):
        parts = zip(x.split(widths, dim=-1), sizes.values())
        return [part.unflatten(-1, size) for part, size in parts]

    def expect(x):
        q, k, v, a, b = split(x)
        g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        q, k = (part.repeat_interleave(VALUE_HEADS // HEADS, dim=1) for part in (q, k))
        return reference.torch_recurrent_gated_delta_rule(
            *(part[None] for part in (q, k, v)),
            g=g[None],
            beta=b.sigmoid()[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    expected = {i: expect(x)[0][0] for i, x in inputs.items()}

    def state_after(i, length):
        return expect(inputs[i][:length])[1][0].transpose(1, 2)

    states = torch.zeros(SLOTS, VALUE_HEADS, VALUE_SIZE, KEY_SIZE)
    done = dict.fromkeys(inputs, 0)
    for sequences, rows, starts, x in batches(inputs):
        q, k, v, a, b = split(x)
        g, beta = ops.fused_gdn_gating_cpu(a_log, a, b, dt_bias)
        out, _, chunks = ops.chunk_gated_delta_rule_cpu(
            *(part[None] for part in (q, k, v)),
            g=g,
            beta=beta,
            initial_state=states,
            cu_seqlens=starts,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=rows,
        )
        chunks = iter(chunks[0])
        for i, part in zip(sequences, out[0].split(starts.diff().tolist())):
            torch.testing.assert_close(part, expected[i][done[i] : done[i] + len(part)])
            for t in range(0, len(part), 64):
                if done[i] + t:
                    torch.testing.assert_close(next(chunks), state_after(i, done[i] + t))
                else:
                    assert not next(chunks).any()
            done[i] += len(part)
        assert next(chunks, None) is None

    rows = torch.tensor(list(ROW.values()))
    for step in range(2):
        q, k, v, a, b = split(torch.stack([inputs[i][done[i] + step] for i in ROW]))
        out = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log=a_log,
            dt_bias=dt_bias,
            q=q[None],
            k=k[None],
            v=v[None],
            a=a,
            b=b,
            initial_state_source=states,
            initial_state_indices=rows,
            cu_seqlens=torch.arange(4, dtype=torch.int32),
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        torch.testing.assert_close(out[0], torch.stack([expected[i][done[i] + step] for i in ROW]))
    for i, row in ROW.items():
        torch.testing.assert_close(states[row], state_after(i, lens[i]))
    assert not states[[0, 2]].any()


def test_splits_and_norms():
    q_gate, k, weight = random(5, 3 * 2 * 8), random(5, 2 * 8), random(8)
    norm = reference.Qwen3_5RMSNorm(8)
    norm.weight.data = weight
    q, k_out, gate = torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, weight, weight, 1e-6, 8, 3)
    expected_q, expected_gate = q_gate.view(5, 3, 16).chunk(2, dim=-1)
    torch.testing.assert_close(q.view(5, 3, 8), norm(expected_q))
    torch.testing.assert_close(k_out.view(5, 2, 8), norm(k.view(5, 2, 8)))
    assert torch.equal(gate.view(5, 3, 8), expected_gate)

    x = random(5, 24)
    expected = x * expected_gate.reshape(5, 24).sigmoid()
    torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(x, expected_gate)
    torch.testing.assert_close(x, expected)

    qkvz, ba = random(5, 2 * 2 * 8 + 2 * 4 * 6), random(5, 8)
    mixed, z, b, a = torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, 2, 4, 8, 6)
    assert torch.equal(torch.cat([mixed, z.flatten(1)], dim=1), qkvz) and z.shape == (5, 4, 6)
    assert torch.equal(torch.cat([b, a], dim=1), ba)

    x, z, gated = random(7, 8), random(7, 8), reference.Qwen3_5RMSNormGated(8)
    gated.weight.data = weight
    torch.testing.assert_close(_gated(x, weight, 1e-6, z, "swish"), gated(x, z))
    normed = _gated(x, weight, 1e-6, z, "sigmoid")
    torch.testing.assert_close(normed * silu(z), gated(x, z) * z.sigmoid())
