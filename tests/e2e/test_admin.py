"""Administrative requests: what is served, what is refused, and that the server and its text are right afterwards."""

import base64
import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from serving import DEFAULT, REQUEST_SECONDS, Server, assert_same_answers

from models.tiny import DRAFTER_DIR, TARGET_DIR

pytestmark = pytest.mark.parametrize("settings", [DEFAULT], indirect=True, ids=str)

WEIGHT = "model.layers.0.self_attn.o_proj.weight"
TENSOR = load_file(TARGET_DIR / "model.safetensors")[WEIGHT]
NOTHING_LOADED, PARTLY_LOADED = "Nothing was loaded.", "Some tensors may have been loaded"
PROFILE = {"activities": ["CPU"]}
SESSION = {"capacity_of_str_len": 1000}


def call(server: Server, path: str, body: dict | None = None) -> requests.Response:
    # A new connection, because SGLang's 500s close theirs.
    with requests.Session() as http:
        http.trust_env = False
        return http.post(f"{server._url}{path}", json=body, timeout=REQUEST_SECONDS)


def refused(server: Server, path: str, body: dict | None = None) -> str:
    """Return the message of a 400."""
    response = call(server, path, body)
    assert response.status_code == 400, f"{path} {body}: {response.status_code} {response.text}\n{server.log_tail()}"
    return response.text


def assert_undisturbed(pair, prompts) -> None:
    pair.lossless(lambda server: server.generate(prompts[2], max_new_tokens=48))
    # An answer is sent before the step after it has ended, and until then some calls are refused.
    pair.dflash.flush_cache()


def pickled(content: object) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


REFUSED = [
    # Memory and experts.
    ("/resume_memory_occupation", {}, "whose memory is not released"),
    ("/resume_memory_occupation", {"tags": ["weights"]}, "tags has 'weights'"),
    ("/start_expert_distribution_record", None, "expert_distribution_recorder_mode"),
    ("/stop_expert_distribution_record", None, "expert_distribution_recorder_mode"),
    ("/dump_expert_distribution_record", None, "expert_distribution_recorder_mode"),
    # Profiles.
    ("/stop_profile", None, "Call /start_profile first"),
    ("/start_profile", {"activities": ["TPU"]}, "Unknown activity 'TPU'"),
    ("/start_profile", {"activities": ["RPD"]}, "Unknown activity 'RPD'"),
    ("/start_profile", PROFILE | {"profile_by_stage": True}, "num_steps=None"),
    ("/start_profile", PROFILE | {"output_dir": "/dev/null/traces"}, "output_dir='/dev/null/traces'"),
    ("/start_profile", PROFILE | {"profile_prefix": "a/b"}, "profile_prefix='a/b'"),
    # Fields that may be set.
    ("/set_internal_state", {"server_args": {"speculative_accept_threshold_single": 0.5}}, "threshold_single is not"),
    ("/set_internal_state", {"server_args": {"speculative_accept_threshold_acc": 0.5}}, "threshold_acc is not"),
    ("/configure_logging", {"log_level": "loud"}, "log_level='loud' is invalid: give one of critical, "),
    # SGLang keeps it, and every later request fails.
    (
        "/configure_logging",
        {"log_requests": True, "log_requests_level": 9},
        "log_requests_level=9 is invalid: give one",
    ),
    ("/configure_logging", {"log_requests_level": -1}, "log_requests_level=-1 is invalid: give one of 0, 1, 2, 3."),
    ("/configure_logging", {"log_requests_format": "xml"}, "log_requests_format='xml' is invalid: give one of "),
    # Groups of other processes.
    (
        "/init_weights_update_group",
        {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 1, "group_name": ""},
        "Group name cannot be empty",
    ),
    (
        "/init_weights_send_group_for_remote_instance",
        {"master_address": "127.0.0.1", "ports": "1,2", "group_rank": 0, "world_size": 1},
        "Expected 1 ports",
    ),
    ("/send_weights_to_remote_instance", {"master_address": "127.0.0.1", "ports": "1"}, "weight_send_group_1_0"),
    ("/destroy_weights_update_group", {"group_name": "none"}, "does not exist"),
    # Weights.
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, NOTHING_LOADED),
    ("/update_weights_from_disk", {"model_path": str(TARGET_DIR), "load_format": "x"}, "Unknown load_format 'x'"),
    ("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR), "load_format": "x"}, "Unknown load_format 'x'"),
    ("/update_weights_from_disk", {"model_path": str(DRAFTER_DIR), "load_format": "dummy"}, NOTHING_LOADED),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "begin_weight_update"),
    ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "begin_weight_update"),
    ("/update_weights_from_ipc", {"zmq_handles": {}}, "checkpoint-engine is not installed"),
    ("/update_weights_from_ipc", {"zmq_handles": {}}, NOTHING_LOADED),
    ("/end_weight_update", {}, "no weight-update session is open"),
    ("/weights_checker", {"action": "x"}, "Unsupported action='x'"),
    ("/get_weights_by_name", {"name": "x"}, "failed"),
    # Sessions.
    ("/generate", {"text": "a", "session_params": {"id": 7}}, "id=7"),
    ("/generate", {"text": "a", "session_params": {"offset": "x"}}, "offset='x'"),
    ("/generate", {"text": "a", "session_params": {"x": 1}}, "Unknown session parameter 'x'"),
    ("/generate", {"text": "a", "session_params": {"id": "none"}}, "session id none does not exist"),
    ("/open_session", SESSION | {"streaming": True}, "--enable-streaming-session"),
    # Features that are off.
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, "LoRA is not enabled"),
    ("/unload_lora_adapter", {"lora_name": "a"}, "LoRA is not enabled"),
    ("/hicache/storage-backend/clear", None, ""),
    ("/pd_role_switch", {"new_role": "decode"}, "--enable-pd-role-switch"),
    ("/add_external_corpus", {"documents": ["a"]}, "Ngram"),
    ("/encode", {"text": "a"}, "--is-embedding"),
    ("/v1/embeddings", {"model": "m", "input": "a"}, "--is-embedding"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "--is-embedding"),
]


