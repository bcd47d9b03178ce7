"""What a person sees of a model in an older or a newer layout."""

import json
from pathlib import Path

from tests.cli.conftest import command_in
from tests.runtime.library.test_retile import fabricate


def test_an_older_layout_is_retiled_and_a_newer_one_refused(tmp_path: Path) -> None:
    own = command_in(tmp_path)
    assert own("pull", "demo:q4").code == 0
    folder = tmp_path / "models/demo/q4"
    fabricate(folder)
    assert own("list").out.startswith("NAME")
    first = own("run", "demo:q4", "17+25=")
    assert (first.code, first.out) == (0, "42\n"), first.err
    assert "demo:q4 has an older layout: re-tiling it, nothing is downloaded" in first.err
    assert own("verify", "demo:q4").code == 0
    assert "older layout" not in own("run", "demo:q4", "17+25=").err

    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "layout": 3}))
    newer = own("run", "demo:q4", "17+25=")
    assert newer.code == 1
    assert "Q4 layout 3 is newer than this moeinf, which knows 2" in newer.err
    assert "Update moeinf, or `moeinf rm MODEL` and `moeinf pull MODEL` again." in newer.err
