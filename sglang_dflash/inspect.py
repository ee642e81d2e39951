"""Report on a DFlash checkpoint and everything that does not fit its target: `python -m sglang_dflash.inspect`.

It reads `config.json` and the headers of the safetensors files, by path or by name on the Hugging Face hub. It needs no
GPU, loads no weights and starts no engine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

import torch

from sglang_dflash.checkpoint import formats
from sglang_dflash.checkpoint.config import DEFAULT_CANDIDATES, DFlashConfig, TargetFacts, check_checkpoint_path
from sglang_dflash.checkpoint.draft_memory import DraftMemory
from sglang_dflash.checkpoint.mask_embedding import FILE, read_mask_embedding
from sglang_dflash.checkpoint.tensors import (
    check_quantized_layers,
    part_tensors,
    quantized_shapes,
    read_headers,
    tensor_problems,
    weight_bytes,
)
from sglang_dflash.errors import ConfigError


@dataclass(frozen=True)
class Inspection:
    """Result for a target and a drafter.

    Attributes:
        drafter: the drafter's config; None if it cannot be understood.
        dtype: dtype in the drafter's config. The drafter is served in the target's dtype.
        mismatches: one sentence each. Empty if the drafter can be served with the target.
        has_mask_embedding: whether the drafter has its own embedding of the mask token.
    """

    drafter: DFlashConfig | None = None
    dtype: torch.dtype | None = None
    mismatches: list[str] = field(default_factory=list)
    has_mask_embedding: bool = False

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token, of all layers in `dtype`. `--kv-cache-dtype` can change the dtype."""
        return self.drafter.kv_bytes_per_token(self.dtype.itemsize)

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of the weights of each optional part, in `dtype`."""
        return {
            name: sum(map(math.prod, tensors.values())) * self.dtype.itemsize
            for name, tensors in part_tensors(self.drafter).items()
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are loaded: float8 where the checkpoint has it, else in `dtype`."""
        return weight_bytes(self.drafter, self.dtype.itemsize)

    @property
    def cycle_memory(self) -> DraftMemory:
        """Memory of one request's drafts with the checkpoint's block size in `dtype`, on one GPU."""
        return DraftMemory.of(self.drafter, self.drafter.block_size, DEFAULT_CANDIDATES, self.dtype.itemsize)

    def to_dict(self) -> dict:
        """Return the JSON object of `--json`."""
        if self.drafter is None:
            return {"drafter": None, "mismatches": self.mismatches}
        drafter = asdict(self.drafter) | {
            "window": self.drafter.window,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        return {
            "drafter": drafter,
            "weight_bytes": self.weight_bytes,
            "part_bytes": self.part_bytes,
            "has_mask_embedding": self.has_mask_embedding,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "cycle_bytes_per_request": asdict(self.cycle_memory),
            "mismatches": self.mismatches,
        }

    def lines(self) -> Iterable[str]:
        """Yield the lines of the plain-text report."""
        if self.drafter is not None:
            yield from _describe(self.drafter)
            yield f"weights          {self.weight_bytes} bytes, loaded in {str(self.dtype).removeprefix('torch.')}"
            if self.drafter.quantization is not None:
                num_layers = len(quantized_shapes(self.drafter))
                yield f"quantisation     {self.drafter.quantization}; {num_layers} linear layers"
            for name, part in (("convolutions", self.drafter.conv), ("pairs", self.drafter.pairs)):
                if part is not None:
                    yield f"{name:<17}{part}; {self.part_bytes[name]} bytes"
            if self.has_mask_embedding:
                yield f"mask embedding   its own ({FILE})"
            in_dtype = f"{self.kv_bytes_per_token} bytes in {str(self.dtype).removeprefix('torch.')}"
            yield f"KV per token     {in_dtype}, {self.drafter.kv_bytes_per_token(itemsize=1)} in fp8"
            parts = ", ".join(f"{name} {size}" for name, size in asdict(self.cycle_memory).items() if size)
            yield f"cycle memory     per request, in bytes: {parts}"
        yield f"mismatches       {len(self.mismatches) or 'none'}"
        for mismatch in self.mismatches:
            yield f"  {mismatch}"


def inspect_pair(target_path: str, drafter_path: str) -> Inspection:
    """Read both checkpoints and collect every mismatch instead of raising at the first."""
    try:
        target = TargetFacts.from_dict(_read_config("TARGET", target_path), target_path)
        drafter, dtype = read_drafter(drafter_path)
    except ConfigError as error:
        return Inspection(mismatches=[" ".join(str(error).split())])
    mismatches = drafter.mismatches(target)
    try:
        check_quantized_layers(drafter, tp_size=1)
        problems = tensor_problems(drafter, read_headers(drafter_path))
        mismatches += [f"tensor of {drafter_path}: {problem}" for problem in problems]
    except ConfigError as error:
        mismatches.append(str(error))
    has_mask_embedding = False
    try:
        has_mask_embedding = read_mask_embedding(drafter) is not None
    except ConfigError as error:
        mismatches.append(str(error))
    return Inspection(drafter, dtype or torch.get_default_dtype(), mismatches, has_mask_embedding)


def read_drafter(path: str) -> tuple[DFlashConfig, torch.dtype | None]:
    """Return a checkpoint's config and the dtype in it.

    Raises:
        ConfigError: the config cannot be read, is not a DFlash drafter's, or is inconsistent.
    """
    check_checkpoint_path(path)
    raw = _read_config("DRAFTER", path)
    formats.refuse_others(raw, path)
    hf_config = formats.to_qwen3_config(raw, path)
    return DFlashConfig.from_dict(hf_config.to_dict(), path), hf_config.dtype


def _read_config(name: str, path: str) -> dict:
    try:
        raw = formats.read_config(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {path} cannot be read: {' '.join(str(error).split())}") from error
    if not raw:
        raise ConfigError(f"{name} {path} cannot be read: it has no config.json.")
    return raw


def _describe(drafter: DFlashConfig) -> Iterable[str]:
    own_vocabulary = f", of which it drafts {drafter.draft_vocab_size}" if drafter.draft_vocab_size else ""
    heads = f"{drafter.num_attention_heads} heads, {drafter.num_key_value_heads} KV heads of {drafter.head_dim}"
    yield f"drafter          {drafter.path}"
    yield f"format           {drafter.format}"
    yield f"block size       {drafter.block_size}"
    predicts = "predicts the first draft" if drafter.predicts_from_anchor else "predicts nothing"
    num_rows = drafter.draft_rows(drafter.block_size)
    yield f"rows             {num_rows}, of which the first, the bonus token's, {predicts}"
    yield f"vocabulary       {drafter.vocab_size} tokens{own_vocabulary}; mask token {drafter.mask_token_id}"
    yield f"target layers    {', '.join(map(str, drafter.target_layer_ids))} (their outputs, from 0)"
    yield f"attention        {heads}{', bias' if drafter.attention_bias else ''}; {drafter.rope_type} RoPE"
    yield f"layers           {len(drafter.layers)}"
    for i, layer in enumerate(drafter.layers):
        yield f"  {i:<15}{layer}"


def main(arguments: list[str] | None = None) -> int:
    """Print the report. Return 1 if anything does not fit, else 0."""
    parser = argparse.ArgumentParser(prog="python -m sglang_dflash.inspect", description=__doc__.split("\n")[0])
    parser.add_argument("target", metavar="TARGET", help="path or name of the target")
    parser.add_argument("drafter", metavar="DRAFTER", help="path or name of the DFlash checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    inspection = inspect_pair(options.target, options.drafter)
    print(json.dumps(inspection.to_dict(), indent=2) if options.json else "\n".join(inspection.lines()))
    return 1 if inspection.mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
