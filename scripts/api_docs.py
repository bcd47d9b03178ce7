"""Write docs/api.md: every endpoint, its fields and their defaults, from the server's checks.

It starts no server. A test compares the file with the text written here.

    python scripts/api_docs.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.sampling.grammar_processes import COMPILE_SECONDS
from moeinf.runtime.sampling.schema_limits import (
    MOST_BYTES,
    MOST_CHAIN,
    MOST_DEPTH,
    MOST_ITEMS,
    MOST_PATTERN_CHARACTERS,
    MOST_PATTERNS,
    MOST_VALUES,
)
from moeinf.server.api.ollama_options import OF_OTHER_ENGINES, SAMPLING
from moeinf.server.app import create_app
from moeinf.server.metrics import Metrics

PATH = Path(__file__).resolve().parents[1] / "docs" / "api.md"
_BEGIN = """# The HTTP API

`python scripts/api_docs.py` writes this page from the server's own checks; do not edit it.
[server.md](server.md) says how to use the server. It listens on `127.0.0.1:11435`.

- Answers have the fields of Ollama's, OpenAI's and Anthropic's APIs. An error is
  `{"error", "code"}` under `/api`, `{"error": {"message", "type", "param", "code"}}` under `/v1`,
  and `{"type": "error", "error": {"type", "message", "details": {"error_code"}}, "request_id"}`
  under `/v1/messages`.
- A field without a default is required. A null counts as not given. [server.md](server.md) says
  which other fields are ignored or refused.
- A body has at most 8 MiB and nests at most 100 levels deep. All bodies in flight have 64 MiB
  together, beyond the first 64 KiB of each (503, `Retry-After`). Each object or list beyond the
  first 128 of a body counts as 1 KiB more.
- Numbers that JSON lacks (NaN, infinity) are refused, and are null in answers.
- `GET /openapi.json` is the whole as an OpenAPI document.
"""
_OPTIONS = """These of Ollama's `options` work: {}. These are
accepted and ignored: {}. Any other is ignored, too.

A field that a request leaves out has the value in the model's `generation_config.json`, else
transformers' default: greedy without `do_sample`, else temperature 1.0, top_k 50, top_p 1.0 and
no penalty. A model without that file samples with Ollama's defaults: temperature 0.8, top_k 40,
top_p 0.9 and a repeat_penalty of 1.1 over 64 tokens.
"""


def written() -> str:
    """Return the text of docs/api.md."""
    with tempfile.TemporaryDirectory() as home:
        app = create_app(Settings(Path(home)), ServerSettings(), EngineConfig())
    document = app.openapi()
    schemas = document.get("components", {}).get("schemas", {})
    work = _listed(("num_ctx", "num_predict", "stop", "draft_num_predict", *SAMPLING))
    parts, used = (
        [_BEGIN, _schemas(), _OPTIONS.format(work, _listed(OF_OTHER_ENGINES))],
        list[str](),
    )
    for path, verbs in sorted(document["paths"].items(), key=lambda item: _order(item[0])):
        for verb, operation in verbs.items():
            parts.append(f"## {verb.upper()} {path}\n")
            words = operation.get("description", "")
            if words:
                parts.append(" ".join(words.split()) + "\n")
            if query := _query(operation, used):
                parts.append(query)
            for name in _body(operation):
                parts.append(_table(schemas[name], used))
            if path == "/metrics":
                parts.append(_metrics(app.state.metrics))
    for name in used:  # grows during the loop
        parts.append(f"### {_title(name)}\n")
        if schemas[name].get("description"):
            parts.append(" ".join(schemas[name]["description"].split()) + "\n")
        parts.append(_table(schemas[name], used))
    return "\n".join(parts)


def _schemas() -> str:
    items = ", ".join(f"{most:,} in `{keyword}`" for keyword, most in MOST_ITEMS.items())
    return f"""A JSON schema is `format`, `response_format`, or the
`parameters` or `input_schema` of a tool that must be called.
It has at most {MOST_BYTES >> 10} KiB of text, {MOST_VALUES:,} names and values,
{MOST_DEPTH} levels, {MOST_CHAIN} definitions along `$ref`, and {MOST_PATTERNS} patterns of
{MOST_PATTERN_CHARACTERS:,} characters each; items by keyword: {items}.
One that is larger, invalid, or takes more than {COMPILE_SECONDS:g} s or too much memory is
answered 400. An answer that follows a schema has at most one space between its parts.
"""


def _metrics(metrics: Metrics) -> str:
    """Return a row per metric, from the exposition before any model is loaded."""
    lines = ["| metric | type | meaning |", "|---|---|---|"]
    texts: dict[str, str] = {}
    for line in metrics.exposition().splitlines():
        _, what, name, words = line.split(" ", 3)
        if what == "HELP":
            texts[name] = words
        else:
            lines.append(f"| `{name}` | {words} | {texts[name]} |")
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _order(path: str) -> tuple[int, str]:
    return (next((i for i, p in enumerate(("/api", "/v1")) if path.startswith(p)), 2), path)


def _query(operation: dict[str, Any], used: list[str]) -> str:
    """Return the table of the parameters in the address; empty if it has no parameter."""
    found = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
    properties = {one["name"]: one["schema"] for one in found}
    needed = [one["name"] for one in found if one["required"]]
    table = _table({"properties": properties, "required": needed}, used)
    return table.replace("| field |", "| parameter |", 1) if found else ""


def _body(operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = next(iter(content.values()), {}).get("schema", {})
    return [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []


def _table(schema: dict[str, Any], used: list[str]) -> str:
    lines = ["| field | type | default |", "|---|---|---|"]
    for name, about in schema.get("properties", {}).items():
        default = "" if name in schema.get("required", ()) else f"`{_shown(about)}`"
        lines.append(f"| `{name}` | {_type(about, used)} | {default} |")
    return "\n".join(lines) + "\n"


def _title(name: str) -> str:
    """Return the title of a schema; its module tells apart equal names, like the APIs' Message."""
    *modules, last = name.split("__")
    title = last.removeprefix("_")
    return f"{title} of {modules[-1].removesuffix('_api')}" if modules else title


def _shown(about: dict[str, Any]) -> str:
    """Return the default as JSON; an absent one is null, or a new empty object or list."""
    empty = {"object": {}, "array": []}.get(about.get("type", ""))
    return json.dumps(about.get("default", empty))


def _type(about: dict[str, Any], used: list[str]) -> str:
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        used += [name] if name not in used else []
        return f"[{_title(name)}](#{_title(name).lower().replace(' ', '-')})"
    for one in ("anyOf", "oneOf", "allOf"):
        if one in about:
            return " or ".join(dict.fromkeys(_type(choice, used) for choice in about[one]))
    if "enum" in about or "const" in about:
        values = about.get("enum", [about.get("const")])
        return ", ".join(
            f'`"{value}"`' if isinstance(value, str) else str(value) for value in values
        )
    if about.get("type") == "array":
        return f"list of {_type(about.get('items', {}), used)}"
    least, most = about.get("minimum"), about.get("maximum")
    limits = [f"≥ {least}"] * (least is not None) + [f"≤ {most}"] * (most is not None)
    kind = str(about.get("type", "anything"))
    return " ".join([kind, *limits])


if __name__ == "__main__":
    PATH.write_text(written())
