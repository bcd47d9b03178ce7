"""The page that browsers see at `/`: static files of this package, sent as they are.

They come without an API key, since they tell nothing. The page asks for the key and sends it with
each request. Its policy allows scripts, styles and connections of this server only.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from moeinf.server.http.refusals import UnknownPath

router = APIRouter()
INDEX = "index.html"
_KINDS = {"css": "text/css", "html": "text/html", "js": "text/javascript"}
_NAMES = (
    INDEX, "app.js", "ask.js", "branches.js", "charts.js", "chat.js", "experts.js", "heatmap.js",
    "history.js", "markdown.js", "models.js", "page.css", "panes.css", "parts.js", "plan.js",
    "shell.js", "storage.js",
)  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/page/{name}", include_in_schema=False)
def file(name: str, request: Request) -> Response:
    """Return a file of the page."""
    return answer(name, request)


def wanted(request: Request) -> bool:
    """Return whether the client is a browser, which names HTML among what it accepts."""
    return "text/html" in request.headers.get("accept", "").lower()


def answer(name: str, request: Request) -> Response:
    """Return a file, or 304 where the client has it. Raises UnknownPath."""
    if name not in _NAMES:
        raise UnknownPath(f"/page/{name[:80]} is not a file of the page")
    body = files(__package__).joinpath(name).read_bytes()
    headers = _HEADERS | {"ETag": f'"{sha256(body).hexdigest()[:32]}"'}
    if name == INDEX:
        headers["Vary"] = "Accept"
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(body, media_type=f"{kind}; charset=utf-8", headers=headers)
