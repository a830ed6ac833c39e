"""Violations, probes and snapshots as metrics of `prometheus_client`: pip install "multiassert[prometheus]".

| metric | what it counts |
|---|---|
| `multiassert_violations_total{kind, site, platform}` | violations, when the host first sees them, whatever the mode |
| `multiassert_probe_calls_total` | calls of deferred probes; what compiled and captured code does is no call |
| `multiassert_snapshots_sent_total`, `..._arrived_total` | snapshots on their way to the host, and seen there |
| `multiassert_lag_steps` | a histogram: how many steps after a snapshot's own step the host opened it |

A probe does nothing for them: they are brought up to date when a step ends and when a snapshot is sent or has arrived.
Probes that are native (`auto` on CUDA, `trap`) or immediate (`auto` on the CPU) send no snapshots, and their calls are
not counted.
They are plain counters and no collector of their own, so that they work in prometheus_client's multiprocess mode too
(PROMETHEUS_MULTIPROC_DIR): each process counts its own, and the collector of that mode adds them up. Each process then
calls export(). As for any metric in that mode, pass a registry that the mode's collector is not registered with.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from multiassert import delivery
from multiassert.violation import Violation

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

MAX_SITES = 200
OTHER = "other"  # the label of all sites beyond
LONGEST_MESSAGE = 100  # characters of a label
STEPS = (0, 1, 2, 4, 8, 16, 32, 64)


def export(registry: CollectorRegistry | None = None, *, max_sites: int = MAX_SITES) -> Export:
    """Count violations, probes and snapshots in `registry` from now on; touches no device, and costs a probe nothing.

    Without a registry it is prometheus_client's own. The label `site` is the message and file:line for the first
    `max_sites` sites that are hit, and `other` for the rest, so a storm makes no more time series than that. Returns a
    handle whose stop() takes the metrics away; where the registry has them already, it is the same one. Raises
    ImportError without prometheus_client, ValueError for `max_sites` below 0 and where the registry has other metrics
    of these names.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError('metrics need prometheus_client: pip install "multiassert[prometheus]"') from error
    if max_sites < 0:
        raise ValueError(f"max_sites must be at least 0, got {max_sites}")
    registry = prometheus_client.REGISTRY if registry is None else registry
    with delivery.locked(), _starting:
        running = next((export for export in _running if export.registry is registry), None)
        if running is None:
            running = Export(registry, max_sites)
            _running.append(running)
        return running


class Export(delivery.Observer):
    """The metrics of one registry, until they are stopped."""

    def __init__(self, registry: CollectorRegistry, max_sites: int) -> None:
        from prometheus_client import Counter, Histogram

        self.registry = registry
        self._max_sites = max_sites
        self._sites: set[str] = set()
        self._counters: dict[tuple[str, str, str], Counter] = {}
        self._pid = os.getpid()
        self._calls_counted = delivery.probe_calls()
        labels = ("kind", "site", "platform")
        seen = "Violations, when the host first sees them"
        self._violations = Counter("multiassert_violations", seen, labels, registry=None)
        self._calls = Counter("multiassert_probe_calls", "Calls of deferred probes, but in graphs", registry=None)
        self._sent = Counter("multiassert_snapshots_sent", "Snapshots on their way to the host", registry=None)
        self._arrived = Counter("multiassert_snapshots_arrived", "Snapshots that the host has opened", registry=None)
        lag = "Steps after a snapshot's own step when the host opened it"
        self._lag = Histogram("multiassert_lag_steps", lag, buckets=STEPS, registry=None)
        self._metrics = (self._violations, self._calls, self._sent, self._arrived, self._lag)
        self._register()
        self._removals = [delivery.on_violation(self), delivery.observe(self)]

    def _register(self) -> None:
        """All of them or none."""
        registered: list[Counter | Histogram] = []
        try:
            for metric in self._metrics:
                self.registry.register(metric)
                registered.append(metric)
        except ValueError:
            for metric in registered:
                self.registry.unregister(metric)
            raise

    def __call__(self, violation: Violation) -> None:
        """Count a violation."""
        labels = violation.kind, self._label(violation), violation.platform
        counter = self._counters.get(labels)
        if counter is None:
            counter = self._counters[labels] = self._violations.labels(*labels)
        counter.inc()

    def _label(self, violation: Violation) -> str:
        """What names the site; its own message, not that of the call, which may be another one each time."""
        site = violation.site
        file = "/".join(site.file.replace(os.sep, "/").split("/")[-2:])
        # Text that is no UTF-8 would make every scrape fail.
        label = f"{site.message[:LONGEST_MESSAGE]} {file}:{site.line}".strip().encode("utf-8", "replace").decode()
        if label not in self._sites:
            if len(self._sites) >= self._max_sites:
                return OTHER
            self._sites.add(label)
        return label

    def step_ended(self) -> None:
        if self._pid != os.getpid():  # a forked child counts its calls anew
            self._pid = os.getpid()
            self._calls_counted = 0
        calls = delivery.probe_calls()
        self._calls.inc(calls - self._calls_counted)
        self._calls_counted = calls

    def snapshot_sent(self) -> None:
        self._sent.inc()
        self.step_ended()

    def snapshot_arrived(self, steps: int) -> None:
        self._arrived.inc()
        self._lag.observe(steps)

    def process_ends(self) -> None:
        self.step_ended()

    def stop(self) -> None:
        """Count nothing more, and take the metrics out of the registry; touches no device. May be called again."""
        with delivery.locked(), _starting:
            if self not in _running:
                return
            _running.remove(self)
        for remove in self._removals:
            remove()
        for metric in self._metrics:
            with contextlib.suppress(KeyError):  # its owner has taken it out
                self.registry.unregister(metric)


_running: list[Export] = []
_starting = threading.Lock()
