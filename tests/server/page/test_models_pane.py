"""Test the pane Models: the figures of a plan, plans that overtake each other, a failed delete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import serving

SCALES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@pytest.fixture(scope="module")
def address(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, memory="40%") as found:
        yield found


@pytest.fixture
def models(page: Any, address: str) -> Any:
    page.goto(f"{address}/#models")
    page.wait_for_selector(".panes-card")
    return page


def size(words: str, count: int) -> bool:
    """Return whether these words are that many bytes, rounded to a tenth."""
    number, unit = words.split()[:2]
    return (
        abs(float(number) * SCALES[unit.rstrip(",")] - count) <= 0.0501 * SCALES[unit.rstrip(",")]
    )


def speed(words: str, tokens: float | None) -> bool:
    if tokens is None:
        return words == "–"
    return float(words.removesuffix(" tokens/s")) == pytest.approx(tokens, rel=0.006)


def test_a_plan_shows_the_figures_of_the_server(models: Any) -> None:
    page = models
    with page.expect_response("**/api/plan") as answered:
        page.get_by_role("button", name="Plan demo:bf16").click()
    plan = answered.value.json()
    shown = page.locator(".panes-card .panes-plan")
    assert shown.locator(".panes-verdict").inner_text() == plan["verdict"]
    names, values = (shown.locator(f".panes-facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
    facts = dict(zip(names, values, strict=True))
    needed, free = facts["RAM"].split(", ")
    assert size(needed, plan["needed_ram_bytes"])
    assert size(free, plan["machine"]["free_ram_bytes"])
    on_disk, free = facts["disk"].split(", ")
    assert size(on_disk, plan["disk_bytes"])
    assert size(free, plan["machine"]["free_disk_bytes"])
    (tier,) = [one for one in plan["tiers"] if one["name"] == "ram"]
    assert tier["experts"] == 76  # 40 % of 192
    count, held = facts["experts, RAM"].split(", ")
    assert count == "76"
    assert size(held, tier["bytes"])
    assert size(facts["least memory"], plan["min_memory_bytes"])
    assert size(facts["KV cache"], plan["kv_bytes"])
    assert facts["KV cache"].endswith(f"for {plan['context']} tokens")
    assert speed(facts["decoding, measured"], plan["expected_tokens_per_s"])
    assert speed(facts["decoding, bound"], plan["bound_tokens_per_s"])
    ladder = page.get_by_role("region", name="With other memory for experts").locator("tbody tr")
    assert ladder.count() == len(plan["ladder"]) == 4
    for row, rung in zip(ladder.all(), plan["ladder"], strict=True):
        memory, experts, fits, bound, measured = row.locator("th, td").all_inner_texts()
        assert size(memory, rung["memory_bytes"])
        assert (experts, fits) == (str(rung["experts_in_ram"]), "yes" if rung["fits"] else "no")
        assert speed(bound, rung["bound_tokens_per_s"])
        assert speed(measured, rung["measured_tokens_per_s"])


def test_an_older_plan_does_not_replace_a_newer_one(models: Any) -> None:
    page, held = models, list[Any]()

    def planned(route: Any) -> None:
        if route.request.post_data_json["model"] == "demo:bf16":
            held.append(route)
        else:
            route.continue_()

    page.route("**/api/plan", planned)
    plan = page.get_by_role("button", name="Plan", exact=True)
    page.get_by_label("A model to add").fill("demo:bf16")
    plan.click()
    page.wait_for_selector(".panes-state:has-text('Planning demo:bf16 …')")
    page.get_by_label("A model to add").fill("demo:f32")
    plan.click()
    page.wait_for_selector(".panes-verdict:has-text('demo:f32')")
    with page.expect_response("**/api/plan") as answered:
        held[0].continue_()
    assert answered.value.json()["verdict"].startswith("demo:bf16")
    page.wait_for_timeout(300)
    assert page.locator(".panes-verdict").all_inner_texts()[0].startswith("demo:f32")
    assert page.locator(".panes-verdict").count() == 1
    assert page.locator("#said").text_content().startswith("demo:f32")


def test_the_focus_is_on_delete_again_after_it_failed(models: Any) -> None:
    page, held = models, list[Any]()
    page.route("**/api/delete", lambda route: held.append(route))
    page.get_by_role("button", name="Delete demo:bf16").click()
    dialog = page.get_by_role("dialog")
    with page.expect_request("**/api/delete"):
        dialog.get_by_role("button", name="Delete", exact=True).click()
    page.wait_for_timeout(200)  # the browser takes the focus from a disabled button
    held[0].fulfill(status=409, json={"error": "demo:bf16 is in use", "code": "model_in_use"})
    page.wait_for_selector(".panes-bad:has-text('is in use')")
    assert page.evaluate("() => document.activeElement.ariaLabel") == "Delete demo:bf16"
