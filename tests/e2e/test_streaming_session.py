"""Sessions that keep the KV of a conversation (`--enable-streaming-session`): a turn continues where one ended."""

import pytest
from serving import SYNC, Settings

STREAMING = ("enable-streaming-session", True)
SETTINGS = [
    Settings("streaming-session", flags=(STREAMING,), plain_flags=(SYNC,)),
    Settings("streaming-session-sync", flags=(STREAMING, SYNC)),
]


@pytest.mark.parametrize("settings", SETTINGS, indirect=True, ids=str)
def test_turns(pair, prompts):
    """Turns end inside a block or at its end."""

    def converse(server):
        answers = []
        for number, new_tokens in enumerate(range(9, 21)):
            name = f"session-{number}"
            server.post("/open_session", {"capacity_of_str_len": 1000, "session_id": name, "streaming": True})
            for turn in range(3):
                prompt = prompts[number] if turn == 0 else prompts[number + turn][:12]
                options = {"max_new_tokens": new_tokens + turn, "session_params": {"id": name}}
                answers.append(server.generate(prompt, **options))
            server.post("/close_session", {"session_id": name})
        return answers

    answers = pair.lossless(converse)

    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers[2::3]) > 0
