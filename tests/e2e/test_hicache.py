"""KV in host memory and in files: prompts that come back have their text, and draft as they did at first.

Without the drafter's KV the text is the same, and drafts are worse. So every test compares the cycles.
"""

from __future__ import annotations

import pytest
from serving import DEFAULT, SYNC, ServerKeeper, Settings, trees
from support.stored_kv import PAGE_SIZE, long_texts, stored_lens, wait_until_stored

from models.tiny import DRAFTER_DIR

# Nine prompts of several hundred tokens do not fit.
POOL = 2100
HOST = (
    ("max-total-tokens", POOL),
    ("max-running-requests", 4),
    ("enable-hierarchical-cache", True),
    ("hicache-ratio", 6),
    ("hicache-io-backend", "direct"),
    ("hicache-mem-layout", "layer_first"),
)
CHAINS = Settings("hicache", dflash_flags=HOST, plain=DEFAULT)
# KV is copied to the host when it is evicted.
TREES = Settings(
    "hicache-write-back-trees",
    dflash_flags=(*HOST, SYNC, *trees(8), ("page-size", 16), ("hicache-write-policy", "write_back")),
    plain=DEFAULT,
)
pytestmark = pytest.mark.cpu(reason="the layouts and copies of a CPU")


def cycles(answers: list[dict]) -> list[tuple]:
    counters = ("spec_verify_ct", "spec_correct_drafts_histogram")
    return [tuple(map(str, map(answer["meta_info"].get, counters))) for answer in answers]


def ask(texts: list[list[int]]):
    return lambda server: [server.generate(text, max_new_tokens=40, ignore_eos=True) for text in texts]


@pytest.fixture(scope="module")
def texts(prompts) -> list[list[int]]:
    return long_texts(prompts, 9)


@pytest.mark.parametrize("settings", [CHAINS, TREES], indirect=True, ids=str)
def test_prompts_come_back_from_host_memory(pair, texts):
    answers = pair.lossless(ask([*texts, *texts[:3]]))

    first, back = answers[:3], answers[9:]
    for text, answer in zip(texts, back):
        assert answer["meta_info"]["cached_tokens"] >= len(text) // 16 * 16 - 16
        assert answer["meta_info"]["cached_tokens_details"]["host"] > 0
    assert cycles(back) == cycles(first)


@pytest.mark.parametrize("settings", [CHAINS], indirect=True, ids=str)
def test_requests_at_a_time(pair, texts):
    """Prompts come back while other requests decode, and while their KV is evicted."""
    requests = [{"input_ids": text, "max_new_tokens": 30, "ignore_eos": True} for text in texts * 2]

    first = pair.lossless(lambda server: server.generate_concurrently(requests))
    again = pair.lossless(lambda server: server.generate_concurrently(requests[:9]))

    assert cycles(first[:9]) == cycles(again)


def stored(answers: list[dict]) -> list[int]:
    """Return the tokens of each prompt that came from files."""
    return [(answer["meta_info"]["cached_tokens_details"] or {"storage": 0})["storage"] for answer in answers]


def test_prompts_come_back_from_files(texts, tmp_path, tmp_path_factory):
    """A new server finds the files of one with the same drafter, and not those of another drafter.

    Neither does a server whose drafter is updated while no files are attached.
    """
    other = tmp_path / "drafter"
    other.symlink_to(DRAFTER_DIR)
    flags = (*HOST, ("page-size", PAGE_SIZE), ("hicache-storage-backend", "file"))
    flags += (("hicache-storage-prefetch-policy", "wait_complete"), ("admin-api-key", "of the test"))
    store = (("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store")),)
    same = Settings("hicache-file", dflash_flags=flags, env=store)
    different = Settings(
        "hicache-file-other", dflash_flags=(*flags, ("speculative-draft-model-path", str(other))), env=store
    )
    answers = {}
    for name, settings in (("first", same), ("second", same), ("other", different)):
        servers = ServerKeeper(tmp_path_factory.mktemp("servers"))
        server = servers.server(settings, dflash=True)
        answers[name] = ask(texts[:3])(server)
        refused = server.try_post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})
        assert refused.status_code == 400 and "--hicache-storage-backend file" in refused.text
        wait_until_stored(tmp_path / "store", texts[:3])
        if name == "other":
            server.detach_storage()
            assert server.post("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR)})["success"]
            server.attach_storage("file")
            answers["updated"] = ask(texts[:3])(server)
        servers.stop()

    storage = {name: stored(of_one) for name, of_one in answers.items()}
    assert storage["second"] == stored_lens(texts[:3])
    assert storage["first"] == storage["other"] == storage["updated"] == [0, 0, 0]
    for name in ("second", "other", "updated"):
        assert cycles(answers[name]) == cycles(answers["first"])
        assert [each["output_ids"] for each in answers[name]] == [each["output_ids"] for each in answers["first"]]
