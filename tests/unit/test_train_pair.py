"""Training of drafters (scripts/train_pair.py): every stage at tiny sizes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_pair
from safetensors.torch import save_file
from support.oracle.decode import dflash_generate
from support.oracle.drafter import ReferenceDrafter
from support.smollm2 import CONTEXT, FEED_FORWARD, HEADS, HIDDEN, KV_HEADS, LAYERS, TOKENS, write_gguf
from training import smollm2, smollm2_dflash2
from training.blocks import draft_blocks
from training.cycles import draft_kinds
from training.loop import TrainSettings
from training.smollm2 import evaluation
from training.smollm2.conversations import template_tokens
from training.smollm2.decoder import Rows
from training.smollm2.drafter import new_drafter
from training.smollm2.llama import Llama
from training.smollm2.settings import DRAFTER_CONFIG, TURN_END_ID, Settings
from training.smollm2_dflash2.settings import DFlash2Settings, with_parts
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
LAYER_IDS = [0, 1]
SMALL_DRAFTER = DRAFTER_CONFIG | {
    "block_size": 8,
    "dflash_config": {"mask_token_id": 16, "target_layer_ids": LAYER_IDS},
    "head_dim": HIDDEN // HEADS,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_target_layers": LAYERS,
    "vocab_size": len(TOKENS),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    write_gguf(folder / "model.gguf")
    settings = Settings(folder, folder / "pair", folder / "report", "cpu", 0, folder / "model.gguf", None)
    settings.shrink_for_smoke()
    settings.length, settings.generation_seconds, settings.generation_batch = 200, 0.1, 16
    settings.drafter = TrainSettings(60, 60.0, 5e-3, 4, 0.05, 60)
    settings.out.mkdir()
    settings.report.mkdir()
    return settings


@pytest.fixture(scope="module")
def trained(settings):
    """Return the settings of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_DRAFTER.items():
            patch.setitem(DRAFTER_CONFIG, name, value)
        train_pair.run_stages(smollm2.STAGES, "all", settings)
    return settings


@pytest.fixture(scope="module")
def target(trained):
    """Return transformers' model of the target."""
    return AutoModelForCausalLM.from_pretrained(trained.target_dir, dtype=torch.float32).eval()


