"""Write the software bill of materials of an installation, as CycloneDX JSON.

It needs the network: cyclonedx-bom is installed beside the environment that it describes.

    python scripts/sbom.py sbom.json            # of this interpreter's environment
    python scripts/sbom.py sbom.json PYTHON     # of another's
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TOOL = "cyclonedx-bom>=7.0"
_FORMAT = ("--spec-version", "1.6", "--output-format", "JSON", "--output-reproducible")


def main(out: Path, interpreter: str = sys.executable) -> None:
    with tempfile.TemporaryDirectory() as name:
        python = Path(name) / "bin/python"
        subprocess.run([sys.executable, "-m", "venv", name], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", _TOOL], check=True)
        described = ["--pyproject", ROOT / "pyproject.toml", "--output-file", out, interpreter]
        command = [python, "-m", "cyclonedx_py", "environment", *_FORMAT, *described]
        subprocess.run(command, check=True)
    document = json.loads(out.read_text(encoding="utf-8"))
    print(f"{out}: {len(document['components'])} packages")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python scripts/sbom.py FILE [PYTHON]")
    main(Path(sys.argv[1]), *sys.argv[2:])
