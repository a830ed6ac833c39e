"""How often each of many things is told: so often in a while, and then only counted."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Hashable
from typing import Generic, TypeVar

# More keys than that within a while share one allowance, so that neither memory nor output grows with them.
KEYS_TOLD_APART = 1024

Key = TypeVar("Key", bound=Hashable)
now = time.monotonic


@dataclasses.dataclass
class _Window:
    """The while that began when a key was told first."""

    start: float
    told: int = 0
    silenced: int = 0


class Throttle(Generic[Key]):
    """Lets each key through `allowed` times in `seconds` seconds, and counts the rest. Its caller has to lock."""

    def __init__(self, allowed: int, seconds: float) -> None:
        self.allowed = allowed
        self.seconds = seconds
        # By when they began; None stands for the keys that are not told apart.
        self._windows: collections.OrderedDict[Key | None, _Window] = collections.OrderedDict()

    def admits(self, key: Key) -> bool:
        """Whether `key` may be told now; call ended() before it."""
        own: Key | None = key
        if own not in self._windows and len(self._windows) >= KEYS_TOLD_APART:
            own = None
        window = self._windows.get(own)
        if window is None:
            window = self._windows[own] = _Window(now())
        if window.told < self.allowed:
            window.told += 1
            return True
        window.silenced += 1
        return False

    def ended(self, all_of_them: bool = False) -> list[tuple[Key | None, int]]:
        """The keys that were silenced in a while that is over, and how often; each is told once.

        None stands for the keys beyond KEYS_TOLD_APART. `all_of_them` ends every while now.
        """
        if not self._windows:
            return []
        silenced = []
        limit = now() - self.seconds
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if window.start > limit and not all_of_them:
                break
            del self._windows[key]
            if window.silenced:
                silenced.append((key, window.silenced))
        return silenced