def test_what_cannot_be_served_is_refused(pair, prompts):
    expected = pair.plain.generate(prompts[2], max_new_tokens=16)
    for path, body, message in REFUSED:
        assert message in refused(pair.dflash, path, body), (path, body)
        assert_same_answers(pair.dflash.generate(prompts[2], max_new_tokens=16), expected)


def test_refusals_among_generations(pair, prompts):
    """None of these calls waits for the running requests."""
    running = [{"input_ids": prompt, "max_new_tokens": 150, "ignore_eos": True} for prompt in prompts[:6]]
    refusals = [each for each in REFUSED if "weight" not in each[0]]

    # So long that it runs on while this process waits for a core.
    stream = pair.dflash.stream(prompts[7], max_new_tokens=1200, ignore_eos=True)
    next(stream)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(pair.dflash.generate_concurrently, running)
        assert "only when server is idle" in refused(pair.dflash, "/release_memory_occupation", {})
        for path, body, message in refusals:
            assert message in refused(pair.dflash, path, body)
        assert_same_answers(answers.result(), pair.plain.generate_concurrently(running))

    expected = pair.plain.generate(prompts[7], max_new_tokens=1200, ignore_eos=True)
    assert list(stream)[-1]["output_ids"] == expected["output_ids"]


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(pair, prompts):
    """Run a failing weight update, then one that succeeds."""
    pair.dflash.post("/begin_weight_update", {})
    yield pair.dflash
    pair.dflash.flush_cache()
    pair.dflash.post("/end_weight_update", {})
    pair.dflash.post("/update_weights_from_disk", {"model_path": str(TARGET_DIR)})
    assert_undisturbed(pair, prompts)


@pytest.mark.parametrize(
    ("payloads", "options", "message", "state"),
    [
        ([], {}, "IndexError", NOTHING_LOADED),
        ([base64.b64encode(b"x").decode()], {}, "Error", NOTHING_LOADED),
        ([pickled(7)], {}, "TypeError", PARTLY_LOADED),
        ([pickled([(WEIGHT, "x")])], {}, "AttributeError", PARTLY_LOADED),
        ([pickled([(WEIGHT, 2 * TENSOR), (WEIGHT, TENSOR[1:])])], {}, "AssertionError", PARTLY_LOADED),
        ([pickled([("x", TENSOR)])], {"load_format": "direct"}, "KeyError: 'x'", PARTLY_LOADED),
        ([pickled([(WEIGHT, TENSOR)])], {"load_format": "flattened_bucket"}, "TypeError", PARTLY_LOADED),
        ([pickled([(WEIGHT, TENSOR)])], {"load_format": "x"}, "load_format 'x'", NOTHING_LOADED),
    ],
    ids=["none", "no-pickle", "no-list", "no-tensor", "shape", "name", "no-bucket", "load-format"],
)
def test_tensors_that_cannot_be_loaded(session, payloads, options, message, state):
    answer = refused(session, "/update_weights_from_tensor", {"serialized_named_tensors": payloads} | options)

    assert message in answer
    assert state in answer


