"""SGLang's Rust server hands tokenised requests to the scheduler: the text is the target's, and no request ends it.

What its own checks let pass is refused in the scheduler (`requests/received.py`).
"""

import pytest
from serving import DEFAULT, Server, Settings

RUST = Settings("rust-server", env=(("SGLANG_RUST_SERVER", "1"),), plain=DEFAULT)
# By the parameter that the answer names.
REFUSED = {
    "temperature": {"temperature": 1e300},
    "top_p": {"temperature": 1, "top_p": 1e-50},
    "repetition_penalty": {"repetition_penalty": 1e-300},
    "stop_token_ids": {"stop_token_ids": [5000]},
    "logit_bias": {"logit_bias": {"5": 1e39}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(RUST, True, tmp_path_factory.mktemp("rust") / "server.log")
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def test_text_and_refusals(server, keeper, prompts):
    plain = keeper.server(DEFAULT, dflash=False)
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    for prompt in prompts[:4]:
        body = {"input_ids": prompt, "sampling_params": params}
        assert server.post("/generate", body)["output_ids"] == plain.post("/generate", body)["output_ids"]

    for name, changes in REFUSED.items():
        body = {"input_ids": prompts[0], "sampling_params": params | changes}
        response = server.try_post("/generate", body)
        assert response.status_code == 400, name
        assert response.json()["error"]["message"].startswith(name)
    body = {"input_ids": prompts[0], "sampling_params": params}
    response = server.try_post("/generate", body | {"return_logprob": True, "top_logprobs_num": 10**6})
    assert response.status_code == 400 and "top_logprobs_num" in response.text
    assert len(server.post("/generate", body)["output_ids"]) == 48
