"""The drafter's linear layers read int8 copies of their weights, where and when they should."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash import ops
from sglang_dflash.draft import int8
from sglang_dflash.engine.worker import DFlashWorker
from sglang_dflash.ops import small_m_linear, weight_copy
from sglang_dflash.ops.reference.linear_int8 import quantize_columns
from sglang_dflash.requests import update_weights

DEPTH = 256


@pytest.fixture
def int8_rows(monkeypatch) -> list[int]:
    """Return the numbers of rows that products with int8 copies get."""
    product, rows = ops.linear_int8, []
    monkeypatch.setattr(ops, "linear_int8", lambda x, *others: rows.append(len(x)) or product(x, *others))
    return rows


def new_layer(depth: int = DEPTH) -> ReplicatedLinear:
    layer = ReplicatedLinear(depth, 96, bias=False)
    nn.init.normal_(layer.weight, std=0.1)
    return layer


def install(*layers: nn.Module) -> None:
    drafter = nn.Sequential(*layers)
    small_m_linear.install(drafter)
    int8.install(drafter)


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ({}, int8.Int8LinearMethod),
        ({"bf16_gemm_backend": "torch"}, UnquantizedLinearMethod),
        ({"enable_deterministic_inference": True}, UnquantizedLinearMethod),
        ({"disaggregation_mode": "prefill"}, small_m_linear.FewRowsLinearMethod),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, dict) else None,
)
def test_flags(publish_server, flags, method):
    publish_server(**flags)
    layer = new_layer()
    install(layer)
    assert type(layer.quant_method) is method


def test_other_depths_keep_their_method(publish_server):
    publish_server()
    layer = new_layer(depth=DEPTH + 64)
    install(layer)
    assert type(layer.quant_method) is small_m_linear.FewRowsLinearMethod


@pytest.mark.parametrize("most", [32, 64])
def test_few_rows(publish_server, monkeypatch, int8_rows, most):
    """Few rows are products with the copy. More rows are those of the weight itself."""
    publish_server()
    monkeypatch.setattr(int8, "max_rows", lambda is_gated: most)
    layer = new_layer()
    install(layer)
    numbers, scales = quantize_columns(layer.weight.data)
    copied = numbers * scales[:, None]
    assert not torch.equal(copied, layer.weight)
    for rows, weight in ((1, copied), (most, copied), (most + 1, layer.weight)):
        x = torch.randn(rows, DEPTH)
        torch.testing.assert_close(layer(x)[0], x @ weight.T, rtol=1e-3, atol=1e-3)
    assert int8_rows == [1, most]
    # The next kernel starts early after either kernel.
    assert small_m_linear.runs_few_rows(layer, small_m_linear.MAX_ROWS)
    assert not small_m_linear.runs_few_rows(layer, small_m_linear.MAX_ROWS + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="rounds there; tests/kernels runs its kernel")
@pytest.mark.parametrize("most", [16, 64])
def test_gated_mlp(publish_server, monkeypatch, int8_rows, most):
    """An MLP computes what it computed before, with every number of rows, whichever kernel activates them."""
    publish_server()
    monkeypatch.setattr(int8, "max_rows", lambda is_gated: most)
    mlp = Qwen2MLP(hidden_size=DEPTH, intermediate_size=DEPTH, hidden_act="silu")
    for parameter in mlp.parameters():
        nn.init.normal_(parameter, std=0.1)
    batches = [torch.randn(rows, DEPTH) for rows in (1, most, most + 1, 129)]
    with get_parallel().override(tp_group=None):
        before = [mlp(batch) for batch in batches]
        install(mlp)
        after = [mlp(batch) for batch in batches]
    for got, want in zip(after, before, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()
    assert int8_rows == [1, 1, most, most]
    # Activated by the kernel.
    assert mlp.gate_up_proj(batches[0])[0].shape == (1, DEPTH)


@pytest.mark.parametrize("updates", ["load", "rdma"])
def test_updates(publish_server, monkeypatch, updates):
    """Copies follow the weights before the drafter runs again, in the same memory."""
    # Weights are copied in parts.
    monkeypatch.setattr(weight_copy, "_NUMBERS", 40 * DEPTH)
    publish_server()
    layer, x = new_layer(), torch.randn(3, DEPTH)
    install(layer)
    before, copied = layer(x)[0], layer.quant_method._copy
    addresses = [tensor.data_ptr() for tensor in copied.tensors]
    layer.weight.data.mul_(-2)
    weight_copy.refresh()
    assert torch.equal(layer(x)[0], before)
    if updates == "load":
        update_weights._weights_have_changed()
    else:
        scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(is_dflash=lambda: True))
        update_weights.end_weight_update(lambda *_: None, SimpleNamespace(scheduler=scheduler), None)
    weight_copy.refresh()
    torch.testing.assert_close(layer(x)[0], -2 * before)
    assert [tensor.data_ptr() for tensor in copied.tensors] == addresses


@pytest.mark.parametrize("step", ["_prefill", "_decode"])
def test_steps_refresh_copies(monkeypatch, step):
    """Copies are those of the current weights in every step."""
    calls = []
    worker = DFlashWorker.__new__(DFlashWorker)
    worker._serving = SimpleNamespace(draft_length=SimpleNamespace(begin_step=lambda is_decode: None))
    monkeypatch.setattr(weight_copy, "refresh", lambda: calls.append("refresh"))
    monkeypatch.setattr(DFlashWorker, step, lambda *_: calls.append(step))
    mode = ForwardMode.EXTEND if step == "_prefill" else ForwardMode.DECODE
    worker.forward_batch_generation(SimpleNamespace(forward_mode=mode, is_extend_in_batch=False))
    assert calls == ["refresh", step]
