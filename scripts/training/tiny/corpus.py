"""Corpus stage: the Python standard library as a token stream, with a tokenizer, held-out modules and prompts."""

import ast
import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm

from training.files import write_json
from training.tiny.settings import EOS_ID, EOS_TOKEN, MASK_TOKEN, MAX_POSITIONS, Settings

# Modules that are never trained on: of medium size, and the same set in Python 3.11 and 3.12.
HELD_OUT_MODULES = (
    "cmd", "configparser", "csv", "difflib", "fractions", "heapq",
    "queue", "sched", "shlex", "textwrap", "wave", "zipapp",
)  # fmt: skip

# Tests, third-party code, generated tables, and modules that one of the two Python versions lacks.
EXCLUDED_DIRS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data",
    "lib2to3", "turtledemo", "msilib", "distutils", "ensurepip", "_pyrepl",
}  # fmt: skip
EXCLUDED_PREFIXES = ("_sysconfigdata", "html/entities", "config-", "sitecustomize", "this.py")

# Qwen2's pattern. AutoTokenizer may rebuild a qwen3 tokenizer with it, so this tokenizer uses it too.
PRETOKENIZE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The target continues code, so a conversation is the text of its messages in order.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 20, 200


def run(settings: Settings) -> None:
    """Write the tokenizer, `work/train_tokens.pt` and `work/held_out_tokens.pt`."""
    train_sources, held_out_sources = read_stdlib(settings.max_files)
    tokenizer = train_tokenizer(train_sources, settings.vocab_size)
    save_tokenizer(tokenizer, settings.target_dir)
    for source in held_out_sources:
        if tokenizer.decode(tokenizer.encode(source).ids, skip_special_tokens=False) != source:
            raise AssertionError("the tokenizer does not give a held-out module back unchanged")

    write_tokens(tokenizer, train_sources, held_out_sources, settings)


def run_for_target(settings: Settings) -> None:
    """Write the same tokens by the tokenizer of a target that is there."""
    tokenizer = Tokenizer.from_file(str(settings.target_dir / "tokenizer.json"))
    write_tokens(tokenizer, *read_stdlib(settings.max_files), settings)


def write_tokens(
    tokenizer: Tokenizer, train_sources: list[str], held_out_sources: list[str], settings: Settings
) -> None:
    """Write `work/train_tokens.pt` and `work/held_out_tokens.pt`."""
    documents = [doc for source in train_sources for doc in [source, *definitions(source)]]
    random.Random(settings.seed).shuffle(documents)
    train_tokens = token_stream(tokenizer, documents)
    held_out_tokens = token_stream(tokenizer, held_out_sources)
    torch.save(train_tokens, settings.work / "train_tokens.pt")
    torch.save(held_out_tokens, settings.work / "held_out_tokens.pt")
    print(
        f"corpus: {len(train_sources)} files, {len(documents)} documents, "
        f"{len(train_tokens):,} train tokens, {len(held_out_tokens):,} held-out tokens"
    )


def run_prompts(settings: Settings) -> None:
    """Write `out/prompts.json`."""
    _, held_out_sources = read_stdlib(settings.max_files)
    tokenizer = Tokenizer.from_file(str(settings.target_dir / "tokenizer.json"))
    prompts = cut_prompts(held_out_sources, tokenizer, settings.seed)
    write_json(settings.out / "prompts.json", prompts)
    print(f"{len(prompts)} prompts")


def read_stdlib(max_files: int | None) -> tuple[list[str], list[str]]:
    """Return the sources of the standard library, sorted by path: training files, and held-out modules."""
    root = Path(sysconfig.get_path("stdlib"))
    train_sources, held_out_sources = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED_DIRS & set(name.parts) or name.as_posix().startswith(EXCLUDED_PREFIXES):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        is_held_out = len(name.parts) == 1 and name.stem in HELD_OUT_MODULES
        (held_out_sources if is_held_out else train_sources).append(source)
    if len(held_out_sources) != len(HELD_OUT_MODULES):
        raise FileNotFoundError(f"{root} holds {len(held_out_sources)} of the {len(HELD_OUT_MODULES)} held-out modules")
    return train_sources[:max_files], held_out_sources


def definitions(source: str) -> list[str]:
    """Return the top-level functions and classes of a module: short documents, from which the target learns EOS."""
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    lines = source.splitlines(keepends=True)
    return ["".join(lines[first_line(node) : node.end_lineno]) for node in nodes if isinstance(node, kinds)]


def first_line(node: ast.stmt) -> int:
    """Return the index of a statement's first line, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def train_tokenizer(sources: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer. The special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and a `tokenizer_config.json` that transformers 4 and 5 read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TOKEN,
        "model_max_length": MAX_POSITIONS,
        "pad_token": EOS_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", config)


def token_stream(tokenizer: Tokenizer, documents: list[str], batch: int = 256) -> Tensor:
    """Return all documents, each followed by EOS: [total tokens] int16."""
    ids: list[int] = []
    for start in tqdm(range(0, len(documents), batch), desc="tokenize", mininterval=2):
        for encoding in tokenizer.encode_batch(documents[start : start + batch]):
            ids += [*encoding.ids, EOS_ID]
    return torch.tensor(ids, dtype=torch.int16)


def cut_prompts(sources: list[str], tokenizer: Tokenizer, seed: int, per_module: int = 5) -> list[str]:
    """Return prompts of 20 to 200 tokens. Each starts with a function, class or method of a held-out module."""
    rng = random.Random(seed)
    prompts = []
    for source in sources:
        lines = source.splitlines(keepends=True)
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        starts = sorted(first_line(node) for node in nodes)
        rng.shuffle(starts)
        for start in starts[:per_module]:
            encoding = tokenizer.encode("".join(lines[start:]))
            end = rng.randint(MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
            prompt = tokenizer.decode(encoding.ids[:end], skip_special_tokens=False)
            # A prompt that is cut inside a word may be tokenised differently, so the text's own tokens are counted.
            if MIN_PROMPT_TOKENS <= len(tokenizer.encode(prompt).ids) <= MAX_PROMPT_TOKENS and "\ufffd" not in prompt:
                prompts.append(prompt)
    return prompts
