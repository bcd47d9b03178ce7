"""Build packaging/container/Dockerfile without a registry, run the image and ask for its health.

debootstrap makes the base image. It runs as in a container: as the image's user, with its command
and its health check, in a network of its own. Needs root, 8 GiB of disk and these packages:

    apt install buildah debootstrap iproute2
    python scripts/check_container.py [--folder FOLDER] [-- OPTIONS OF buildah build]

FOLDER keeps the Debian and the images for the next time. OPTIONS are for a network that has its
own certificates or index, for example `--build-arg TORCH_INDEX=… -v /etc/pip.conf:/etc/pip.conf`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "docker.io/library/debian:bookworm-slim"
IMAGE = "localhost/moeinf:check"
SUITE = "bookworm"
START_S = 120  # most seconds until the server is healthy


class Buildah:
    """Call buildah with its files in one folder, and without a daemon or namespaces of its own."""

    def __init__(self, folder: Path) -> None:
        """Keep images in a folder."""
        self.words = ["buildah", "--storage-driver", "vfs"]
        self.words += ["--root", str(folder / "images"), "--runroot", str(folder / "run")]

    def __call__(self, *words: str) -> str:
        """Return the output of a command; raise CalledProcessError where it fails."""
        return subprocess.check_output([*self.words, *words], text=True).strip()

    def inside(self, container: str, *words: str) -> list[str]:
        """Return the command that runs another one in a container, as its image says."""
        return [*self.words, "run", "--isolation", "chroot", container, "--", *words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("options", nargs="*", help="of buildah build, behind --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (given.folder or Path(name)).absolute()
        buildah = Buildah(folder)
        make_base(buildah, folder)
        build = ["build", "--isolation", "chroot", "--format", "docker", "--pull-never"]
        dockerfile = ROOT / "packaging/container/Dockerfile"
        command = [*buildah.words, *build, "-f", str(dockerfile), "-t", IMAGE, *given.options]
        subprocess.run([*command, str(ROOT)], check=True)
        container = buildah("from", "--pull-never", IMAGE)
        try:
            try_out(buildah, container)
        finally:
            buildah("rm", container)


def make_base(buildah: Buildah, folder: Path) -> None:
    """Make the image that the Dockerfile begins with, if it is not there yet."""
    if BASE in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        return
    root = folder / "debian"
    subprocess.run(["debootstrap", "--variant=minbase", SUITE, str(root)], check=True)
    container = buildah("from", "scratch")
    mounted = buildah("mount", container)
    subprocess.run(["cp", "-a", f"{root}/.", mounted], check=True)
    buildah("umount", container)
    buildah("commit", "--rm", container, BASE)


def try_out(buildah: Buildah, container: str) -> None:
    """Start the image's command, wait for its health check, ask the demo, and stop it."""
    config = json.loads(buildah("inspect", container))["Docker"]["config"]
    command = [*config["Entrypoint"], *config["Cmd"]]
    health = config["Healthcheck"]["Test"]
    if health[0] != "CMD":
        sys.exit(f"the health check is {health[0]}")
    holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    try:
        enter = ["nsenter", "--net", "--target", str(holder.pid)]
        time.sleep(1)  # until it has left this network
        subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)

        def run(*words: str) -> subprocess.CompletedProcess[str]:
            inside = [*enter, *buildah.inside(container, *words)]
            return subprocess.run(inside, capture_output=True, text=True)

        expect("the user", run("id", "-u").stdout.strip(), config["User"])
        expect("a compiler", run("sh", "-c", "command -v cc gcc g++ clang").stdout, "")
        if run(*health[1:]).returncode == 0:
            sys.exit("the health check passes without a server")
        server = subprocess.Popen([*enter, *buildah.inside(container, *command)])
        started = time.monotonic()
        while run(*health[1:]).returncode:
            if time.monotonic() - started > START_S or server.poll() is not None:
                sys.exit("the server does not become healthy")
            time.sleep(1)
        print(f"{' '.join(command)}: healthy after {time.monotonic() - started:.0f} s")
        expect("the answer", run("moeinf", "run", "demo", "17+25=").stdout.strip(), "42")
        run("moeinf", "stop", "--all")
        server.wait(timeout=30)
        print("moeinf stop --all: it has ended")
    finally:
        holder.kill()
        holder.wait()


def expect(what: str, found: object, wanted: object) -> None:
    """End the program where something is not as it should be; otherwise print it."""
    if found != wanted:
        sys.exit(f"{what} is {found!r}, not {wanted!r}")
    print(f"{what}: {found!r}")


if __name__ == "__main__":
    main()
