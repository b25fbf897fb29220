"""Training by the clock, with checkpoints, and the model folder at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import corpus, evaluate, optimiser, tokens
from .model import CONFIG, TinyModel

STEP_TOKENS = 4096
PART_TOKENS = 2048
DRAFT_WEIGHT = 0.3
CHAT_SHARE = 0.18
CHATS = 8_000
CHECKPOINT_SECONDS = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one training run is told."""

    minutes: float
    data: Path
    out: Path
    scratch: Path
    seed: int
    resume: bool


class Batches:
    """Rows of prose from random places, and rows of whole chats, one length a step."""

    def __init__(self, prose: np.ndarray, chats: list[np.ndarray], *, seed: int) -> None:
        self._prose, self._chats = prose, chats
        self._random = np.random.default_rng(seed)

    def step(self) -> Iterator[Tensor]:
        """Yield the parts of one optimiser step, each (rows, length + 1)."""
        length = 1024 if self._random.random() < 0.2 else 512
        for _ in range(STEP_TOKENS // PART_TOKENS):
            rows = [self._row(length + 1) for _ in range(PART_TOKENS // length)]
            yield torch.from_numpy(np.stack(rows))

    def _row(self, length: int) -> np.ndarray:
        if self._random.random() >= CHAT_SHARE:
            start = self._random.integers(len(self._prose) - length)
            return self._prose[start : start + length]
        row = np.empty(0, dtype=np.int64)
        while len(row) < length:
            row = np.append(row, self._chats[self._random.integers(len(self._chats))])
        return row[:length]


def losses(model: TinyModel, part: Tensor) -> tuple[Tensor, Tensor]:
    """Return (next-token loss, draft loss) of one part (B, T + 1).

    The draft learns the text and, to agree with the model it drafts for, the model's own
    probabilities, half and half.
    """
    targets = part[:, 1:]
    hidden, draft = model(part[:, :-1])
    logits = model.head(hidden).flatten(0, 1)
    main = F.cross_entropy(logits, targets.flatten())
    guesses = F.log_softmax(model.head(draft), -1)
    with torch.no_grad():
        wanted = F.softmax(logits.view(*targets.shape, -1)[:, 1:], -1)
        wanted *= 0.5
        half = torch.full_like(targets[:, 1:, None], 1, dtype=wanted.dtype) * 0.5
        wanted.scatter_add_(2, targets[:, 1:, None], half)
    return main, -(wanted * guesses).sum(-1).mean()


def write_folder(model: TinyModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write config, bf16 weights and tokenizer (the chat template lies there already)."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().bfloat16().contiguous() for name, w in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": tokens.END_OF_TEXT,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


class Run:
    """One training run: model, optimisers, clock."""

    def __init__(self, settings: Settings, say: Callable[[str], None] = print) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        torch.manual_seed(settings.seed)
        self.settings, self._say = settings, say
        settings.scratch.mkdir(parents=True, exist_ok=True)
        text = corpus.read(settings.data / "train.txt.xz")
        held_out = corpus.read(settings.data / "heldout.txt.xz").replace("\f", "\n\n")[:40_000]
        self.tokenizer = tokens.train_tokenizer(text)
        template = tokens.ChatTemplate(settings.out / "chat_template.jinja")
        chats = tokens.chat_rows(self.tokenizer, template, text, seed=settings.seed, count=CHATS)
        prose = tokens.prose_stream(self.tokenizer, text)
        self._held_out = torch.tensor(self.tokenizer.encode(held_out).ids)
        self._held_out_bytes = len(held_out)
        self.model = TinyModel()
        self.optimisers = optimiser.optimisers(self.model)
        self.steps, self.seconds = 0, 0.0
        if settings.resume:
            self._load()
        self._batches = Batches(prose, chats, seed=settings.seed + self.steps)

    @property
    def _checkpoint(self) -> Path:
        return self.settings.scratch / "checkpoint.pt"

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for made, kept in zip(self.optimisers, state["optimisers"], strict=True):
            made.load_state_dict(kept)
        self.steps, self.seconds = state["steps"], state["seconds"]

    def save(self) -> None:
        """Write weights, optimisers, step and clock; the old checkpoint stays until it is done."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [made.state_dict() for made in self.optimisers],
            "steps": self.steps,
            "seconds": self.seconds,
        }
        fresh = self._checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)

    def train(self) -> None:
        """Train until the minutes are over, then write the folder."""
        whole = self.settings.minutes * 60
        saved = self.seconds
        self.model.train()
        while self.seconds < whole:
            began = time.monotonic()
            optimiser.set_rates(self.optimisers, self.seconds / whole)
            main, draft = self._step()
            if self.seconds - saved > CHECKPOINT_SECONDS:
                saved = self.seconds
                self._report()
                self.save()
            self.seconds += time.monotonic() - began
            if self.steps % 10 == 0:
                self._say(
                    f"{self.seconds:6.0f} s  step {self.steps}  loss {main:.3f}  draft {draft:.3f}"
                )
        self._report()
        self.save()
        write_folder(self.model, self.tokenizer, self.settings.out)

    def _step(self) -> tuple[float, float]:
        parts = STEP_TOKENS // PART_TOKENS
        sums = [0.0, 0.0]
        for part in self._batches.step():
            main, draft = losses(self.model, part)
            torch.autograd.backward((main + DRAFT_WEIGHT * draft) / parts)
            sums = [sums[0] + main.item() / parts, sums[1] + draft.item() / parts]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for made in self.optimisers:
            made.step()
            made.zero_grad(set_to_none=True)
        self.steps += 1
        return sums[0], sums[1]

    def _report(self) -> None:
        self.model.eval()
        bits = evaluate.bits(self.model, self._held_out) / self._held_out_bytes
        prompts = self._held_out[: 8 * 64].view(8, 64)
        rows = evaluate.generate(self.model, prompts, 24)
        agreed = evaluate.accepted(self.model, rows, 64, depth=1)[0]
        sample = self.tokenizer.decode(rows[0].tolist()[64:])
        self._say(f"held out: {bits:.4f} bits a byte, acceptance {agreed:.2f}  {sample!r}")
        self.model.train()
