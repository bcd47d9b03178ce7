"""The server of python -m tools soak, in a process of its own.

Run: python -m tools.soak.server HOME. Prints its port, then every few seconds the resources that
it holds, as JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from moeinf.runtime.config import EngineConfig, ServerSettings, Settings
from moeinf.runtime.sizes import parse_memory
from moeinf.server.serve import make_server

_EVERY_S = 5.0


def serve(home: Path) -> None:
    """Serve until SIGTERM."""
    about = ServerSettings(port=0, parallel=4, max_queue=12, keep_alive_s=60.0)
    config = EngineConfig(memory=parse_memory("50%"), parallel=4, reproducible=True)
    server = make_server(Settings(home), about, config)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
    host = server.config.app.state.host  # type: ignore[union-attr]
    loops: list[asyncio.AbstractEventLoop] = []

    def held() -> dict[str, Any]:
        workers = [one.worker for one in host.loaded()]
        stores = [w.engine.store for w in workers if w.engine is not None]
        tasks = len(asyncio.all_tasks(loops[0])) if loops else 0
        return {
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
            "descriptors": sum(not _is_shard(fd) for fd in Path("/proc/self/fd").iterdir()),
            "threads": sum(1 for _ in Path("/proc/self/task").iterdir()) - _pooled(),
            "children": _descendants("self"),
            "tasks": tasks,
            "requests": sum(w.running + w.waiting for w in workers),
            "busy": sum(not store.idle for store in stores),
            "models": len(workers),
        }

    def report() -> None:
        while True:
            time.sleep(_EVERY_S)
            with suppress(RuntimeError, OSError):  # a set changes while it is counted
                print(json.dumps(held()), flush=True)

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([sock])

    threading.Thread(target=report, daemon=True).start()
    asyncio.run(run())


def _descendants(pid: str) -> int:
    """Return the number of a process's children, their children and so on."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    return len(children) + sum(map(_descendants, children))


def _pooled() -> int:
    """Return the threads of pools: these grow to their bound as they are needed, and stay."""
    pools = ("asyncio_", "AnyIO worker thread", "prefix_")
    return sum(thread.name.startswith(pools) for thread in threading.enumerate())


def _is_shard(descriptor: Path) -> bool:
    """Return True for a shard: shards stay open up to a bound, so their number varies."""
    try:
        return str(descriptor.readlink()).endswith(".safetensors")
    except OSError:  # closed since the folder was listed, as all shards are at an unload
        return True


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
