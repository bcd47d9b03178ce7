"""Write the version and the hash of an sdist into the Homebrew formula and the PKGBUILD.

The sdist leaves both files out, so its hash does not depend on them.

    python scripts/recipes.py dist/moeinf-0.2.0.tar.gz
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

PACKAGING = Path(__file__).resolve().parents[1] / "packaging"
RECIPES = ("aur/PKGBUILD", "homebrew/moeinf.rb")
_NAME = re.compile(r"moeinf-(\d+\.\d+\.\d+)\.tar\.gz")


def write(sdist: Path, packaging: Path = PACKAGING) -> None:
    """Set the version and the SHA-256 of an sdist in the recipes of a folder.

    Raises ValueError for a file whose name is not that of a release's sdist.
    """
    named = _NAME.fullmatch(sdist.name)
    if named is None:
        raise ValueError(f"{sdist.name} is not moeinf-MAJOR.MINOR.PATCH.tar.gz")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    for name in RECIPES:
        path = packaging / name
        text = re.sub(r"(?<=sha256sums=\()\w{64}|(?<=sha256 \")\w{64}", digest, path.read_text())
        text = re.sub(r"(?<=^pkgver=).*", named[1], text, flags=re.MULTILINE)
        path.write_text(_NAME.sub(named[0], text))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/recipes.py SDIST")
    write(Path(sys.argv[1]))
