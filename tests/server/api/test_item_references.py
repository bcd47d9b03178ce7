"""Test input items that only refer to stored ones, which Vercel's AI SDK sends by default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moeinf.server.api.responses import store
from tests.server.api.test_responses import TOOLS, create
from tests.server.api.test_tools import CALL, THOUGHT
from tests.server.scripted import Script

USER = {"role": "user", "content": [{"type": "input_text", "text": "1+2"}]}


@pytest.fixture
def client(chatml: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatml}/v1", api_key="any", max_retries=0) as found:
        yield found


def called(client: openai.OpenAI, script: Script) -> Any:
    """Return a response of a thought and a call."""
    script.say(THOUGHT + CALL)
    return create(client, [USER], tools=TOOLS)


def step(first: Any) -> list[Any]:
    """Return the conversation after the call: its items by reference, and the call's result."""
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    return [USER, *({"type": "item_reference", "id": item.id} for item in first.output), result]


def test_a_conversation_goes_on_by_references(client: openai.OpenAI, script: Script) -> None:
    first = called(client, script)
    script.say("It is 3.")
    second = create(client, step(first), tools=TOOLS)
    said = f"<|user|>1+2<|assistant|>add a:1 b:2tool {first.output[-1].call_id}3<|assistant|>"
    assert script.prompts[-1].endswith(said)
    counted = client.responses.input_tokens.count(model="demo", input=step(first), tools=TOOLS)
    assert counted.input_tokens == second.usage.input_tokens
    items = list(client.responses.input_items.list(second.id, order="asc"))
    kinds = ["message", "reasoning", "function_call", "function_call_output"]
    assert [item.type for item in items] == kinds
    assert items[2].id == first.output[-1].id
    third: list[Any] = [{"id": second.output[0].id}, {"role": "user", "content": "And?"}]
    (*_, last) = create(client, third, stream=True)  # a reference may be an id alone
    assert last.type == "response.completed"
    assert script.prompts[-1].endswith("<|assistant|>It is 3.<|user|>And?<|assistant|>")


def test_a_name_of_the_function_ends_its_arguments(client: openai.OpenAI, script: Script) -> None:
    script.say(CALL)
    events = list(create(client, [USER], tools=TOOLS, stream=True))
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert (done.to_dict()["name"], done.arguments) == ("add", '{"a": 1, "b": 2}')


def test_items_go_with_the_last_response_that_has_them(
    client: openai.OpenAI, script: Script
) -> None:
    first = called(client, script)
    script.say("It is 3.")
    second = create(client, step(first), tools=TOOLS)
    client.responses.delete(second.id)
    assert create(client, step(first), tools=TOOLS, store=False).output_text == "It is 3."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response has the item 'rs_") as lost:
        create(client, step(first), tools=TOOLS)
    assert lost.value.code == "response_not_found"
    hidden = create(client, "x", store=False)
    with pytest.raises(openai.NotFoundError, match="'msg_"):
        create(client, [{"type": "item_reference", "id": hidden.output[0].id}])


def test_ids_that_clients_chose_stay_in_their_conversation(
    client: openai.OpenAI, script: Script
) -> None:
    """Another client may choose the same id, or that of an answer's item."""
    script.say("One.")
    first = create(client, [{**USER, "id": "msg_1"}])
    script.say("Two.")
    mine = {"role": "user", "content": "evil", "id": "msg_1"}
    create(client, [mine, {**mine, "role": "assistant", "id": first.output[0].id}])
    refer: Any = {"type": "item_reference", "id": "msg_1"}
    with pytest.raises(openai.NotFoundError, match="no stored response has the item 'msg_1'"):
        create(client, [refer])
    with pytest.raises(openai.NotFoundError, match="no stored response has the item 'msg_1'"):
        client.responses.input_tokens.count(model="demo", input=[refer])
    script.say("Three.")
    create(client, [refer], previous_response_id=first.id)
    assert script.prompts[-1].endswith("<|user|>1+2<|assistant|>One.<|user|>1+2<|assistant|>")
    answer: Any = {"type": "item_reference", "id": first.output[0].id}
    script.say("Four.")
    create(client, [USER, answer, USER])
    assert script.prompts[-1].endswith("<|user|>1+2<|assistant|>One.<|user|>1+2<|assistant|>")


def test_an_item_without_an_id_gets_one_that_can_be_named(
    client: openai.OpenAI, script: Script
) -> None:
    script.say("One.")
    first = create(client, [USER])
    (item,) = client.responses.input_items.list(first.id)
    script.say("Two.")
    assert create(client, [{"id": item.id}]).output_text == "Two."
    assert script.prompts[-1].endswith("<|user|>1+2<|assistant|>")


def test_a_chosen_id_may_not_hide_behind_an_item_of_the_server(
    client: openai.OpenAI, script: Script
) -> None:
    """The look-up of one item reads others of its response, which are not found by it."""
    script.say("One.")
    first = create(client, [{"role": "user", "content": "evil", "id": "msg_1"}])
    both: Any = [{"id": first.output[0].id}, {"id": "msg_1"}]
    with pytest.raises(openai.NotFoundError, match="'msg_1'"):
        create(client, both)


def test_the_places_of_items_leave_with_their_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_RESPONSES", 2)
    kept = store.ResponseStore()
    for number in range(5):
        item = {"id": "same", "type": "reasoning"}
        other = {"id": f"rs_{number}", "type": "reasoning"}
        document = {"id": f"resp_{number}", "previous_response_id": None, "output": [item, other]}
        kept.put(f"resp_{number}", store.Stored.of(document, [item], ["same"]))
    assert kept._places == {"same": ["resp_3", "resp_4"], "rs_3": ["resp_3"], "rs_4": ["resp_4"]}
    kept.delete("resp_4")
    kept.delete("resp_3")
    assert (kept._places, kept.held_bytes, len(kept)) == ({}, 0, 0)
