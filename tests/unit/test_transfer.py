"""What prefill and decode servers compare before one sends KV to the other."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.server_args import ServerArgs

from models.tiny import DRAFTER_DIR, TARGET_DIR
from sglang_dflash.engine.transfer import check_prefill_server
from sglang_dflash.errors import ConfigError

load_plugins()

if torch.cuda.is_available():
    pytest.skip("names the attention of a CPU", allow_module_level=True)


def served(**arguments):
    """Return a context in which SGLang's configuration is that of a server with these arguments."""
    args = ServerArgs(model_path=str(TARGET_DIR), device="cpu", attention_backend="torch_native", **arguments)
    return use_context(create_context(args, role="scheduler"))


def layout(module, **arguments) -> str | None:
    """Return the KV layout that a server describes, as one of its roles' modules sees the function."""
    with served(**arguments):
        return module.get_pd_kv_layout(SimpleNamespace())


DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(DRAFTER_DIR), "page_size": 1}


@pytest.mark.parametrize("module", [utils, prefill, decode], ids=lambda module: module.__name__)
def test_drafter_is_described_once(module):
    assert layout(module) is None
    described = layout(module, **DFLASH)
    assert described.count("DFLASH drafter") == 1
    assert described == layout(utils, **DFLASH)


def test_other_drafters_are_refused(tmp_path):
    other = tmp_path / "drafter"
    other.mkdir()
    config = (DRAFTER_DIR / "config.json").read_text()
    (other / "config.json").write_text(config.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    mine, theirs = (
        layout(decode, **DFLASH | {"speculative_draft_model_path": str(path)}) for path in (DRAFTER_DIR, other)
    )
    assert mine != theirs
    resolved = []
    with served(**DFLASH):
        for of_prefill in (theirs, None):
            with pytest.raises(ConfigError, match="--speculative-draft-model-path"):
                check_prefill_server(None, SimpleNamespace(kv_layout=mine), SimpleNamespace(kv_layout=of_prefill))
        check_prefill_server(
            lambda *both: resolved.append(both), SimpleNamespace(kv_layout=mine), SimpleNamespace(kv_layout=mine)
        )
    assert len(resolved) == 1
