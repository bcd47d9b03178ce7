"""Train the embedded demo (models/demo) from a seed, on exercises it makes itself.

Run: python scripts/train_demo.py            (about 100 minutes on 2 cores)
A run that was stopped goes on where it last saved. After a change of the exercises,
`--weights models/demo --steps 1800 --rate 1.2e-3` trains finished weights further. Needs the [test]
extra. The model class and the checkpoint writer are those of transformers: the result is an
ordinary Hugging Face checkpoint, independent of our code. Only the training pass over the experts
is ours, because it is faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from demo_tasks import KINDS, TALK, Item, draw, general_questions, held_out_items, unseen_wordings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

PAD, BEGIN, USER, ASSISTANT, END, SYSTEM = range(6)
SPECIAL = ["<|pad|>", "<|begin|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]
SPECIAL += [f"<|reserved_{i}|>" for i in range(len(SPECIAL), 16)]
PARTS = 2  # of a step, each computed by a thread of its own
# How often a kind is drawn: most for what is learned last.
WEIGHTS = dict.fromkeys(KINDS, 1.0) | {
    "add": 3.5, "subtract": 5.0, "sort": 5.0, "reverse": 1.5, "upper": 1.5, "weekday": 2.0,
    "brackets": 0.8, "json": 0.5, "greet": 0.5, "self": 0.7, "other": 3.5,
}  # fmt: skip
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
        self._seed = seed

    def turn(self, item: Item, *, most: int = 512) -> tuple[list[int], list[int]]:
        """Return tokens and labels of an exercise, with at most `most` tokens of its answer."""
        prompt = [USER, *self._encode(item.prompt), ASSISTANT]
        answer = [*self._encode(item.answer), END][:most]
        return prompt + answer, [-100] * len(prompt) + answer

    def row(self, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
        ids, labels = [BEGIN], [-100]
        if rng.random() < 0.05:
            system = [SYSTEM, *self._encode("You are a helpful assistant.")]
            ids, labels = ids + system, labels + [-100] * len(system)
        while True:
            kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            # An answer that is always the same teaches nothing after its first words.
            short = kind in (*TALK, "other") and rng.random() < 0.85
            turn_ids, turn_labels = self.turn(draw(kind, rng), most=9 if short else 512)
            if len(ids) + len(turn_ids) > length:
                if len(ids) > length // 2:
                    break
                continue
            ids, labels = ids + turn_ids, labels + turn_labels
        padding = length - len(ids)
        return ids + [PAD] * padding, labels + [-100] * padding

    def batch(self, step: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self._seed}:{step}")
        length = rng.choice((64, 128, 128, 128, 128, 128, 128, 128, 128, 448))
        rows = [self.row(length, rng) for _ in range(max(1, tokens // length))]
        return torch.tensor([r[0] for r in rows]), torch.tensor([r[1] for r in rows])


class _Experts(torch.autograd.Function):
    """The experts of one layer over tokens sorted by expert: matrix products only, no masks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor,
                gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:  # fmt: skip
        k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=len(gate_up)).cumsum(0).tolist()
        parts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        rows = x[order // k]
        both = rows.new_empty(len(order), gate_up.shape[1])
        for part, matrix in zip(parts, gate_up, strict=True):
            torch.mm(rows[part], matrix.T, out=both[part])
        gate, up = both.chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        out = rows.new_empty(len(order), down.shape[1])
        for part, matrix in zip(parts, down, strict=True):
            torch.mm(hidden[part], matrix.T, out=out[part])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        ctx.save_for_backward(rows, both, hidden, out, order, back, weights, gate_up, down)
        ctx.parts = parts
        return torch.bmm(weights[:, None], out[back].view(len(x), k, -1))[:, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, both, hidden, out, order, back, weights, gate_up, down = ctx.saved_tensors
        (gradient,) = gradients
        k = weights.shape[1]
        grad_rows = gradient[order // k]
        grad_weights = (grad_rows * out).sum(-1)[back].view_as(weights)
        grad_out = grad_rows.mul_(weights.flatten()[order][:, None])
        grad_hidden, grad_down = torch.empty_like(hidden), torch.empty_like(down)
        for part, matrix, result in zip(ctx.parts, down, grad_down, strict=True):
            torch.mm(grad_out[part], matrix, out=grad_hidden[part])
            torch.mm(grad_out[part].T, hidden[part], out=result)
        gate, up = both.chunk(2, -1)
        share = torch.sigmoid(gate)
        grad_both = torch.cat(
            [grad_hidden * up * share * (1 + gate * (1 - share)), grad_hidden * gate * share], -1
        )
        grad_in, grad_gate_up = torch.empty_like(rows), torch.empty_like(gate_up)
        for part, matrix, result in zip(ctx.parts, gate_up, grad_gate_up, strict=True):
            torch.mm(grad_both[part], matrix, out=grad_in[part])
            torch.mm(grad_both[part].T, rows[part], out=result)
        grad_x = grad_in[back].view(len(gradient), k, -1).sum(1)
        return grad_x, None, grad_weights, grad_gate_up, grad_down


def sorted_experts(
    self: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts for transformers: x (tokens, hidden) to the same shape."""
    return _Experts.apply(x, chosen, weights, self.gate_up_proj, self.down_proj)


ALL_EXPERTS_FUNCTIONS.register("sorted", sorted_experts)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return near-orthogonal matrices of the same row and column space: (n, rows, columns).

    Five Newton-Schulz steps, with the coefficients of Jordan et al., "Muon" (2024).
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.transpose(1, 2)


class Optimizer:
    """Muon for the matrices of attention and experts, AdamW for the rest."""

    def __init__(self, model: OlmoeForCausalLM) -> None:
        named = dict(model.named_parameters())
        wide = {n for n in named if ".experts." in n or (".self_attn." in n and "proj" in n)}
        self._matrices = {n: named[n] for n in sorted(wide)}
        self._momenta = {n: torch.zeros_like(p) for n, p in self._matrices.items()}
        rest = [p for n, p in named.items() if n not in wide]
        self._adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)
        self._all = list(named.values())

    @torch.no_grad()
    def step(self, rate: float, pool: ThreadPoolExecutor) -> None:
        torch.nn.utils.clip_grad_norm_(self._all, 1.0)
        self._adam.param_groups[0]["lr"] = rate
        self._adam.step()
        list(pool.map(lambda name: self._turn(name, rate), self._matrices))
        for parameter in self._all:
            parameter.grad = None

    def _turn(self, name: str, rate: float) -> None:
        """Update one matrix, or the matrices of one layer's experts."""
        parameter = self._matrices[name]
        with torch.no_grad():
            momentum = self._momenta[name].mul_(0.95).add_(parameter.grad)
            ahead = parameter.grad + 0.95 * momentum
            gated = name.endswith("gate_up_proj")  # two matrices in one
            columns = ahead.shape[-1]
            flat = ahead.view(-1, ahead.shape[-2] // (2 if gated else 1), columns)
            scale = 0.2 * max(flat.shape[1:]) ** 0.5  # the size of AdamW's steps
            parameter.mul_(1 - 0.02 * rate)
            parameter.sub_(orthogonal(flat).reshape(parameter.shape), alpha=rate * scale)

    def state(self) -> dict[str, Any]:
        return {"adam": self._adam.state_dict(), "momenta": self._momenta}

    def load(self, state: dict[str, Any]) -> None:
        self._adam.load_state_dict(state["adam"])
        self._momenta = state["momenta"]


@torch.no_grad()
def exact(model: OlmoeForCausalLM, rows: Rows, items: list[Item]) -> dict[str, float]:
    """Return the share of items whose every answer token is the argmax, like greedy decoding."""
    right: dict[str, list[bool]] = {}
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
        guess = model(input_ids=ids).logits.argmax(-1)[:, :-1]
        fine = ((guess == labels[:, 1:]) | (labels[:, 1:] == -100)).all(1)
        for item, ok in zip(part, fine.tolist(), strict=True):
            right.setdefault(item.kind, []).append(ok)
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
    splits = (held_out_items(per_kind=100), unseen_wordings(per_kind=40), general_questions())
    for name, items in zip(("heldout", "wordings", "questions"), splits, strict=True):
        lines = (json.dumps(dataclasses.asdict(item)) for item in items)
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))


def backward(model: OlmoeForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Add one part's share of the loss's gradients to the model's; return the loss."""
    loss = model(input_ids=ids, labels=labels).loss
    (loss / PARTS).backward()
    return loss.item()


def rate_at(step: int, steps: int, most: float) -> float:
    """Return the learning rate: up for 100 steps, level, and down to zero over the last 40 %."""
    return most * min(1.0, (step + 1) / 100, (steps - step) / (0.4 * steps))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = OlmoeForCausalLM._from_config(config(), experts_implementation="sorted")
    if options.weights:
        finished = OlmoeForCausalLM.from_pretrained(options.weights, dtype=torch.float32)
        model.load_state_dict(finished.state_dict())
    optimizer, rows = Optimizer(model), Rows(tokenizer, options.seed)
    check = {
        "items": list(held_out_items(per_kind=40, seed=2)),
        "wordings": list(unseen_wordings(per_kind=40, seed=2)),
        "questions": list(general_questions()),
    }
    first, spent = 0, 0.0
    if options.state.exists():
        saved = torch.load(options.state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load(saved["optimizer"])
        first, spent = saved["step"], saved["seconds"]
        print(f"going on after step {first}", flush=True)
    start = time.time() - spent
    # Two threads of one core each: small matrices gain little from two cores at once.
    pool = ThreadPoolExecutor(PARTS, initializer=lambda: torch.set_num_threads(1))
    for step in range(first, options.steps):
        halves = zip(*(part.chunk(PARTS) for part in rows.batch(step, options.tokens)), strict=True)
        losses = list(pool.map(lambda half: backward(model, *half), halves))
        optimizer.step(rate_at(step, options.steps, options.rate), pool)
        done = step + 1
        if done % options.every and done < options.steps:
            continue
        print(f"{done} {time.time() - start:.0f}s loss {sum(losses) / len(losses):.3f}", flush=True)
        for split, items in check.items() if done % (4 * options.every) == 0 else ():
            scores = exact(model, rows, items)
            print(f"  {split}: " + " ".join(f"{k} {v:.0%}" for k, v in scores.items()), flush=True)
        save(model, tokenizer, options.out)
        part = options.state.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state(), "step": done}
        torch.save(state | {"seconds": time.time() - start}, part)
        part.replace(options.state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).parents[1]
    parser.add_argument("--out", type=Path, default=root / "models" / "demo")
    parser.add_argument("--weights", type=Path, help="a folder whose weights to begin with")
    parser.add_argument("--state", type=Path, default=root / "build" / "demo-training.pt",
                        help="where a stopped run goes on from")  # fmt: skip
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--tokens", type=int, default=6144, help="tokens in a training step")
    parser.add_argument("--every", type=int, default=250, help="steps between two saves")
    train(parser.parse_args())
