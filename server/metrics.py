"""`/metrics` in Prometheus' text format: vLLM's stems where it has them, and the expert cache.

Does not know requests.
"""

from __future__ import annotations

from moeinf.server.engines.model_manager import Host


def exposition(host: Host) -> str:
    """One gauge or counter per line, a label per model."""
    lines: list[str] = []

    def add(name: str, kind: str, text: str, values: list[tuple[str, float]]) -> None:
        lines.extend((f"# HELP moeinf:{name} {text}", f"# TYPE moeinf:{name} {kind}"))
        lines.extend(f"moeinf:{name}{{{labels}}} {value!r}" for labels, value in values)

    loaded = [(f'model_name="{one.manifest.model}"', one.worker) for one in host.loaded()]
    add(
        "num_requests_running",
        "gauge",
        "Requests that are answered.",
        [(label, worker.running) for label, worker in loaded],
    )
    add(
        "num_requests_waiting",
        "gauge",
        "Requests that wait for a place.",
        [(label, worker.waiting) for label, worker in loaded],
    )
    add(
        "request_success_total",
        "counter",
        "Answers that have ended.",
        [(label, worker.answers) for label, worker in loaded],
    )
    add(
        "generation_tokens_total",
        "counter",
        "Tokens decoded.",
        [(label, worker.tokens) for label, worker in loaded],
    )
    stats = [(label, w.engine.store.stats) for label, w in loaded if w.engine is not None]
    add(
        "expert_cache_hits_total",
        "counter",
        "Expert uses that found the expert in the tier.",
        [(f'{label},tier="ram"', s.decode_hits + s.prefill_hits) for label, s in stats],
    )
    add(
        "expert_cache_queries_total",
        "counter",
        "Expert uses.",
        [(label, s.decode_events + s.prefill_events) for label, s in stats],
    )
    add(
        "expert_bytes_read_total",
        "counter",
        "Bytes of experts read from disk.",
        [(label, s.bytes_read) for label, s in stats],
    )
    add(
        "expert_stall_seconds_total",
        "counter",
        "Time in which nothing but waiting was done.",
        [(label, s.stall_seconds) for label, s in stats],
    )
    return "\n".join(lines) + "\n"
