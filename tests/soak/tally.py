"""What is counted, and how a program of the soak tells the one that started it."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["Tally", "await_word", "tell", "tell_failure", "until"]

_lock = threading.Lock()


class Tally(Counter[str]):
    """Figures by name, such as ``op write`` or ``bytes write``."""

    def op(self, kind: str, size: int = 0, count: int = 1) -> None:
        """Count an operation that went well."""
        self[f"op {kind}"] += count
        self[f"bytes {kind}"] += size

    def expected(self, error: BaseException, where: str) -> None:
        """Count an error that belongs there."""
        self[f"error {type(error).__name__} ({where})"] += 1


def tell(event: str, **facts: Any) -> None:
    """Say one thing to the program that started this one."""
    with _lock:
        print(json.dumps({"event": event, **facts}), flush=True)


def tell_failure(error: BaseException, where: str) -> None:
    """Say that the soak has failed, and where."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    tell("failure", where=where, trace=trace)


def await_word(word: str) -> None:
    """Wait until the program that started this one says a word; leave if it is gone."""
    for line in sys.stdin:
        if line.strip() == word:
            return
    sys.exit(f"nobody says {word!r} any more")


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so, but not for ever; say whether it is."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return condition()
        time.sleep(0.02)
    return True
