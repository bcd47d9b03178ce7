"""Count what the routers of this process decided, and show their replicas' metrics.

Does not import Ray: a router is anything with `by_model` and `curr_replicas`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ROUTERS: WeakSet[Any] = WeakSet()


class RoutingCounts(Collector):
    """The routers' counts, and every replica's last metrics with its name."""

    def collect(self) -> Iterator[Metric]:
        """Yield a family per metric."""
        found = CounterMetricFamily(
            "moeinf:router_decisions",
            "Requests by what chose their replica: prefix, experts, load, session or random.",
            labels=["model_name", "rank"],
        )
        for (model, reason), count in sorted(_decisions().items()):
            found.add_metric([model, reason], count)
        yield found
        families: dict[str, Metric] = {}
        for replica, text in sorted(_replica_metrics().items()):
            for family in text_string_to_metric_families(text):
                kept = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    kept.add_sample(sample.name, labels, sample.value)
        yield from families.values()


def _decisions() -> Counter[tuple[str, str]]:
    """Return how many requests each rank decided, by (model, rank)."""
    total: Counter[tuple[str, str]] = Counter()
    for router in list(ROUTERS):
        for model, one in list(router.by_model.items()):
            for reason, count in list(one.decisions.items()):
                total[model, reason] += count
    return total


def _replica_metrics() -> dict[str, str]:
    """Return the last published metrics of each replica, as text, by its name."""
    return {
        replica.replica_id.unique_id: (replica.routing_stats or {}).get("metrics", "")
        for router in list(ROUTERS)
        for replica in list(router.curr_replicas.values())
    }
