"""Build the package of packaging/aur/PKGBUILD from this clone's sdist, and ask its demo.

It needs the network, and no Arch: dependencies are not looked up. TORCH_INDEX names an index that
has torch instead of download.pytorch.org. The formula is only parsed, because Homebrew cannot be
had as a package.

    apt install makepkg pacman-package-manager libarchive-tools ruby
    python -m scripts.check_recipes
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scikit_build_core import build

from scripts.recipes import PACKAGING, RECIPES, write

ROOT = Path(__file__).resolve().parents[1]
NOT_ROOT = 65534  # makepkg refuses root


def main() -> None:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist = folder / build.build_sdist(name)
        for recipe in RECIPES:
            (folder / recipe).parent.mkdir()
            shutil.copyfile(PACKAGING / recipe, folder / recipe)
        write(sdist, folder)
        subprocess.run(["ruby", "-wc", folder / "homebrew/moeinf.rb"], check=True)
        package = packed(folder, sdist)
        print(f"{package.name}: {package.stat().st_size >> 20} MiB")
        print(f"it answers {answer(package, folder)}")


def packed(folder: Path, sdist: Path) -> Path:
    """Return the package that makepkg makes, beside the PKGBUILD in folder/aur."""
    place = folder / "aur"
    shutil.move(sdist, place)  # makepkg takes it instead of fetching one
    (place / "bin").mkdir()
    (place / "bin/python").symlink_to(shutil.which("python3", path="/usr/bin") or sys.executable)
    makepkg = ["makepkg", "--nodeps", "--noconfirm"]
    if os.getuid() == 0:
        folder.chmod(0o755)
        for path in (place, *place.iterdir()):
            os.chown(path, NOT_ROOT, NOT_ROOT, follow_symlinks=False)
        ids = [f"--reuid={NOT_ROOT}", f"--regid={NOT_ROOT}", "--clear-groups"]
        makepkg = ["setpriv", *ids, *makepkg]
    own = {"HOME": str(place), "PATH": f"{place}/bin:/usr/bin:/bin", "PKGEXT": ".pkg.tar"}
    subprocess.run(makepkg, cwd=place, env={**os.environ, **own}, check=True)
    (package,) = place.glob("*.pkg.tar")
    return package


def answer(package: Path, folder: Path) -> str:
    """Return the demo's answer from the unpacked package; raise if it names where it was built."""
    root = folder / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", package, "-C", root], check=True)
    venv = root / "opt/moeinf"
    if str(folder).encode() in (venv / "bin/moeinf").read_bytes():
        raise ValueError(f"{venv}/bin/moeinf names the folder in which it was built")
    unit = root / "usr/lib/systemd/system/moeinf.service"
    if not unit.is_file() or not (root / "usr/bin/moeinf").is_symlink():
        raise ValueError(f"{package.name} lacks its unit or its command")
    environment = {"MOEINF_HOME": str(folder / "home"), "MOEINF_NO_SERVER": "1"}
    command: Sequence[str | Path] = [venv / "bin/python", venv / "bin/moeinf"]
    asked = [*command, "run", "demo", "17+25="]
    return subprocess.check_output(asked, env=environment, text=True).strip()


if __name__ == "__main__":
    main()
