"""Test Harmony from end to end: pull a tiny gpt-oss that has learned one answer, and ask it.

The tests compare the two streams that a user sees, not the output of a parser.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as _Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from moeinf.runtime.config import Settings
from moeinf.runtime.library.library import Library
from moeinf.runtime.text.tokenizer import Tokenizer, end_tokens
from scripts.make_checkpoint import byte_tokenizer
from tests.cli.conftest import Command, command_in

RETURN, CALL, END_OF_TEXT = "<|return|>", "<|call|>", "<|endoftext|>"
MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>"]
MARKS += [RETURN, CALL, END_OF_TEXT]
TEMPLATE = """{%- if messages[0].role == 'system' -%}
    {%- set rules, turns = messages[0].content, messages[1:] -%}
{%- else -%}
    {%- set rules, turns = '', messages -%}
{%- endif -%}
<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if rules %}<|start|>developer<|message|># Instructions {{ rules }}<|end|>{% endif -%}
{%- for turn in turns -%}
    {%- if turn.role == 'assistant' -%}
        {%- if '<|channel|>' in turn.content %}{{ raise_exception('marks') }}{% endif -%}
        {{- '<|start|>assistant<|channel|>final<|message|>' + turn.content + '<|end|>' }}
    {%- else -%}
        {{- '<|start|>' + turn.role + '<|message|>' + turn.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
ASKED = {"role": "user", "content": "6*7?"}
STEPS, ENOUGH = 300, 0.01  # steps of training at most; the loss at which it ends
THOUGHT, SAID = "6 sevens.", "It is <42>."
ANSWER = (
    f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{SAID}{RETURN}"
)


def rendered(messages: list[dict[str, str]]) -> str:
    """Render a conversation with transformers."""
    texts, _ = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, add_generation_prompt=True
    )
    return str(texts[0])


def save_tokenizer(folder: Path) -> _Tokenizer:
    """Save a byte tokenizer with the marks of Harmony as special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"eos_token": RETURN, "pad_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


@pytest.fixture(scope="module")
def moeinf_with_harmony(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """Pull the model `tiny` from a checkpoint like the hub's; return the command and its home."""
    folder, home = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("home")
    tokenizer = save_tokenizer(folder)
    config = transformers.GptOssConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=20,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        eos_token_id=tokenizer.token_to_id(RETURN),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation="eager", attn_implementation="eager"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with tiny matrices, several threads mostly wait
    learn(model, tokenizer.encode(rendered([ASKED])).ids, tokenizer.encode(ANSWER).ids)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    ends = [tokenizer.token_to_id(mark) for mark in (RETURN, END_OF_TEXT, CALL)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    moeinf = command_in(home)
    pulled = moeinf("pull", str(folder), "--name", "tiny:bf16")
    assert pulled.code == 0, pulled.err
    return moeinf, home


def learn(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> None:
    """Train until each token of the answer is nearly certain after those before it."""
    ids = torch.tensor([prompt + answer])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < ENOUGH:
            return
    raise AssertionError(f"not learned: {loss.item()}")


def test_thinking_is_apart_from_the_answer(moeinf_with_harmony: tuple[Command, Path]) -> None:
    moeinf, _ = moeinf_with_harmony
    found = moeinf("run", "tiny:bf16", ASKED["content"], "--temperature", "0")
    assert (found.code, found.out.strip()) == (0, SAID)
    assert THOUGHT in found.err
    assert "<|" not in found.out + found.err
    hidden = moeinf("run", "tiny:bf16", ASKED["content"], "--temperature", "0", "--hidethinking")
    assert hidden.out.strip() == SAID
    assert THOUGHT not in hidden.err


def test_the_document_has_both(moeinf_with_harmony: tuple[Command, Path]) -> None:
    moeinf, _ = moeinf_with_harmony
    found = json.loads(
        moeinf("run", "tiny:bf16", ASKED["content"], "--temperature", "0", "--json").out
    )
    assert (found["thinking"], found["text"]) == (THOUGHT, SAID)


def test_every_end_of_harmony_is_one(moeinf_with_harmony: tuple[Command, Path]) -> None:
    folder = Library(Settings(moeinf_with_harmony[1])).read("tiny:bf16")[1]
    tokenizer = Tokenizer(folder)
    ends = {tokenizer.token_id(mark) for mark in (RETURN, CALL, END_OF_TEXT)}
    assert end_tokens(folder, tokenizer) == ends  # <|end|> ends a message, not the answer
