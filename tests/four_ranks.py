"""What each of four ranks runs for tests/test_ranks.py: `python -m tests.four_ranks <platform> <rank> <folder>`.

Prints one JSON object: what this rank saw in each scene.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import multiassert
from conftest import finish
from multiassert import AsyncAssertionError, SilentRankError, maybe_detect_nan, maybe_detect_oob, simulate

WORLD = 4
PATIENCE = datetime.timedelta(seconds=60)
STEPS = 8


def of_error(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    told: dict[str, Any] = {"type": type(error).__name__, "text": str(error), "cause": of_error(error.__cause__)}
    if isinstance(error, AsyncAssertionError):
        told["violations"] = [
            {
                "message": v.message,
                "rank": v.rank,
                "node": v.node,
                "device": str(v.device),
                "step": v.step,
                "rows": v.rows,
                "tag": v.tag if isinstance(v.tag, str) else None,
            }
            for v in error.violations
        ]
    if isinstance(error, SilentRankError):
        told["ranks"] = error.ranks
    return told


class Rank:
    """One rank and its device."""

    def __init__(self, platform: str, rank: int) -> None:
        self.simulator = simulate.install(platform) if platform in ("npu", "musa", "generic") else None
        self.device = torch.empty(0, device=platform).device
        self.rank = rank
        self.clean = torch.zeros(4, 8, device=self.device)
        bad = torch.zeros(4, 8)
        bad[rank, 3] = float("nan")
        self.bad = bad.to(self.device)
        self.ids = torch.zeros(4, dtype=torch.int64, device=self.device)
        self.bad_ids = torch.full((4,), 9, device=self.device)

    def iterate(
        self,
        hits: dict[tuple[int, int], str],
        group: dist.ProcessGroup | None = None,
        late: int = 0,
        tag: object = None,
    ) -> dict[str, Any]:
        """STEPS iterations of two probes; `hits` are (rank, step) and the probe that is hit there."""
        first, held = multiassert.delivery.current_step(), True
        for step in range(STEPS):
            probe = hits.get((self.rank, step))
            maybe_detect_nan(self.bad if probe == "logits" else self.clean, "logits")
            maybe_detect_oob(self.bad_ids if probe == "ids" else self.ids, 0, 4, "ids")
            if not late or step % late == late - 1:
                finish(self.device)
            try:
                multiassert.poll()
                maybe_detect_nan(self.clean, "another probe")
            except AsyncAssertionError:
                held = False
            try:
                multiassert.step(tag, group=group or dist.group.WORLD, timeout=PATIENCE)
            except AsyncAssertionError as error:
                return {"raised_at": step, "error": of_error(error), "first": first, "held": held}
        return {"raised_at": None, "first": first, "held": held}

    def scenes(self) -> dict[str, Any]:
        rank, seen = self.rank, {}
        with multiassert.override("raise"):
            seen["none"] = self.iterate({})
            seen["one"] = self.iterate({(2, 1): "logits"})
            seen["clean again"] = self.iterate({})
            seen["two"] = self.iterate({(1, 2): "logits", (3, 2): "logits"})
            seen["two places"] = self.iterate({(0, 2): "ids", (3, 2): "logits"})
            seen["two steps"] = self.iterate({(0, 2): "logits", (3, 1): "ids"})
            seen["all"] = self.iterate({(r, 0): "ids" for r in range(WORLD)})
            seen["a late device"] = self.iterate({(1, 1): "logits"}, late=4 if rank == 1 else 0)
            finish(self.device)
            seen["a tag that cannot be pickled"] = self.iterate({(0, 0): "logits"}, tag=threading.Lock())
            pair = dist.new_group([1, 3])
            if rank in (1, 3):
                seen["a group of two"] = self.iterate({(3, 0): "logits"}, pair)
            seen["clean at last"] = self.iterate({})
            if self.simulator is not None:
                with self.simulator.no_sync():
                    maybe_detect_nan(self.clean, "logits")
                    multiassert.step(group=dist.group.WORLD, timeout=PATIENCE)
                seen["host waits"] = 0  # else no_sync() had raised
            maybe_detect_nan(self.bad if rank == 1 else self.clean, "at the end")
            seen["raise_if_error"] = of_error(caught(self.raise_if_error))
            seen["raise_if_error, none"] = of_error(caught(self.raise_if_error))
        with multiassert.override("warn"):
            seen["warn"] = self.iterate({(2, 1): "logits"})
            seen["warn, drained"] = [v.message for v in multiassert.drain()]
            maybe_detect_nan(self.bad if rank == 3 else self.clean, "in mode warn")
            seen["warn, raise_if_error"] = of_error(caught(self.raise_if_error))
        return seen

    def raise_if_error(self) -> None:
        multiassert.raise_if_error(group=dist.group.WORLD, timeout=PATIENCE)

    def scenes_of_silence(self, folder: str) -> dict[str, Any]:
        """Rank 3 hangs, and later rank 2 dies."""
        soon, seen = datetime.timedelta(seconds=8), {}
        others = dist.new_group([0, 1, 2])
        dist.barrier()
        with multiassert.override("raise"):
            if self.rank == 3:
                while not os.path.exists(f"{folder}/done"):
                    time.sleep(0.1)
                os._exit(0)
            maybe_detect_nan(self.bad if self.rank == 0 else self.clean, "before the silence")

            def steps(group: Any) -> Callable[[], None]:
                def run() -> None:
                    for _ in range(3):
                        multiassert.step(group=group, timeout=soon)

                return run

            began = time.monotonic()
            seen["hangs"] = of_error(caught(steps(dist.group.WORLD)))
            seen["hangs, asked again"] = of_error(caught(steps(dist.group.WORLD)))
            seen["seconds"] = time.monotonic() - began
            if self.rank == 2:
                os._exit(0)
            seen["dies"] = of_error(caught(steps(others)))
        return seen


def caught(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def main(platform: str, rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=datetime.timedelta(minutes=3)
    )
    this = Rank(platform, rank)
    seen = this.scenes()
    if platform == "cpu":
        with open(f"{folder}/{rank}", "w") as file:
            json.dump(seen, file)
        seen |= this.scenes_of_silence(folder)
    with open(f"{folder}/{rank}", "w") as file:
        json.dump(seen, file)
    if platform == "cpu":
        os._exit(0)  # what the silent ranks should have joined would be waited for
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
