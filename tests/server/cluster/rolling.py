"""Deploy `build` twice in one Ray cluster while a client reads a stream; print what it saw.

Run by test_cluster.py, in a process of its own. MOEINF_HOME has the demo.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from http.client import HTTPResponse

import ray
from ray import serve

from moeinf.server.cluster.launch import build

PORT = 18342
BODY = {"model": "demo", "prompt": "a b c", "temperature": 0, "max_tokens": 400, "stream": True}


def ask(body: dict[str, object]) -> HTTPResponse:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=60)
    return answer


def text(data: bytes) -> str:
    """Return the text of an event stream."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def main() -> None:
    ray.init("local", include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    options = {"min_replicas": 1, "max_replicas": 2, "cpus": 0.0, "drain_s": 30.0}
    serve.run(build({**options, "ctx": 512}), name="moeinf")
    whole = text(ask(BODY).read())
    stream = ask(BODY)
    first = stream.readline()
    deploy = threading.Thread(
        target=serve.run, args=(build({**options, "ctx": 500}),), kwargs={"name": "moeinf"}
    )
    deploy.start()
    rest = stream.read()
    deploy.join()
    status = serve.status().applications["moeinf"]
    print(
        json.dumps({
            "same": text(first + rest) == whole,
            "tokens": len(whole),
            "after": text(ask(BODY).read()) == whole,
            "status": status.status,
        })
    )  # fmt: skip
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
