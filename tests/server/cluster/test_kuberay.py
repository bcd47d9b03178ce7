"""Test docs/cluster/kuberay.yaml against the schema that KubeRay's operator installs.

tests/data/kuberay.json is the part of it that the manifest uses. Unknown fields are errors, as for
`kubectl apply`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[3]


def manifest() -> Any:
    return yaml.safe_load((ROOT / "docs/cluster/kuberay.yaml").read_text())


def problems(document: Any) -> list[str]:
    """Return what the schema refuses, as `place: message`."""
    schema = json.loads((ROOT / "tests/data/kuberay.json").read_text())
    found = Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


def test_the_manifest_is_a_ray_service() -> None:
    assert problems(manifest()) == []


@pytest.mark.parametrize(
    ("path", "key", "value", "named"),
    [
        ((), "replica", 2, "'replica'"),
        (("headGroupSpec",), "rayStartParams", {"num-cpus": 0}, "num-cpus"),
        (("workerGroupSpecs", 0), "replicas", "two", "replicas"),
        (("workerGroupSpecs", 0, "template", "spec", "containers", 0), "imagee", "x", "imagee"),
        (("workerGroupSpecs", 0, "template", "spec", "volumes", 0), "hostpath", {}, "hostpath"),
        (("workerGroupSpecs", 0, "template", "spec"), "containers", None, "containers"),
    ],
)
def test_a_slip_is_found(path: tuple[str | int, ...], key: str, value: object, named: str) -> None:
    document = manifest()
    place = document["spec"]["rayClusterConfig"]
    for part in path:
        place = place[part]
    place[key] = value
    assert any(named in problem for problem in problems(document))
