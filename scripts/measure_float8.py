"""Measure what float8 weights cost a drafter: tokens per cycle of the same prompts with and without them.

    PYTHONPATH=.:tests python3 scripts/measure_float8.py --target work/smollm2-135m-instruct --drafter \
        models/smollm2/drafter --prompts models/smollm2/prompts.json --device cpu --out work/float8.md

OUT.md has a row per variant: weights that are quantised as they are loaded, and checkpoints that are written here, in
which `fc` has float8 weights too. Answers are greedy, so they are the same in every row.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from safetensors.torch import load_file, save_file
from support.quantized import compressed_config, linear_layers, quantize
from transformers import AutoTokenizer

FLAG = "--speculative-draft-model-quantization fp8"


def write_checkpoint(drafter: Path, scales: str, path: Path) -> Path:
    """Write a drafter with float8 weights, one scale per tensor or channel, and dynamic scales of inputs."""
    weights = load_file(drafter / "model.safetensors")
    quantized, _ = quantize(weights, linear_layers(weights), scales)
    config = json.loads((drafter / "config.json").read_text())
    inputs = {"dynamic": True, "strategy": "token"}
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": compressed_config(scales, inputs, [])})
    )
    save_file({name: tensor.contiguous() for name, tensor in quantized.items()}, path / "model.safetensors")
    return path


def serve(arguments: dict, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
    """Return the answer and the tokens per cycle of every prompt."""
    import sglang

    engine = sglang.Engine(**arguments)
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    # The first token is the prefill's.
    rates = [(num_tokens - 1) / answer["meta_info"]["spec_verify_ct"] for answer in answers]
    engine.shutdown()
    return [answer["output_ids"] for answer in answers], rates


def mean(values: list[float]) -> str:
    """Return a mean with its standard error."""
    return f"{statistics.mean(values):.3f} ({statistics.stdev(values) / len(values) ** 0.5:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--target", "--drafter", "--prompts", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    chats = [
        [{"role": "user", "content": text}]
        for text in json.loads(options.prompts.read_text())["chat"][: options.num_prompts]
    ]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    common = {
        "model_path": str(options.target),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(options.drafter),
        "speculative_eagle_topk": 1,
        "max_running_requests": 8,
        "max_total_tokens": 8192,
        "device": options.device,
    }
    if options.device == "cpu":
        common |= {"attention_backend": "torch_native", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {
            f"checkpoint, a scale per {scales}": write_checkpoint(options.drafter, scales, Path(folder, scales))
            for scales in ("channel", "tensor")
        }
        variants = {"unquantised": {}, FLAG: {"speculative_draft_model_quantization": "fp8"}}
        variants |= {name: {"speculative_draft_model_path": str(path)} for name, path in checkpoints.items()}
        measured = {}
        for name, arguments in variants.items():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
                measured[name] = processes.submit(serve, common | arguments, prompts, options.new_tokens).result()
            print(name, mean(measured[name][1]), flush=True)
    texts, base = measured["unquantised"]
    lines = ["| drafter's weights | tokens per cycle | over unquantised | same texts |", "|---|---|---|---|"]
    for name, (answers, rates) in measured.items():
        ratios = [rate / before for rate, before in zip(rates, base, strict=True)]
        same = sum(answer == text for answer, text in zip(answers, texts, strict=True))
        lines.append(f"| {name} | {mean(rates)} | {mean(ratios)} | {same} of {len(texts)} |")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
