"""Test that torch, imported as the console script does it, builds every family without data."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.tiny import TINY, published_config

_BUILD = """
import gc, inspect, json, sys
search = inspect.getmodule
from moeinf.cli import torch_finder
torch_finder.install()
from moeinf.models.families import FAMILIES
from moeinf.runtime.checkpoints.inventory import WantedParts

tensors = {}
for name, family, config in json.load(sys.stdin):
    parts = WantedParts()
    FAMILIES[family].build(FAMILIES[family].parse(config), parts)
    tensors[name] = len(parts.shapes)
left_out = [sys.modules[name] for name in torch_finder.LEFT_OUT]
print(json.dumps({
    "tensors": tensors,
    "found": [module.__file__ for module in left_out],
    "names": [sorted(set(vars(module)) - set(vars(json)) - {"__warningregistry__"})
              for module in left_out],
    "frozen": gc.get_freeze_count(),
    "collects": gc.isenabled(),
    "searches": inspect.getmodule is search,
}))
"""


def test_every_family_is_built() -> None:
    given = [(name, tiny.family, published_config(name)) for name, tiny in TINY.items()]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _BUILD],
        input=json.dumps(given), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["tensors"].keys() == TINY.keys()
    assert min(found["tensors"].values()) > 2
    assert all(path.endswith("_meta_registrations.py") for path in found["found"])  # torch has them
    assert found["names"] == [[], []]  # and they are not run
    assert found["frozen"] > 100_000
    assert found["collects"]
    assert found["searches"]
