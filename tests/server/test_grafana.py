"""docs/grafana.json asks for metrics that `/metrics` has, with labels that they have."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moeinf.runtime.config import PrefixBudget
from tests.server.conftest import serving

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
ASKED = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ASKED += [one["definition"] for one in DASHBOARD["templating"]["list"] if "definition" in one]


@pytest.fixture(scope="module")
def exposed(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the labels of every sample of a server that has answered, by its name."""
    home = shutil.copytree(demo_home, tmp_path_factory.mktemp("own") / "home")  # for the KV on disk
    with serving(home, prefix=PrefixBudget(), reproducible=False) as address:
        return answered(address)


def answered(address: str) -> dict[str, set[str]]:
    body = {"model": "demo", "prompt": "17+25=", "stream": False}
    assert httpx.post(f"{address}/api/generate", json=body, timeout=60).status_code == 200
    found: dict[str, set[str]] = defaultdict(set)
    families = text_string_to_metric_families(httpx.get(f"{address}/metrics", timeout=60).text)
    for family in families:
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return dict(found)


@pytest.mark.parametrize("expression", ASKED)
def test_metrics_and_labels_exist(expression: str, exposed: dict[str, set[str]]) -> None:
    names = re.findall(r"moeinf:\w+", expression)
    assert names
    groups = re.findall(r"by \(([^)]*)\)", expression)
    labels = {label for group in groups for label in group.split(", ")}
    for name in names:
        assert labels | set(re.findall(r"(\w+)=~", expression)) <= exposed[name], name


def test_every_metric_is_shown(exposed: dict[str, set[str]]) -> None:
    shown = {name for expression in ASKED for name in re.findall(r"moeinf:\w+", expression)}
    known = {re.sub(r"_(sum|count)$", "_bucket", name) for name in exposed}
    assert {n for n in known if n.startswith("moeinf:") and not n.endswith("_created")} == shown


def test_panels_do_not_overlap() -> None:
    """And each has an id, a unit and words of its own."""
    panels = DASHBOARD["panels"]
    for key in ("id", "title", "description"):
        assert len({panel[key] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
