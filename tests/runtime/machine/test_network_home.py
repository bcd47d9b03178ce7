"""Test which mounts count as network file systems, by tables of mounts as Linux prints them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeinf.runtime.config import Settings
from moeinf.runtime.machine.diagnosis import diagnose
from moeinf.runtime.machine.network_home import SharedHome, check_replica_home, network_type

ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def mounts(folder: Path, *lines: str) -> Path:
    """Return a table of mounts with a line per (point, type), later ones above earlier ones."""
    path = folder / "proc/self/mountinfo"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ROOT + "".join(lines))
    return path


def line(point: Path, kind: str, options: str = "rw") -> str:
    where = str(point).replace(" ", "\\040")
    return f"90 22 0:52 / {where} {options} shared:9 master:2 - {kind} host:/export rw,vers=4.2\n"


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("nfs4", True), ("nfs", True), ("cifs", True), ("smb3", True), ("fuse.sshfs", True),
        ("9p", True), ("lustre", True), ("ext4", False), ("xfs", False), ("tmpfs", False),
        ("overlay", False), ("fuse.ntfs-3g", False), ("btrfs", False),
    ],
)  # fmt: skip
def test_a_home_below_a_mount(kind: str, network: bool, tmp_path: Path) -> None:
    table = mounts(tmp_path, line(tmp_path / "share", kind))
    home = tmp_path / "share/of me"  # need not exist
    (tmp_path / "share").mkdir()
    assert network_type(home, table) == (kind if network else "")
    assert network_type(tmp_path / "share2", table) == ""
    if network:
        with pytest.raises(SharedHome, match=kind):
            check_replica_home(home, table)
    else:
        check_replica_home(home, table)


def test_the_nearest_and_newest_mount_counts(tmp_path: Path) -> None:
    (tmp_path / "a b/c").mkdir(parents=True)
    outer, inner = tmp_path / "a b", tmp_path / "a b/c"
    table = mounts(tmp_path, line(outer, "nfs4"), line(inner, "xfs"))
    assert network_type(outer, table) == "nfs4"
    assert network_type(inner, table) == ""
    table = mounts(tmp_path, line(outer, "nfs4"), line(outer, "tmpfs"))
    assert network_type(outer, table) == ""


def test_a_link_to_a_share(tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "share")
    assert network_type(tmp_path / "home", mounts(tmp_path, line(tmp_path / "share", "nfs"))) == (
        "nfs"
    )


def test_a_read_only_share_serves_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = mounts(tmp_path, line(tmp_path, "nfs4", "ro"))
    monkeypatch.setattr("os.access", lambda path, _mode: path != tmp_path)  # root may write any
    check_replica_home(tmp_path, table)


def test_a_table_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert network_type(tmp_path, tmp_path / "none") == ""
    assert network_type(tmp_path, mounts(tmp_path, "damaged\n", " - nfs\n")) == ""


def test_the_doctor_tells(tmp_path: Path) -> None:
    mounts(tmp_path, line(tmp_path, "cifs"))
    settings = Settings(home=tmp_path, libcuda="libcuda-of-no-machine.so")
    (one,) = [f for f in diagnose(settings, tmp_path) if f.name == "file_system"]
    assert (one.ok, one.hint.partition("=")[0]) == (False, "export MOEINF_HOME")
    assert "cifs" in one.fact
