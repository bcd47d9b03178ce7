"""Test what a user sees of a model in an older or a newer layout."""

import json
from pathlib import Path

from tests.cli.conftest import command_in


def test_other_layouts_are_refused_and_a_pull_replaces_them(tmp_path: Path) -> None:
    own = command_in(tmp_path)
    assert own("pull", "demo:q4").code == 0
    manifest = tmp_path / "models/demo/q4/manifest.json"
    today = manifest.read_text()
    for layout, code, words in (
        (1, "older_model", "Q4 layout 1 is older than this moeinf, which reads 2"),
        (3, "newer_model", "Q4 layout 3 is newer than this moeinf, which reads 2"),
    ):
        manifest.write_text(json.dumps({**json.loads(today), "layout": layout}))
        refused = own("run", "demo:q4", "17+25=")
        assert refused.code == 1
        assert words in refused.err
        assert "`moeinf pull MODEL`" in refused.err
        assert "`moeinf rm MODEL`" in refused.err
        document = own("run", "demo:q4", "17+25=", "--json").out
        assert json.loads(document)["error"]["code"] == code
        assert own("list").out.startswith("NAME")
    manifest.write_text(json.dumps({**json.loads(today), "layout": 1}))
    assert own("pull", "demo:q4").code == 0
    again = own("run", "demo:q4", "17+25=")
    assert (again.code, again.out) == (0, "42\n")
    manifest.write_text(json.dumps({**json.loads(today), "layout": 1}))
    assert own("rm", "demo:q4").code == 0
    assert not manifest.exists()
