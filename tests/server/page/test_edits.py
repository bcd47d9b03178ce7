"""Test that a question which is being changed outlives whatever else happens to its chat."""

from __future__ import annotations

from typing import Any

from tests.server.page.asking import ask, complete, told

YES = [{"message": {"content": "yes"}, "done": True}]


def edited(page: Any) -> Any:
    """Ask, begin to change the question, and return the field."""
    told(page, YES)
    ask(page, "one")
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Changed question")
    field.fill("one, changed")
    return field


def test_an_edit_outlives_a_question_from_the_other_field(page: Any) -> None:
    field = edited(page)
    ask(page, "two")
    page.get_by_role("button", name="Regenerate").nth(1).wait_for()
    assert field.input_value() == "one, changed"
    assert page.locator("article.own .body").all_inner_texts() == ["two"]
    with page.expect_request("**/api/chat") as asked:
        page.get_by_role("button", name="Ask again").click()
    (message,) = asked.value.post_data_json["messages"]
    assert message["content"] == "one, changed"
    complete(page)
    assert page.locator("article.own .body").all_inner_texts() == ["one, changed"]
    page.get_by_role("button", name="Earlier version").click()
    assert page.locator("article.own .body").all_inner_texts() == ["one", "two"]


def test_an_edit_that_is_left_is_there_again_and_a_cancelled_one_is_not(page: Any) -> None:
    edited(page)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Changed question")
    assert field.input_value() == "one"
    field.fill("one, again")
    ask(page, "two")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Changed question").nth(1).fill("two, changed")
    page.get_by_role("button", name="Regenerate").first.click()  # another branch
    page.wait_for_selector(".actions span:has-text('2/2')")
    complete(page)
    assert page.get_by_label("Changed question").count() == 1
    page.get_by_role("button", name="Earlier version").click()
    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Changed question").nth(1).input_value() == "two, changed"


def test_an_edit_outlives_what_another_tab_says(page: Any) -> None:
    """It is begun while this tab reads what the other has kept."""
    told(page, YES)
    ask(page, "one")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("article.own")
    told(other, YES)
    ask(other, "more")
    page.evaluate("""() => {
        document.dispatchEvent(new Event("visibilitychange"));
        [...document.querySelectorAll("article.own button")].at(-1).click(); // Edit
    }""")
    field = page.get_by_label("Changed question")
    page.wait_for_timeout(500)
    assert field.input_value() == "one"
    page.get_by_role("button", name="Cancel").click()
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("article.own:has-text('more')")
