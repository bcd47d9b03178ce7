"""Find whether a folder is on a network file system, where locks may not be what they seem.

Locks of moeinf are flock(2). On NFS, Linux makes locks of the server of them, unless the mount has
`nolock` or `local_lock`. On CIFS they also stop readers, and on most FUSE file systems they end at
the machine (flock(2), nfs(5), mount.cifs(8)). The entries of running processes name processes of
one machine. So one machine at a time may write to such a home; a read-only mount serves any number.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from moeinf.errors import UnusableInput

# Types of mounts. `fuse.` and a name: of a program that speaks to another machine.
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.goofys", "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "smb3", "smbfs",
}  # fmt: skip
_MOUNTS = Path("/proc/self/mountinfo")


class SharedHome(UnusableInput, RuntimeError):
    """Machines of a cluster would write to one home on a network file system."""

    code = "shared_home"
    hint = "MOEINF_HOME on a local drive of each machine, or a mount of it with -o ro"


def network_type(folder: Path, mounts: Path = _MOUNTS) -> str:
    """Return the type of a folder's network file system, as `nfs4`; empty for a local one.

    folder: it need not exist yet. mounts: /proc/PID/mountinfo; a file that cannot be read says
    nothing.
    """
    try:
        place, text = _existing(folder).resolve(), mounts.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    found, depth = "", -1
    for line in text.splitlines():  # proc_pid_mountinfo(5)
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.partition(" ")[0]
        if len(fields) < 6:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        # The last of several mounts on one point is the one that is seen.
        if len(point.parts) >= depth and place.is_relative_to(point):
            found, depth = kind, len(point.parts)
    return found if found in _NETWORK else ""


def check_replica_home(home: Path, mounts: Path = _MOUNTS) -> None:
    """Raise SharedHome where a replica's home is on a network file system and can be written."""
    kind = network_type(home, mounts)
    if kind and os.access(_existing(home), os.W_OK):
        raise SharedHome(f"MOEINF_HOME {home} is on a network file system ({kind})")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
