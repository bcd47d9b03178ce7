"""Test the figures under an answer, and the settings that go with a question."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.page.asking import ask, told

KIB = 1024
SETTINGS = {
    "Temperature": ("temperature", 0.25), "Top p": ("top_p", 0.5), "Top k": ("top_k", 7),
    "Repeat penalty": ("repeat_penalty", 1.5), "Seed": ("seed", 11), "Most tokens":
    ("num_predict", 3), "Context": ("num_ctx", 64),
}  # fmt: skip


def test_what_was_read_is_what_the_server_counted(page: Any) -> None:
    """The first answer after a load reads experts from the disk."""
    bodies = list[bytes]()

    def passed_on(route: Any) -> None:
        answer = route.fetch()
        bodies.append(answer.body())
        route.fulfill(response=answer)

    page.route("**/api/chat", passed_on)
    shown = ask(page, "sort owl, fig, zebra, ant").locator(".figures").inner_text()
    last = json.loads(bodies[0].splitlines()[-1])
    speed = (last["eval_count"] - 1) / last["eval_duration"] * 1e9  # as `moeinf run --verbose`
    found = re.fullmatch(r"demo:bf16 · ([\d.]+) tokens/s · ([\d.]+) % hits · (\S+ \S+) read", shown)
    assert found, shown
    assert float(found[1]) == pytest.approx(speed, abs=0.5)
    assert float(found[2]) == pytest.approx(
        100 * last["expert_hits"] / last["expert_uses"], abs=0.051
    )
    size, unit = found[3].split()
    units = {"B": 1, "KiB": KIB, "MiB": KIB**2}
    assert float(size) * units[unit] == pytest.approx(last["expert_bytes_read"], rel=0.05)


@pytest.mark.parametrize(("tokens", "words"), [(1, ""), (2, " · 0.5 tokens/s")])
def test_the_pass_of_the_prompt_gives_the_first_token(page: Any, tokens: int, words: str) -> None:
    """Its time is that of the prompt, so that one token has no speed."""
    figures = {"eval_count": tokens, "eval_duration": 2_000_000_000}
    told(page, [{"message": {"content": "yes"}, "done": True, **figures}])
    assert ask(page, "hi").locator(".figures").inner_text() == f"demo:bf16{words}"


@pytest.mark.parametrize(
    ("read", "words"),
    [(0, "0 B read"), (1023, "1023 B read"), (3 * KIB**2, "3.0 MiB read"), (5 * KIB**3, "5.0 GiB")],
)
def test_bytes_that_were_read(page: Any, read: int, words: str) -> None:
    figures = {"eval_count": 9, "eval_duration": 2_000_000_000, "done_reason": "length"}
    experts = {"expert_uses": 8, "expert_hits": 6, "expert_bytes_read": read}
    told(page, [{"message": {"content": "yes"}, "done": True, **figures, **experts}])
    shown = ask(page, "hi").locator(".figures").inner_text()
    assert shown.startswith(f"demo:bf16 · 4.0 tokens/s · 75.0 % hits · {words}")
    assert shown.endswith("cut off at the most tokens")


def test_each_setting_goes_with_the_question_and_stays(page: Any) -> None:
    sent = list[dict[str, Any]]()

    def answered(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body='{"message": {"content": "yes"}, "done": true}\n')

    page.route("**/api/chat", answered)
    ask(page, "with the model's own")
    page.locator("details.settings summary").click()
    for label, (_, value) in SETTINGS.items():
        page.get_by_label(label).fill(f"{value}")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Answer in JSON").fill("json")
    ask(page, "all")
    page.reload()
    page.wait_for_selector("article.own")
    ask(page, "again")
    plain, *others = sent
    assert (plain["options"], "format" in plain) == ({}, False)
    assert [message["role"] for message in plain["messages"]] == ["user"]
    assert len(others) == 2
    for one in others:
        assert one["options"] == dict(SETTINGS.values())
        assert one["format"] == "json"
        assert one["messages"][0] == {"role": "system", "content": "Be brief."}
