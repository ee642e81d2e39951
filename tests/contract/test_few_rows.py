"""SGLang's flags that choose how layers are computed disable this package's kernels."""

from contextlib import nullcontext

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.models.llama import LlamaMLP
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash.ops import add_norm, small_m_linear


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({}, small_m_linear.FewRowsLinearMethod),
        ({"bf16_gemm_backend": "torch"}, UnquantizedLinearMethod),
        ({"bf16_gemm_backend": "gemv"}, UnquantizedLinearMethod),
        ({"enable_deterministic_inference": True}, UnquantizedLinearMethod),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, dict) else None,
)
def test_flags(publish_server, flags, method):
    publish_server(**flags)
    layer = ReplicatedLinear(64, 64, bias=False)
    small_m_linear.install(nn.Sequential(layer))
    assert type(layer.quant_method) is method


@pytest.mark.parametrize("norm_type", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("flags", [{}, {"enable_deterministic_inference": True}], ids=["none", "deterministic"])
def test_norms(publish_server, monkeypatch, flags, norm_type):
    """A norm computes what it computed before, with any arguments. Only cycles run the kernel."""
    publish_server(**flags)
    kernel, calls = add_norm.ops.add_rms_norm, []
    monkeypatch.setattr(add_norm.ops, "add_rms_norm", lambda *args: calls.append(args) or kernel(*args))
    norm = norm_type(96, eps=1e-2)
    nn.init.normal_(norm.weight)
    ours = norm_type(96, eps=1e-2)
    ours.load_state_dict(norm.state_dict())
    add_norm.install(ours, follows_few_rows=True)
    assert isinstance(ours._forward_method, add_norm.AddNormForward) is not bool(flags)
    x, residual, more = torch.randn(3, 5, 96)
    strided = x.T.contiguous().T
    for arguments in [(x,), (x, residual), (x, residual, more), (x[None], residual[None]), (strided, residual)]:
        want = norm(*(tensor.clone() for tensor in arguments))
        for context in (nullcontext(), add_norm.in_cycle()):
            with context:
                got = ours(*(tensor.clone() for tensor in arguments))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    # In a cycle, with a residual.
    assert len(calls) == (0 if flags else 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="rounds there; tests/kernels and tests/gpu run its kernel")
@pytest.mark.parametrize("mlp_type", [LlamaMLP, Qwen2MLP])
def test_gated_mlp(publish_server, mlp_type):
    """An MLP whose gate_up_proj activates few rows computes what it computed before, also with many rows."""
    publish_server()
    mlp = mlp_type(hidden_size=64, intermediate_size=96, hidden_act="silu")
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.2)
    batches = [torch.randn(rows, 64) for rows in (1, small_m_linear.MAX_ROWS, small_m_linear.MAX_ROWS + 1)]
    # One rank has no other rank to reduce with.
    with get_parallel().override(tp_group=None):
        before = [mlp(batch) for batch in batches]
        small_m_linear.install(mlp)
        assert isinstance(mlp.act_fn, small_m_linear.PassActivated)
        for batch, want in zip(batches, before, strict=True):
            torch.testing.assert_close(mlp(batch), want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="rounds there; tests/kernels and tests/gpu run its kernel")
def test_mlp_with_adapters(publish_server):
    """A gate_up_proj with LoRA adapters is not activated by its own kernel: the adapters' part comes after it."""
    publish_server()
    mlp = LlamaMLP(hidden_size=64, intermediate_size=96, hidden_act="silu")
    base = mlp.gate_up_proj
    mlp.gate_up_proj = BaseLayerWithLoRA(base, lora_backend=None)
    small_m_linear.install(mlp)
    assert type(base.quant_method) is small_m_linear.FewRowsLinearMethod
    assert not isinstance(mlp.act_fn, small_m_linear.PassActivated)
    rows = torch.randn(2, 64)
    assert base.quant_method.apply(base, rows).shape == (2, 2 * 96)
    assert not small_m_linear.runs_few_rows(mlp.gate_up_proj, 2)
    assert small_m_linear.runs_few_rows(base, 2)
