"""Let many peers do to one server whatever they can, and check every byte and everything that was taken.

``python -m soak`` from ``tests/``, or ``make soak``. SOAK_SECONDS (120), SOAK_PEERS (200) and SOAK_SEED (a random one,
which is printed) change it; the same seed gives every peer the same plan, though not the same timing.
"""

from __future__ import annotations

import os
import secrets
import sys

from .plan import Settings
from .run import Failed, soak


def main() -> int:
    """Run it as the environment says."""
    settings = Settings(
        seed=int(os.environ.get("SOAK_SEED") or secrets.randbits(32)),
        seconds=float(os.environ.get("SOAK_SECONDS") or 120),
        peers=int(os.environ.get("SOAK_PEERS") or 200),
    )
    again = f"SOAK_SEED={settings.seed} SOAK_SECONDS={settings.seconds:g} SOAK_PEERS={settings.peers}"
    print(
        f"soak: {settings.peers} peers for {settings.seconds:g} s; the same plan again: make soak {again}", flush=True
    )
    try:
        print(soak(settings))
    except Failed as why:
        print(f"the soak has FAILED ({again}): {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