def test_tensors_of_an_unknown_group(session):
    body = {"names": [WEIGHT], "dtypes": ["float32"], "shapes": [list(TENSOR.shape)], "group_name": "none"}

    assert "Group none not in" in refused(session, "/update_weights_from_distributed", body)


def test_tensors_change_the_text(session, pair, prompts):
    before = pair.dflash.generate(prompts[2], max_new_tokens=48)
    pair.dflash.flush_cache()

    body = {"serialized_named_tensors": [pickled([(WEIGHT, torch.zeros_like(TENSOR))])], "weight_version": "zeros"}
    pair.dflash.post("/update_weights_from_tensor", body)
    after = pair.dflash.generate(prompts[2], max_new_tokens=48)

    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "zeros"


@pytest.mark.parametrize("kind", ["cut", "shape"])
def test_a_checkpoint_that_cannot_be_loaded(pair, prompts, tmp_path, kind):
    """The error is found after some of the old weights have been replaced."""
    broken = tmp_path / kind
    shutil.copytree(TARGET_DIR, broken)
    file = broken / "model.safetensors"
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:100_000])
    else:
        save_file({name: t if name != WEIGHT else t[1:] for name, t in load_file(file).items()}, file)

    answer = refused(pair.dflash, "/update_weights_from_disk", {"model_path": str(broken)})
    assert PARTLY_LOADED in answer
    answer = pair.dflash.post("/update_weights_from_disk", {"model_path": str(TARGET_DIR)})

    assert answer["success"], answer["message"]
    assert_undisturbed(pair, prompts)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # Another class, whose tensors have the target's names.
        ({"architectures": ["OtherDraftModel"]}, "architectures=['OtherDraftModel']"),
        ({"architectures": None}, "architectures=None"),
        ({"architectures": 5}, "architectures=None"),
        (None, "architectures=None"),
        # Drafters, whose forward would continue with the old one's shapes.
        ({"rope_theta": 5e5}, "rope_parameters"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_a_checkpoint_of_something_else(pair, prompts, tmp_path, changes, named):
    """The tensors are a drafter's, and some have names of the target's."""
    other = tmp_path / "other"
    shutil.copytree(DRAFTER_DIR, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").unlink()
    if changes is not None:
        (other / "config.json").write_text(json.dumps(config | changes))

    answer = refused(pair.dflash, "/update_weights_from_disk", {"model_path": str(other)})

    assert named in answer
    assert_undisturbed(pair, prompts)


# --- what is served -------------------------------------------------------------------------------------------------


def test_memory_is_released_and_resumed(pair, prompts):
    for tags in ({}, {"tags": ["weights"]}, {"tags": ["kv_cache", "kv_cache"]}):
        assert call(pair.dflash, "/release_memory_occupation", tags).status_code == 200
        assert call(pair.dflash, "/resume_memory_occupation", tags).status_code == 200
        assert_undisturbed(pair, prompts)

    pair.dflash.post("/release_memory_occupation", {"tags": ["weights"]})
    assert "released already" in refused(pair.dflash, "/release_memory_occupation", {})
    assert "tags has 'kv_cache'" in refused(pair.dflash, "/resume_memory_occupation", {})
    pair.dflash.post("/resume_memory_occupation", {"tags": ["weights"]})
    # Memory is released to load new weights.
    for checkpoint in (DRAFTER_DIR, TARGET_DIR):
        pair.dflash.post("/update_weights_from_disk", {"model_path": str(checkpoint)})
    assert_undisturbed(pair, prompts)


@pytest.mark.parametrize("options", [{}, {"num_steps": 3}], ids=str)
def test_profile(pair, prompts, tmp_path, options):
    folder = tmp_path / "traces"

    pair.dflash.post("/start_profile", PROFILE | {"output_dir": str(folder)} | options)
    assert_undisturbed(pair, prompts)
    if not options:
        pair.dflash.post("/stop_profile")

    assert list(folder.glob("*.trace.json.gz"))
    assert_undisturbed(pair, prompts)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("update", [False, True], ids=["", "update"])
def test_paused_requests_go_on(pair, prompts, mode, update):
    """Requests also go on after an update with the same weights."""
    running = [{"input_ids": prompt, "max_new_tokens": 150, "ignore_eos": True} for prompt in prompts[20:24]]

    with ThreadPoolExecutor(1) as threads:
        stream = pair.dflash.stream(prompts[7], max_new_tokens=400, ignore_eos=True)
        next(stream)
        answers = threads.submit(pair.dflash.generate_concurrently, running)
        next(stream)
        pair.dflash.post("/pause_generation", {"mode": mode})
        try:
            if update:
                body = {"model_path": str(TARGET_DIR), "flush_cache": mode == "retract"}
                pair.dflash.post("/update_weights_from_disk", body)
        finally:
            pair.dflash.post("/continue_generation", {})
        chunks = list(stream)
        assert_same_answers(answers.result(), pair.plain.generate_concurrently(running))

    expected = pair.plain.generate(prompts[7], max_new_tokens=400, ignore_eos=True)
    assert chunks[-1]["output_ids"] == expected["output_ids"]


def test_pause_that_aborts(pair, prompts):
    stream = pair.dflash.stream(prompts[7], max_new_tokens=1500, ignore_eos=True)
    next(stream)

    pair.dflash.post("/pause_generation", {"mode": "abort"})
    pair.dflash.post("/continue_generation", {})

    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert_undisturbed(pair, prompts)


def test_session(pair, prompts):
    """Turns continue the first one, go back into it, and replace it."""

    def turns(server):
        server.post("/open_session", SESSION | {"session_id": "turns"})
        first = server.generate(prompts[3], max_new_tokens=40, session_params={"id": "turns"})
        rid = first["meta_info"]["id"]
        answers = [first]
        for options in ({}, {"offset": 10}, {"drop_previous_output": True}, {"replace": True}):
            params = {"id": "turns", "rid": rid} | options
            answers.append(server.generate(prompts[4][:20], max_new_tokens=40, session_params=params))
        server.post("/close_session", {"session_id": "turns"})
        return answers

    answers = pair.lossless(turns)

    assert answers[1]["meta_info"]["prompt_tokens"] > len(prompts[3]) + 20
    response = call(pair.dflash, "/generate", {"input_ids": prompts[3], "session_params": {"id": "turns"}})
    assert response.status_code == 400


def test_what_else_is_served(pair, prompts):
    expected = pair.plain.generate(prompts[2], max_new_tokens=16)
    for path, body in [
        ("/weights_checker", {}),
        ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}}),
        ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 16}}),
        ("/slow_down", {"forward_sleep_time": 0.01}),
        ("/slow_down", {"forward_sleep_time": None}),
        ("/freeze_gc", None),
        ("/flush_cache", None),
        ("/configure_logging", {"log_requests": True, "log_requests_level": 1}),
        ("/configure_logging", {"log_requests": False, "log_level": "info"}),
        ("/abort_request", {"rid": "none"}),
        ("/abort_request", {"abort_all": True}),
        ("/close_session", {"session_id": "none"}),
        ("/update_weight_version", {"new_version": "second"}),
        ("/v1/tokenize", {"model": "m", "prompt": "a"}),
        ("/v1/detokenize", {"model": "m", "tokens": [1, 2]}),
        ("/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [1]}),
    ]:
        assert call(pair.dflash, path, body).status_code == 200, path
        assert_same_answers(pair.dflash.generate(prompts[2], max_new_tokens=16), expected)
        pair.dflash.flush_cache()
    for path in ("/ping", "/model_info", "/v1/loads?include=all", "/get_hicache_l3_cache_layout", "/server_info"):
        pair.dflash.get(path)
    assert pair.dflash.post("/set_internal_state", {"server_args": {"page_size": 4}}) == [False]
