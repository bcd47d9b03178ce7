"""Run a tool: `python -m tools VERB`; without a verb, list the verbs."""

from __future__ import annotations

import runpy
import sys

VERBS = {
    "fuzz": "mutate inputs of every reader of untrusted bytes, guided by line coverage",
    "kernels": "compile every GPU kernel for GPUs that may be absent",
    "soak": "stress a server with badly behaved clients, and watch its resources",
}


def main() -> int:
    """Run the verb that the command line names, with the other arguments."""
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb not in VERBS:
        print("usage: python -m tools VERB\n")
        for name, what in VERBS.items():
            print(f"  {name:10}{what}")
        return 0 if verb in ("", "-h", "--help") else 2
    sys.argv[:2] = [f"python -m tools {verb}"]
    runpy.run_module(f"tools.{verb}", run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
