"""Chat templates: the same text as transformers, and limits for hostile templates."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from moeinf.runtime.text.chat_template import TemplateError, TemplateWorker

MESSAGES = [{"role": "system", "content": "Be <brief> & kind."}, {"role": "user", "content": "hé"}]


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[TemplateWorker]:
    worker = TemplateWorker(request.param)
    yield worker
    worker.close()


def template(text: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("worker", [text], indirect=True, ids=["template"])


@template(
    "{{ bos_token }}{% for m in messages %}\n"
    "  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "<|{{ m.role }}|>{{ m.content | tojson }}\n"
    "{% endfor %}{{ strftime_now('%Y-%m-%d') }}"
)
def test_what_templates_may_use(worker: TemplateWorker) -> None:
    text = worker.render(MESSAGES, bos_token="<s>", now="2026-11-21T10:00:00")
    assert text == '<s><|user|>"hé"\n2026-11-21'
    assert worker.render(MESSAGES, bos_token="", now="2026-01-02") == '<|user|>"hé"\n2026-01-02'


@template("{{ raise_exception('roles must alternate') }}")
def test_a_template_that_refuses(worker: TemplateWorker) -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        worker.render(MESSAGES)


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 7 ** (10**8) }}",
        "{{ '%0999999999d' % 1 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ unclosed",
        "{{ messages.append(1) }}",
    ],
)
def test_bombs_and_escapes_end_soon_and_harm_nothing(bomb: str) -> None:
    worker = TemplateWorker(bomb)
    try:
        with pytest.raises(TemplateError):
            worker.render([])
        start = time.monotonic()
        with pytest.raises(TemplateError):  # recovered, and refuses again
            worker.render(MESSAGES)
        assert time.monotonic() - start < 25
    finally:
        worker.close()


@template("{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% endif %}fine")
def test_a_worker_that_was_killed_comes_back(worker: TemplateWorker) -> None:
    with pytest.raises(TemplateError):
        worker.render(MESSAGES)
    assert worker.render(MESSAGES[:1]) == "fine"
