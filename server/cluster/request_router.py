"""Route requests of Ray Serve by the ranks of offload/replicas/router.py.

Ray calls this in the process of the ingress. A replica's `record_routing_stats` (replica.py) comes
with its wrapper as `routing_stats`. Ray sends this class by value, so it has copies of this
module's names: what must exist once is in routing_counts.py. Ray's API for routers is alpha:
constraints.txt pins its version.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moeinf.offload.replicas.names import DEFAULT_ROUTER, RouterName
from moeinf.offload.replicas.route_keys import RouteKeys
from moeinf.offload.replicas.router import BAND, Candidate, Published, Reason, Router
from moeinf.server.cluster import routing_counts

_MOST_MODELS = 64
_MOST_NUMBERS = 1 << 10


class ExpertRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Choose replicas by prefix, experts and load."""

    def initialize_state(
        self, kind: RouterName = DEFAULT_ROUTER, seed: int = 0, band: int = BAND
    ) -> None:
        """Set up empty memories. Ray calls this after __init__, with request_router_kwargs."""
        self.by_model: dict[str, Router] = {}
        self._options = kind, seed, band
        self._running: Counter[str] = Counter()  # requests sent from here, by replica
        # By number, for the last requests: the first choice, or None once a replica has taken it.
        self._chosen: OrderedDict[int, tuple[str, Reason] | None] = OrderedDict()
        routing_counts.ROUTERS.add(self)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica per rank, the best first. A full one passes a request to the next."""
        keys = None if pending_request is None else pending_request.kwargs.get("keys")
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if not isinstance(keys, RouteKeys):
            return [candidate_replicas]
        candidates = [self._candidate(keys.model, replica) for replica in candidate_replicas]
        choice = self._router(keys.model).choose(keys, candidates)
        first = candidates[choice.order[0]].name, choice.reason
        if self._chosen.get(keys.number, first) is not None:
            self._chosen[keys.number] = first
        if len(self._chosen) > _MOST_NUMBERS:
            self._chosen.popitem(last=False)
        return [[candidate_replicas[place]] for place in choice.order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count what decided, and note what the replica that took the request has. Ray calls this.

        A request that is sent again after a failure counts once. Where the first choice was full,
        the load decided.
        """
        keys = pending_request.kwargs.get("keys")
        first = self._chosen.get(keys.number) if isinstance(keys, RouteKeys) else None
        if first is None:
            return
        self._chosen[keys.number] = None
        (name, reason), taken = first, replica_id.unique_id
        if name != taken and reason in ("prefix", "experts"):
            reason = "load"
        self._router(keys.model).sent(keys, taken, reason)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that is sent. Ray calls this."""
        super().on_send_request(replica_id)
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request that has ended, however it did. Ray calls this."""
        self._running[replica_id.unique_id] -= 1

    def _candidate(self, model: str, replica: RunningReplica) -> Candidate:
        name = replica.replica_id.unique_id
        stats = replica.routing_stats or {}
        published = stats.get("models", {}).get(model)
        elsewhere = self.replica_queue_len_cache.get(replica.replica_id) or 0  # by others
        return Candidate(
            name,
            max(self._running[name], elsewhere),
            published if isinstance(published, Published) else None,
            loaded=published is not None,
        )

    def _router(self, model: str) -> Router:
        """Return the router of a model's requests; a client may name any number of models."""
        if model not in self.by_model and len(self.by_model) >= _MOST_MODELS:
            model = ""
        if model not in self.by_model:
            kind, seed, band = self._options
            self.by_model[model] = Router(kind, seed, band)
        return self.by_model[model]
