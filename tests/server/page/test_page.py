"""Test how the page's files are sent: to whom, with which headers, and how large they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from moeinf.server import page
from tests.server.conftest import serving

FOLDER = Path(page.__file__).parent
MOST_BYTES = 120 << 10
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
POLICY = {
    "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
    "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'",
    "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
}  # fmt: skip


def policy(found: httpx.Response) -> dict[str, str]:
    """Return the parts of an answer's Content-Security-Policy."""
    parts = found.headers["content-security-policy"].split("; ")
    return dict(part.split(" ", 1) for part in parts)


@pytest.fixture(scope="module")
def keyed(demo_home: Path) -> Iterator[str]:
    with serving(demo_home, api_key="secret") as address:
        yield address


def test_a_browser_gets_the_page_and_everyone_else_a_line(keyed: str) -> None:
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert httpx.get(keyed, headers=headers).text == "moeinf is running"
    found = httpx.get(keyed, headers=BROWSER)
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert "Accept" in found.headers["vary"].split(", ")
    assert found.text == (FOLDER / "index.html").read_text()
    assert policy(found) == POLICY
    assert httpx.head(keyed).status_code == 200
    assert not httpx.head(keyed, headers=BROWSER).content


def test_each_file_of_the_folder_is_sent_without_a_key(keyed: str) -> None:
    names = {file.name for file in FOLDER.iterdir() if file.suffix in (".html", ".css", ".js")}
    assert names == set(page._NAMES)
    for name in names:
        found = httpx.get(f"{keyed}/page/{name}")
        assert found.content == (FOLDER / name).read_bytes()
        assert policy(found) == POLICY
        assert found.headers["x-content-type-options"] == "nosniff"
    assert httpx.get(f"{keyed}/api/tags").status_code == 401


def test_a_file_that_the_browser_has_is_not_sent_again(keyed: str) -> None:
    tag = httpx.get(f"{keyed}/page/app.js").headers["etag"]
    again = httpx.get(f"{keyed}/page/app.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    other = httpx.get(f"{keyed}/page/chat.js", headers={"If-None-Match": tag})
    assert other.status_code == 200


@pytest.mark.parametrize("name", ["__init__.py", "..%2Fapp.py", "none.js", "%2e%2e", "x" * 300])
def test_no_other_file_is_sent(keyed: str, name: str) -> None:
    found = httpx.get(f"{keyed}/page/{name}")
    assert found.status_code == 404
    assert "import" not in found.text


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = [FOLDER / name for name in page._NAMES]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    for file in files:
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"""(?:src|href|from|fetch\()\s*=?\s*["']https?:""", text)
        for name in re.findall(r"""from "\./([\w.]+)""", text):
            assert name in page._NAMES
