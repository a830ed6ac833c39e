"""How often the host waits for the device in calls of SGLang: with its probes off, on, and on through multiassert.

    python scripts/sglang_waits.py                       on the CPU, a simulated npu and a simulated musa device
    python scripts/sglang_waits.py --platform npu --json

The calls are SGLang's own, with values that are fine; the end of a step is counted with them. A device is simulated
with its vendor's list of operators, and waits where the vendor's source does; on the CPU the host is the device, so
there is nothing to wait for. It takes SGLang, and what tests/sglang_objects.py names. The exit code is 1 if a call
waits for a probe through multiassert.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

# The folder above this one is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import multiassert
from multiassert import simulate
from multiassert.engines import sglang as adapter
from tests import sglang_objects as objects

PLATFORMS = ("cpu", "npu", "musa")
OFF, ALONE, OURS = "probes off", "SGLang alone", "through multiassert"
# SGLang's switches, without their prefix.
ON = {"ENABLE_ASYNC_ASSERT": True, "SANITIZE_NAN_LOGITS": True, "INVARIANT_CHECK": 2}
WARN = {"SANITIZE_NAN_LOGITS": True, "INVARIANT_CHECK": 1}

Waits = dict[str, dict[str, int]]  # by call, then by who probes


def calls_on(device: torch.device) -> dict[str, tuple[dict[str, Any], Callable[[], object]]]:
    """SGLang's calls, each with the switches that turn its probes on."""
    probes: Any = sys.modules["sglang.srt.utils.async_probe"]
    invariants: Any = sys.modules["sglang.srt.utils.invariants"]
    pool, embedding = objects.pool_on(device), objects.embedding_on(device)
    guard = invariants.Invariant("in [0, 1]", invariants.Bucket.GUARD, invariants.InClosedRange(0, 1))
    ids, slots = torch.tensor([5, 6]).to(device), torch.tensor([1, 2]).to(device)
    logits = torch.rand(2, objects.VOCABULARY).to(device)
    keys = torch.rand(2, 2, 4).to(device)
    layer = types.SimpleNamespace(layer_id=0)

    def verify() -> None:
        probes.maybe_detect_nan(logits, "verify: target model logits")
        probes.maybe_detect_inf(logits, "verify: target model logits")

    return {
        "VocabParallelEmbedding.forward": (ON, functools.partial(embedding, ids)),
        "MHATokenToKVPool.set_kv_buffer": (ON, functools.partial(pool.set_kv_buffer, layer, slots, keys, keys)),
        "MHATokenToKVPool.move_kv_cache": (ON, functools.partial(pool.move_kv_cache, slots, slots)),
        "verify: NaN and Inf of logits": (ON, verify),
        "sanitize_nan_logits": (ON, lambda: probes.sanitize_nan_logits(logits, "sampler: next_token_logits")),
        "sanitize_nan_logits, warning": (WARN, lambda: probes.sanitize_nan_logits(logits, "sampler")),
        "invariants.expect, strict": (ON, functools.partial(invariants.expect, guard, logits)),
        "invariants.expect, warning": (WARN, functools.partial(invariants.expect, guard, logits)),
    }


def measure(platform: str) -> Waits:
    """Count in this process, which can simulate one device."""
    objects.prepare()
    objects.import_sglang()
    device = objects.device_of(platform)
    calls = calls_on(device)
    found: Waits = {name: {} for name in calls}
    for who in (OFF, ALONE, OURS):
        if who == OURS:
            adapter.install()
        for name, (on, call) in calls.items():
            with objects.switches(**({} if who == OFF else on)):
                found[name][who] = _waits_of(call)
    multiassert.drain()
    return found


def _waits_of(call: Callable[[], object]) -> int:
    simulator = simulate.installed()
    if simulator is None:
        call()
        multiassert.step()
        return 0
    with simulator.record() as ledger:
        call()
        multiassert.step()
    return len(ledger.waits)


def show(waits: dict[str, Waits]) -> None:
    """Print a table, with two columns for each platform."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="How often the host waits in a call of SGLang, alone and through multiassert")
    table.add_column("call", overflow="fold")
    for platform in waits:
        table.add_column(f"{platform}\nalone", justify="right")
        table.add_column("\nours", justify="right")
    for name in next(iter(waits.values())):
        counts = (counts for by_call in waits.values() for who, counts in by_call[name].items() if who != OFF)
        table.add_row(name, *map(str, counts))
    Console().print(table)


def main() -> int:
    """Count on each platform in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default=",".join(PLATFORMS), help=f"of {', '.join(PLATFORMS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    platforms = options.platform.split(",")
    if not set(platforms) <= set(PLATFORMS):
        parser.error(f"--platform: good names are {', '.join(PLATFORMS)}")
    missing = objects.missing()
    if missing:
        print(f"{missing}: pip install --no-deps sglang==0.5.23; {' '.join(objects.PACKAGES)}", file=sys.stderr)
        return 2
    if len(platforms) == 1:
        waits = {platforms[0]: measure(platforms[0])}
    else:
        waits = {}
        for platform in platforms:
            command = [sys.executable, __file__, "--json", "--platform", platform]
            waits |= json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if options.json:
        print(json.dumps(waits))
    else:
        show(waits)
    return int(any(counts[OURS] > counts[OFF] for by_call in waits.values() for counts in by_call.values()))


if __name__ == "__main__":
    sys.exit(main())
