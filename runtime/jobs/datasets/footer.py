"""Walks a parquet footer in a process of its own: pyarrow's walk ends the process at some of them.

Does not know columns or rows. RowGroupMetaData.column throws a C++ exception that nothing catches
(pyarrow 26, found by scripts/fuzz.py); reading pages turns the same fault into a Python exception.
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
    """Whether every column of every row group has metadata that pyarrow can bear to look at."""
    command = [sys.executable, "-P", "-c", _WALK, str(path.absolute())]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
