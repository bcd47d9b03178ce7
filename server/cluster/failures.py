"""Define the errors of a cluster. Does not import Ray."""

from __future__ import annotations

from moeinf.errors import Unavailable


class NoCluster(Unavailable, RuntimeError):
    """Ray could not start, or its address does not answer."""

    code = "no_cluster"
    hint = "`ray status`, or `moeinf serve` without --cluster"


class ReplicaLost(Unavailable, RuntimeError):
    """A replica has ended before its answer was complete."""

    code = "replica_lost"
    hint = "the same request again, or `moeinf serve --retry`"
