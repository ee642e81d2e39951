"""SMG's gRPC servicer hands tokenised requests to the scheduler: the text is the target's, and no request ends it.

It is a package of its own (`pip install smg-grpc-servicer`), with a client for its protocol.
"""

import pytest
from serving import DEFAULT, Server, Settings

grpc = pytest.importorskip("grpc")
pytest.importorskip("smg_grpc_servicer")
protocol = pytest.importorskip("smg_grpc_proto.generated.sglang_scheduler_pb2")
services = pytest.importorskip("smg_grpc_proto.generated.sglang_scheduler_pb2_grpc")

SMG = Settings("smg-grpc", flags=(("smg-grpc-mode", True),), plain=DEFAULT)
START_SECONDS = 120
# By the parameter that the answer names.
REFUSED = {
    "temperature": {"temperature": float("nan")},
    "top_p": {"temperature": 1, "top_p": 1e-40},
    "frequency_penalty": {"frequency_penalty": float("nan")},
    "repetition_penalty": {"repetition_penalty": -1},
    "stop_token_ids": {"stop_token_ids": [5000]},
    "logit_bias": {"logit_bias": {"5": 1e39}},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    server = Server(SMG, True, tmp_path_factory.mktemp("smg") / "server.log")
    try:
        with grpc.insecure_channel(server.url.removeprefix("http://")) as channel:
            grpc.channel_ready_future(channel).result(timeout=START_SECONDS)
            yield services.SglangSchedulerStub(channel)
    finally:
        server.stop()


def generate(client, rid: str, prompt: list[int], fields: dict | None = None, **changes) -> list[int]:
    """Return the tokens of an answer."""
    params = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True} | changes
    request = protocol.GenerateRequest(
        request_id=rid,
        tokenized=protocol.TokenizedInput(original_text="", input_ids=prompt),
        sampling_params=protocol.SamplingParams(**params),
        **(fields or {}),
    )
    *_, last = client.Generate(request, timeout=60)
    return list(last.complete.output_ids)


def test_text_and_refusals(client, keeper, prompts):
    plain = keeper.server(DEFAULT, dflash=False)
    expected = [plain.generate([prompt], max_new_tokens=48, ignore_eos=True)[0]["output_ids"] for prompt in prompts[:4]]
    assert [generate(client, f"plain {i}", prompt) for i, prompt in enumerate(prompts[:4])] == expected

    def refusal(name: str, prompt: list[int], *fields, **changes) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            generate(client, f"refused {name}", prompt, *fields, **changes)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        return caught.value.details()

    for name, changes in REFUSED.items():
        assert refusal(name, prompts[0], **changes).startswith(name)
    assert "input_ids has 5000" in refusal("token", [5000])
    fields = {"return_logprob": True, "top_logprobs_num": 10**6}
    assert "top_logprobs_num" in refusal("log probabilities", prompts[0], fields)
    assert generate(client, "after", prompts[0]) == expected[0]
