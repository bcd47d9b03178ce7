"""Names of the routers, for the command line. Imports nothing, so that it starts fast."""

from __future__ import annotations

from typing import Literal, get_args

RouterName = Literal["random", "session", "prefix", "experts"]
ROUTERS: tuple[RouterName, ...] = get_args(RouterName)
DEFAULT_ROUTER: RouterName = "prefix"