def test_features_are_hidden_states(trained, target):
    tokens = torch.randint(len(TOKENS), (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = target(tokens, output_hidden_states=True).hidden_states

    features = Llama(trained.target_dir, "cpu").features(tokens, LAYER_IDS)

    torch.testing.assert_close(features, torch.cat([states[i + 1] for i in LAYER_IDS], dim=-1), atol=1e-4, rtol=1e-4)


def test_rows_grow_as_by_transformers(trained, target):
    """Rows of prompts of different lengths are continued greedily."""
    rows = Rows(Llama(trained.target_dir, "cpu"), 2, 60)
    prompts = torch.randint(17, len(TOKENS), (2, 30), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate((30, 11)):
        rows.tokens[row, :length] = prompts[row, :length]
        rows.given[row, :length] = True
    rows.start(11)
    for _ in range(60 - 11):
        rows.step(lambda logits: logits.argmax(-1))

    for row, length in enumerate((30, 11)):
        prompt = prompts[row : row + 1, :length]
        options = {"do_sample": False, "max_new_tokens": 60 - length, "eos_token_id": None}
        expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert rows.tokens[row].tolist() == expected[0].tolist()


def test_answers_are_the_targets(trained, target):
    """Tokens marked as an answer follow the template's start of an answer. Where greedy, they are the target's."""
    generated = torch.load(trained.work / "generated_0.pt", weights_only=True)
    tokens, is_answer = generated["tokens"].long(), generated["is_answer"]
    opening, (to_answer, _) = template_tokens(AutoTokenizer.from_pretrained(trained.target_dir))
    assert tokens.shape == (trained.generation_batch, trained.length)
    assert is_answer.any(1).all() and not is_answer[:, : len(opening)].any()
    with torch.no_grad():
        logits = target(tokens).logits
    choices = logits.argmax(-1)
    best = generated["best"].long()
    # Both implementations round in their own way, and two tokens may be almost equally good.
    short_of_best = logits.max(-1).values[:, :-1] - logits[:, :-1].gather(-1, best[:, 1:, None])[..., 0]
    assert short_of_best[is_answer[:, 1:]].max() < 1e-4
    is_greedy = generated["temperatures"] == 0
    assert is_greedy.any() and not is_greedy.all()
    greedy = is_answer[is_greedy][:, 1:]
    assert torch.equal(tokens[is_greedy][:, 1:][greedy], choices[is_greedy][:, :-1][greedy])
    for row, marked in zip(tokens.tolist(), is_answer.tolist()):
        assert row[: len(opening)] == opening
        for i in range(1, len(row)):
            if marked[i] and not marked[i - 1]:
                assert row[i - len(to_answer) : i] == to_answer
            if marked[i - 1] and not marked[i]:
                assert row[i] == TURN_END_ID or row[i - 1] == TURN_END_ID


def test_measured_cycles_are_those_of_the_batch_1_algorithm(trained, target):
    measured = check_cycles(trained, target, trained.drafter_dir, ("code", "maths", "long"))
    assert max(measured) > 1


def check_cycles(settings, target, drafter_dir, kinds):
    """Compare `eval.json` with cycles that are run one by one. Return the tokens that chains commit."""
    tokenizer = AutoTokenizer.from_pretrained(settings.target_dir)
    drafter = ReferenceDrafter.from_pretrained(drafter_dir, torch.float32)
    prompts = json.loads((settings.work / "eval_prompts.json").read_text())
    measured = json.loads((settings.report / "eval.json").read_text())
    assert set(measured) >= set(kinds)
    lengths = []
    for kind in kinds:
        message = [{"role": "user", "content": prompts[kind][0]}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = torch.tensor(tokenizer.encode(chat))
        output = dflash_generate(target, drafter, prompt, settings.eval_tokens, stop_token_ids=(TURN_END_ID,))

        result = measured[kind]["greedy"]
        assert result["tokens"] == len(output.tokens) - 1
        assert result["cycles"] == len(output.accept_lengths)
        lengths += output.accept_lengths
        for way in draft_kinds(evaluation.TREES, is_sampled=False):
            # No server leaves copies out, and no drafter with pairs has other numbers of candidates.
            is_served = way.has_copies and (drafter.pairs is None or way.num_candidates == drafter.pairs.num_candidates)
            if not is_served:
                continue
            tokens_per_cycle, _ = result["of_kinds"][way.name]
            sizes = {"num_nodes": way.num_nodes, "num_candidates": way.num_candidates}
            output = dflash_generate(
                target, drafter, prompt, settings.eval_tokens, stop_token_ids=(TURN_END_ID,), **sizes
            )
            assert tokens_per_cycle == pytest.approx(result["tokens"] / len(output.accept_lengths), abs=1e-3)
    return lengths


@pytest.fixture(scope="module")
def with_parts_and_control(trained, tmp_path_factory):
    """Return the settings of a run that continues the trained drafter, with convolutions and a selector and without."""
    work = tmp_path_factory.mktemp("dflash2")
    shutil.copytree(trained.target_dir, work / "target")
    shutil.copy(trained.work / "generated_0.pt", work)
    settings = DFlash2Settings(work, work / "pair", work / "report", "cpu", 0, trained.source, trained.drafter_dir)
    settings.shrink_for_smoke()
    settings.length, settings.drafter = trained.length, TrainSettings(20, 60.0, 5e-3, 4, 0.05, 20, muon=True)
    settings.drafter_config, settings.control_config = with_parts(SMALL_DRAFTER), SMALL_DRAFTER
    settings.control_init = trained.drafter_dir
    settings.out.mkdir()
    settings.report.mkdir()
    for stage in ("drafter", "control", "eval"):
        train_pair.run_stages(smollm2_dflash2.STAGES, stage, settings)
    return settings


def test_parts_begin_as_the_drafter_before(trained):
    """Convolutions are the identity and pairs have no score, so the rows are those of the drafter without them."""
    before = ReferenceDrafter.from_pretrained(trained.drafter_dir)
    embedding = torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(len(LAYER_IDS) * HIDDEN)
    drafter = new_drafter(with_parts(SMALL_DRAFTER), trained.drafter_dir, embedding, ones, trained)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(len(TOKENS), (2, 30), generator=generator)
    features = torch.randn(2, 30, len(ones), generator=generator)
    anchors = torch.tensor([[3, 9], [12, 20]])

    rows, expected = (draft_blocks(model, embedding, features, tokens, anchors) for model in (drafter, before))

    assert torch.equal(rows, expected)
    assert not drafter.pairs(tokens, torch.randn(2, 30, HIDDEN), tokens[..., None]).any()


def test_drafter_that_lacks_tensors_is_no_beginning(trained, tmp_path):
    save_file({"fc.weight": torch.zeros(HIDDEN, len(LAYER_IDS) * HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is no beginning of this drafter: .*norm\.weight"):
        new_drafter(SMALL_DRAFTER, tmp_path, torch.zeros(len(TOKENS), HIDDEN), torch.ones(2 * HIDDEN), trained)


def test_drafter_with_parts_continues_another(with_parts_and_control, trained, target):
    settings = with_parts_and_control
    drafter = ReferenceDrafter.from_pretrained(settings.drafter_dir)
    conv, selector = drafter.layers[0].attention_conv, drafter.candidate_selector
    for learned in (conv.kernel_projection.weight, conv.base_kernel[:, 1], selector.successor_codebook):
        assert learned.any()
    control = ReferenceDrafter.from_pretrained(settings.control_dir)
    assert control.pairs is None
    check_cycles(settings, target, settings.drafter_dir, ("code", "maths", "quoting"))

    # What the training wrote is what a training continues from.
    embedding = Llama(settings.target_dir, "cpu").embedding
    ones = torch.ones(len(LAYER_IDS) * HIDDEN)
    again = new_drafter(with_parts(SMALL_DRAFTER), settings.drafter_dir, embedding, ones, settings)
    for name, tensor in again.candidate_selector.checkpoint().items():
        torch.testing.assert_close(tensor, selector.get_parameter(name), atol=2e-2, rtol=2e-2)


def test_evaluation_compares_with_the_control(with_parts_and_control):
    settings = with_parts_and_control
    results = json.loads((settings.report / "eval.json").read_text())
    assert set(results) == {"chat", "code", "maths", "chat and code and maths", "quoting"}
    for of_sampling in results["chat and code and maths"].values():
        own, control = of_sampling["cycles_of_prompts"], of_sampling["control"]["cycles_of_prompts"]
        # Both draft for the same texts.
        assert of_sampling["tokens_of_prompts"] == of_sampling["control"]["tokens_of_prompts"]
        assert len(of_sampling["tokens_of_prompts"]) <= 3
        for name, cycles in own.items():
            assert of_sampling["over_control"][name][0] == pytest.approx(sum(control[name]) / sum(cycles), abs=1e-3)
    written = (settings.report / "eval.md").read_text()
    assert "| chat and code and maths | t1 |" in written and "The drafter over the control." in written


def test_what_is_done_is_not_done_again(trained):
    drafter = trained.drafter_dir / "model.safetensors"
    written = drafter.stat().st_mtime_ns
    train_pair.run_stages(smollm2.STAGES, "all", trained)
    assert drafter.stat().st_mtime_ns == written


@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_pair_whose_target_is_trained(name, tmp_path):
    """The training runs from the command line."""
    command = [sys.executable, ROOT / "scripts/train_pair.py", "--pair", name, "--device", "cpu", "--smoke"]
    command += ["--out", tmp_path / "pair", "--work", tmp_path / "work"]
    command += ["--target-steps", "4", "--drafter-steps", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)

    assert run.returncode == 0, run.stderr[-4000:]
    summary = json.loads((tmp_path / "work/report/summary.json").read_text())
    assert summary
    AutoModelForCausalLM.from_pretrained(tmp_path / "pair/target")
    ReferenceDrafter.from_pretrained(tmp_path / "pair/drafter")

    # Another run must not continue in its folder.
    other = subprocess.run([*command, "--seed", "1"], capture_output=True, text=True, timeout=100)
    assert other.returncode == 2
    assert f"--work {tmp_path / 'work'}: is of a run of " in other.stderr and "'seed': 1" in other.stderr


def test_drafter_for_a_target_that_is_there(tmp_path):
    """A drafter with convolutions and a selector is trained from the identity, and written for the shipped target."""
    command = [sys.executable, ROOT / "scripts/train_pair.py", "--pair", "tiny_dflash2", "--device", "cpu", "--smoke"]
    command += ["--out", tmp_path / "pair", "--work", tmp_path / "work", "--drafter-steps", "12"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)

    assert run.returncode == 0, run.stderr[-4000:]
    drafter = ReferenceDrafter.from_pretrained(tmp_path / "pair/drafter")
    conv, selector = drafter.layers[0].attention_conv, drafter.candidate_selector
    for trained in (conv.kernel_projection.weight, selector.successor_codebook, conv.base_kernel[:, 1]):
        assert trained.any()
    assert (conv.base_kernel[:, 0] - 1).abs().max() < 0.1
    assert (tmp_path / "pair/drafter/model.safetensors").stat().st_size < 1100 * 1000
    measured = json.loads((tmp_path / "work/eval.json").read_text())
    # Without copies only the drafter's own tokens are accepted.
    of_kinds = measured["tokens_per_cycle"]["greedy"]["of_kinds"]
    tokens_per_cycle, _ = of_kinds["tree of 16, 16 candidates, without copies"]
    assert tokens_per_cycle > 1.05
    assert "| code of held-out modules | t1 |" in (tmp_path / "work/eval.md").read_text()
