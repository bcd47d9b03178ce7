"""Train the embedded demo (models/demo) from a seed, on exercises it makes itself.

Run: python scripts/train_demo.py            (about an hour on 2 cores, minutes on a GPU)
Needs the [test] extra. The model class and the checkpoint writer are those of transformers, so the
result is an ordinary Hugging Face checkpoint, independent of our code.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from demo_tasks import KINDS, Item, draw, held_out_items
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM

PAD, BEGIN, USER, ASSISTANT, END, SYSTEM = range(6)
SPECIAL = ["<|pad|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
SPECIAL += [f"<|reserved_{i}|>" for i in range(len(SPECIAL), 16)]
# Two-digit sums are learned last, so they are drawn more often than the rest.
WEIGHTS = {kind: {"add": 3.0, "subtract": 3.0}.get(kind, 1.0) for kind in KINDS}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, after 16 special tokens, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def config() -> OlmoeConfig:
    return OlmoeConfig(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
        max_position_embeddings=512,
        initializer_range=0.05,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )


class Rows:
    """Rows of equal length, packed with items as turns of a chat; labels cover answers only."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self._rng = random.Random(seed)

    def turn(self, item: Item) -> tuple[list[int], list[int]]:
        prompt = [USER, *self._encode(item.prompt), ASSISTANT]
        answer = [*self._encode(item.answer), END]
        return prompt + answer, [-100] * len(prompt) + answer

    def row(self, length: int) -> tuple[list[int], list[int]]:
        ids, labels = [BEGIN], [-100]
        if self._rng.random() < 0.05:
            system = [SYSTEM, *self._encode("You are a helpful assistant.")]
            ids, labels = ids + system, labels + [-100] * len(system)
        while True:
            kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            turn_ids, turn_labels = self.turn(draw(kind, self._rng, held_out=False))
            if len(ids) + len(turn_ids) > length:
                if len(ids) > length // 2:
                    break
                continue
            ids, labels = ids + turn_ids, labels + turn_labels
        padding = length - len(ids)
        return ids + [PAD] * padding, labels + [-100] * padding

    def batch(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        length = self._rng.choice((64, 112, 112, 112, 112, 112, 112, 112, 112, 448))
        rows = [self.row(length) for _ in range(max(1, tokens // length))]
        return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


@torch.no_grad()
def exact(model: OlmoeForCausalLM, rows: Rows, items: list[Item], device: str) -> dict[str, float]:
    """Return the share of items whose every answer token is the argmax, like greedy decoding."""
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for start in range(0, len(items), 64):
        part = items[start : start + 64]
        turns = [rows.turn(item) for item in part]
        width = 1 + max(len(ids) for ids, _ in turns)
        ids = torch.full((len(part), width), PAD)
        labels = torch.full((len(part), width), -100)
        for row, (turn_ids, turn_labels) in enumerate(turns):
            ids[row, 0] = BEGIN
            ids[row, 1 : 1 + len(turn_ids)] = torch.tensor(turn_ids)
            labels[row, 1 : 1 + len(turn_ids)] = torch.tensor(turn_labels)
        guess = model(input_ids=ids.to(device)).logits.argmax(-1).cpu()[:, :-1]
        fine = ((guess == labels[:, 1:]) | (labels[:, 1:] == -100)).all(1)
        for item, ok in zip(part, fine.tolist(), strict=True):
            right[item.kind].append(ok)
    return {kind: sum(hits) / len(hits) for kind, hits in right.items()}


def save(model: OlmoeForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint in bf16, with tokenizer, chat template and held-out exercises."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = OlmoeForCausalLM(config())
    copy.load_state_dict(model.state_dict())
    copy.config.output_router_logits = False
    copy.generation_config.do_sample = False
    copy.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    special = {"bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[END], "pad_token": SPECIAL[PAD]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}, indent=2) + "\n"
    )
    with (folder / "heldout.jsonl").open("w") as out:
        for item in held_out_items(per_kind=100):
            out.write(json.dumps(item.__dict__) + "\n")


def train(out: Path, steps: int, seed: int, device: str, tokens: int, every: int) -> None:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = OlmoeForCausalLM._from_config(config(), experts_implementation="eager").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02)
    rows, check = Rows(tokenizer, seed), list(held_out_items(per_kind=40, seed=2))
    start = time.time()
    for step in range(steps):
        warm, cool = min(1.0, (step + 1) / 100), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * warm * (0.01 + 0.99 * cool)
        ids, labels = (part.to(device) for part in rows.batch(tokens))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            scores = exact(model, rows, check, device)
            line = " ".join(f"{kind} {score:.0%}" for kind, score in scores.items())
            print(
                f"{step + 1} {time.time() - start:.0f}s loss {loss.item():.3f} | {line}", flush=True
            )
            save(model, tokenizer, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "models" / "demo")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens in a training step")
    parser.add_argument("--every", type=int, default=250, help="steps between checks and saves")
    options = parser.parse_args()
    train(options.out, options.steps, options.seed, options.device, options.tokens, options.every)
