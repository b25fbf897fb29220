"""Figures of a model folder, and the mean of two folders' weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from . import corpus, counts, evaluate, tokens
from .model import TinyModel

PROMPTS = (
    "It is a truth universally acknowledged, that",
    "Emma was not at all sorry to",
    '"My dear Miss Bennet,',
)


def load(folder: Path) -> TinyModel:
    """Return the folder's model, its bf16 weights widened to fp32."""
    model = TinyModel(json.loads((folder / "config.json").read_text("utf-8"))).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def average(folder: Path, other: Path) -> None:
    """Put the mean of both folders' weights, rounded to bf16, into `folder`."""
    mine, theirs = (load_file(f / "model.safetensors") for f in (folder, other))
    means = {name: ((w.float() + theirs[name].float()) / 2).bfloat16() for name, w in mine.items()}
    save_file(means, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def report(folder: Path, data: Path) -> str:
    """Return the figures as text; takes about a minute."""
    torch.set_num_threads(1)
    model = load(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = corpus.read(data / "heldout.txt.xz")
    chapters = [tokenizer.encode(tokens.END_OF_TEXT + part).ids for part in text.split("\f")]
    bits = sum(evaluate.bits(model, torch.tensor(chapter)) for chapter in chapters)
    counted = counts.bits_per_byte(corpus.read(data / "train.txt.xz").encode(), text.encode())
    prompts = torch.tensor([chapter[501:565] for chapter in chapters])
    rows = evaluate.generate(model, prompts, 35)
    held = evaluate.accepted(model, rows, 64, depth=3)
    lines = [
        f"bits a byte: {bits / len(text):.4f}, order-3 counts {counted:.4f}",
        "drafts held at depth 1, 2, 3: " + ", ".join(f"{share:.3f}" for share in held),
        *(_sample(model, tokenizer, prompt) for prompt in PROMPTS),
        *_chats(model, tokenizer, folder / "chat_template.jinja"),
    ]
    return "\n".join(lines)


def _sample(model: TinyModel, tokenizer: Tokenizer, prompt: str, new_tokens: int = 48) -> str:
    rows = torch.tensor([tokenizer.encode(prompt).ids])
    end = tokenizer.token_to_id("<|im_end|>")
    for _ in range(new_tokens):
        rows = evaluate.generate(model, rows, 1)
        if rows[0, -1] == end:
            break
    return repr(tokenizer.decode(rows[0].tolist(), skip_special_tokens=False))


def _chats(model: TinyModel, tokenizer: Tokenizer, path: Path) -> list[str]:
    template = tokens.ChatTemplate(path)
    messages: list[dict[str, object]] = [
        {"role": "user", "content": 'Go on: "Mr. Darcy walked to the window."'}
    ]
    thinking = template(messages, add_generation_prompt=True)
    plain = template(messages, add_generation_prompt=True, enable_thinking=False)
    calling = template(messages, add_generation_prompt=True, tools=[corpus.FIND_TEXT])
    return [_sample(model, tokenizer, prompt, 80) for prompt in (thinking, plain, calling)]
