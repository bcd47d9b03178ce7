"""Check a parquet footer in a child process, because pyarrow can end the process.

RowGroupMetaData.column throws an uncaught C++ exception for some damaged footers (pyarrow 26, found
by tools/fuzz.py). When pages are read, the same fault is a Python exception.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SECONDS = 60
_WALK = """
import sys
import pyarrow.parquet
about = pyarrow.parquet.read_metadata(sys.argv[1])
for group in range(min(about.num_row_groups, 1 << 16)):
    row_group = about.row_group(group)
    for number in range(row_group.num_columns):
        row_group.column(number)
"""


def can_be_walked(path: Path) -> bool:
    """Return True if pyarrow can read the metadata of every column of every row group."""
    command = [sys.executable, "-P", "-c", _WALK, str(path.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
