"""All ranks of a group raise at the same step, name the first cause, and do not wait for ever for a silent one."""

from __future__ import annotations

import datetime
import gc
import json
import pathlib
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import multiassert
from multiassert import SilentRankError, delivery, ranks, simulate
from tests.four_ranks import WORLD

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, so that the four ranks are run once

# What each rank saw in a scene of tests/four_ranks.py, by rank.
Scene = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What the four ranks saw on a platform; run once."""
    seen: dict[str, list[dict[str, Any]]] = {}

    def run(platform: str) -> list[dict[str, Any]]:
        if platform not in seen:
            folder = tmp_path_factory.mktemp("ranks")
            commands = [
                [sys.executable, "-m", "tests.four_ranks", platform, str(rank), str(folder)] for rank in range(WORLD)
            ]
            children = [
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for command in commands
            ]
            try:
                outputs = [child.communicate(timeout=300)[0] for child in children[:3]]
                (folder / "done").touch()  # rank 3 may hang until the others have seen that it does
                outputs.append(children[3].communicate(timeout=60)[0])
            finally:
                for child in children:
                    child.kill()
            ends = [child.returncode for child in children]
            assert ends == [0] * WORLD, "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(outputs))
            seen[platform] = [json.loads((folder / str(rank)).read_text()) for rank in range(WORLD)]
        return seen[platform]

    return run


@pytest.fixture
def scene(platform: str, run_ranks: Callable[[str], list[dict[str, Any]]]) -> Scene:
    if platform not in ("cpu", "npu", "musa", "generic"):
        pytest.skip("scripts/gpu_check.py runs the ranks of real accelerators")
    return lambda name: [rank.get(name) for rank in run_ranks(platform)]


def hits(seen: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Rank, step after the scene began, message."""
    return [(v["rank"], v["step"] - seen["first"], v["message"]) for v in seen["error"]["violations"]]


@pytest.mark.parametrize("name", ["none", "clean again", "clean at last"])
def test_nobody_raises_where_no_rank_is_hit(scene: Scene, name: str) -> None:
    assert [seen["raised_at"] for seen in scene(name)] == [None] * WORLD


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("one", [(2, 1, "logits")]),
        ("two", [(1, 2, "logits"), (3, 2, "logits")]),
        ("two places", [(3, 2, "logits"), (0, 2, "ids")]),
        ("two steps", [(3, 1, "ids"), (0, 2, "logits")]),
        ("all", [(rank, 0, "ids") for rank in range(WORLD)]),
        ("a late device", [(1, 1, "logits")]),
        ("a tag that cannot be pickled", [(0, 0, "logits")]),
    ],
)
def test_all_ranks_raise_at_the_same_step_the_first_cause_first(
    scene: Scene,
    platform: str,
    name: str,
    expected: list[tuple[int, int, str]],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("alive", f"{WORLD} ranks (gloo), all raise at one step: yes")
    saw = scene(name)
    assert [seen["raised_at"] is not None for seen in saw] == [True] * WORLD
    assert len({seen["raised_at"] for seen in saw}) == 1
    assert [hits(seen) for seen in saw] == [expected] * WORLD
    for seen in saw:
        first = seen["error"]["violations"][0]
        assert (first["node"], first["device"].split(":")[0]) == (socket.gethostname(), platform)
        for part in (f"rank {first['rank']} on node {first['node']}", f"on {first['device']}, step {first['step']}"):
            assert part in seen["error"]["text"]


def test_a_rank_that_was_hit_waits_for_the_others(scene: Scene) -> None:
    """poll() and the next probe raise nothing before."""
    assert [seen["held"] for seen in scene("one")] == [True] * WORLD


def test_what_is_not_known_is_not_claimed(scene: Scene) -> None:
    for seen in scene("two"):
        assert "Ranks 1, 3 in the same step at the same place of the program" in seen["error"]["text"]
    for seen in scene("two places"):
        assert "2 ranks were hit: 0, 3. The first is the first cause" in seen["error"]["text"]


def test_ranks_outside_the_group_are_not_concerned(scene: Scene) -> None:
    saw = scene("a group of two")
    assert [seen and hits(seen) for seen in saw] == [None, [(3, 0, "logits")], None, [(3, 0, "logits")]]
    assert saw[1]["raised_at"] == saw[3]["raised_at"]


def test_raise_if_error_raises_on_all_ranks(scene: Scene) -> None:
    assert [seen["violations"][0]["rank"] for seen in scene("raise_if_error")] == [1] * WORLD
    assert scene("raise_if_error, none") == [None] * WORLD
    assert [[v["message"] for v in seen["violations"]] for seen in scene("warn, raise_if_error")] == [
        ["in mode warn"]
    ] * WORLD


def test_in_mode_warn_each_rank_logs_its_own(scene: Scene) -> None:
    assert [seen["raised_at"] for seen in scene("warn")] == [None] * WORLD


def test_no_host_wait_is_added(scene: Scene, platform: str) -> None:
    if platform == "cpu":
        pytest.skip("the host never waits for the CPU")
    assert scene("host waits") == [0] * WORLD


def test_a_rank_that_hangs_is_named(run_ranks: Callable[[str], list[dict[str, Any]]]) -> None:
    saw = run_ranks("cpu")
    assert saw[0]["hangs"]["type"] == "AsyncAssertionError"  # its own violation is told, whatever the others do
    assert [v["message"] for v in saw[0]["hangs"]["violations"]] == ["before the silence"]
    for silence in (saw[0]["hangs"]["cause"], saw[1]["hangs"], saw[0]["hangs, asked again"]):
        assert silence["type"] == "SilentRankError"
        assert silence["ranks"] == [3]
        assert f"no answer from rank 3 ({socket.gethostname()}) within 8 s" in silence["text"]
        assert "rank 0, 1, 2 of the group waited" in silence["text"]
        assert "The others left no sign" in silence["text"]


def test_a_rank_that_dies_is_named(run_ranks: Callable[[str], list[dict[str, Any]]]) -> None:
    for rank in run_ranks("cpu")[:2]:
        assert (rank["dies"]["type"], rank["dies"]["ranks"]) == ("SilentRankError", [2])


def test_a_collective_on_a_device_is_on_a_stream_of_its_own(
    simulator: simulate.Simulator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with nccl, hccl and mccl; this one collective is simulated: it is queued on the stream, and adds 41."""

    class Work:
        def wait(self) -> None:
            pass

    def all_reduce(values: torch.Tensor, **_: object) -> Work:
        assert values.device == device
        values.add_(41)
        return Work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    asked = torch.tensor([1], dtype=torch.int32)
    busy = torch.zeros(8, device=device)
    simulator.run_all()
    with simulator.no_sync():
        busy.add_(1)  # on the engine's stream, which does not get on
        collective = ranks._Collective(1, asked, dist.ReduceOp.MAX, dist.group.WORLD, device)  # type: ignore[arg-type]
        assert not collective.is_done()
        simulator.advance(100, stream=ranks._stream_of_collectives(device).stream_id)
        assert collective.is_done()
    assert (collective.result.device.type, collective.result.tolist()) == ("cpu", [42])
    simulator.run_all()


@pytest.mark.parametrize(
    ("configuration", "expected"), [("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo,mps:gloo", "cpu")]
)
def test_a_group_that_has_a_backend_for_the_cpu_costs_the_device_nothing(
    monkeypatch: pytest.MonkeyPatch, configuration: str, expected: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: configuration)
    assert ranks._device_of_collectives(dist.group.WORLD).type == expected  # type: ignore[arg-type]


def test_a_group_of_a_device_only_uses_its_current_device(
    simulator: simulate.Simulator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: f"{device.type}:vendor")
    assert ranks._device_of_collectives(dist.group.WORLD) == device  # type: ignore[arg-type]


def test_without_a_group_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ranks(group: object) -> None:
        pytest.fail("ranks were asked for")

    monkeypatch.setattr(ranks, "of_group", no_ranks)
    with multiassert.override("raise"):
        multiassert.maybe_detect_nan(torch.zeros(2), "clean")
        multiassert.step()
        multiassert.raise_if_error()


@pytest.fixture
def group_of_one(tmp_path: pathlib.Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def test_a_group_of_one_raises_at_once(group_of_one: dist.ProcessGroup) -> None:
    bad = torch.tensor([0.0, float("nan")])
    with multiassert.override("raise"):
        multiassert.maybe_detect_nan(bad, "bad")
        with pytest.raises(multiassert.AsyncAssertionError, match="rank 0 on node") as raised:
            multiassert.step(group=group_of_one)
        assert raised.value.violations[0].rank == 0
        multiassert.maybe_detect_nan(bad, "at the end")
        with pytest.raises(multiassert.AsyncAssertionError, match="at the end"):
            multiassert.raise_if_error(group=group_of_one)


@pytest.fixture
def held() -> None:
    """As after a step(group=...) of several ranks."""
    delivery._delivery.held_for_ranks = True


@pytest.mark.usefixtures("held")
def test_in_mode_auto_a_probe_on_the_cpu_raises_at_its_own_call() -> None:
    with multiassert.override("auto"), pytest.raises(multiassert.AsyncAssertionError, match="at once"):
        multiassert.maybe_detect_nan(torch.tensor([float("nan")]), "at once")
    assert delivery._delivery.to_raise == []


@pytest.mark.usefixtures("held")
def test_a_drain_raises_what_is_held_and_goes_on_holding() -> None:
    bad = torch.tensor([float("nan")])
    with multiassert.override("raise"):
        multiassert.maybe_detect_nan(bad, "drained")
        with pytest.raises(multiassert.AsyncAssertionError, match="drained"):
            multiassert.drain()
        multiassert.maybe_detect_nan(bad, "held")
        assert multiassert.poll() == []
        assert [violation.message for violation in delivery._delivery.to_raise] == ["held"]


@pytest.mark.usefixtures("held")
def test_a_failure_of_the_device_hides_nothing_that_is_held() -> None:
    with multiassert.override("raise"):
        multiassert.maybe_detect_nan(torch.tensor([float("nan")]), "the cause")
        assert multiassert.poll() == []
        delivery._delivery.device_failure = RuntimeError("the device is lost")
        with pytest.raises(multiassert.AsyncAssertionError, match="the cause") as raised:
            multiassert.poll()
    assert str(raised.value.__cause__) == "the device is lost"


def test_probes_that_have_nothing_to_look_at_count_for_the_order_of_ranks() -> None:
    logits = torch.zeros(2, 4)
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(logits[:0], "empty")
        multiassert.maybe_detect_nan(logits, "no valid rows", num_valid=0)
        multiassert.sanitize_nan_logits(logits, "healed")
        multiassert.sanitize_oob(torch.zeros(2, dtype=torch.int64), 0, 4, "safe")
        multiassert.maybe_detect_nan(torch.full((2,), float("nan")), "bad")
        (violation,) = multiassert.drain()
    assert violation.position == 4


def test_what_other_ranks_may_not_know_is_told_as_text() -> None:
    class OfThisRankOnly:
        def __str__(self) -> str:
            return "batch 7"

    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(torch.full((2,), float("nan")), "bad")
        multiassert.step(OfThisRankOnly(), rows=[OfThisRankOnly(), 3])
        (violation,) = multiassert.drain()
    told = pickle.loads(pickle.dumps(ranks._portable(violation)))
    assert (told.tag, told.row_names) == ("batch 7", ("batch 7", 3))


class NeverDone:
    """A collective whose answer comes after some looks, or never."""

    number, result = 7, torch.tensor([1])

    def __init__(self, looks: int, error: BaseException | None = None) -> None:
        self.looks, self.error = looks, error

    def is_done(self) -> bool:
        self.looks -= 1
        if self.error is not None:
            raise self.error
        return self.looks < 0


def test_a_rank_that_waits_leaves_its_mark_soon(
    group_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its own time is up: others, who came earlier, give up earlier."""
    monkeypatch.setattr(ranks, "SECONDS_BEFORE_MARK", 0.0)
    this = ranks.Ranks(group_of_one)
    assert this._wait(NeverDone(2), datetime.timedelta(hours=1)).tolist() == [1]  # type: ignore[arg-type]
    assert this._store.check([this._mark(7, 0)])


def test_an_interrupt_does_not_put_a_rank_out_of_step(group_of_one: dist.ProcessGroup) -> None:
    this = ranks.Ranks(group_of_one)
    this._asked = [NeverDone(0, KeyboardInterrupt()), *[NeverDone(0)] * 2]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        this.any_hit(datetime.timedelta(hours=1))
    assert len(this._asked) == 3


def test_a_group_that_is_destroyed_is_not_kept(tmp_path: pathlib.Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    ranks._all_ranks[world] = ranks.Ranks(world)
    gone = weakref.ref(world)
    dist.destroy_process_group()
    del world
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("group", ["world", 0, object()])
def test_what_is_no_group_is_refused_before_anything_is_lost(group: Any) -> None:
    with multiassert.override("raise"):
        multiassert.maybe_detect_nan(torch.tensor([float("nan")]), "kept")
        for call in (multiassert.step, multiassert.raise_if_error):
            with pytest.raises(TypeError, match="group must be a torch.distributed process group"):
                call(group=group)
        assert delivery.current_step() == 0
        with pytest.raises(multiassert.AsyncAssertionError, match="kept"):
            multiassert.step()


@pytest.mark.parametrize("timeout", [5, -1.0, datetime.timedelta(0)])
def test_a_timeout_is_a_time(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout must be a datetime.timedelta above zero"):
        multiassert.step(timeout=timeout)


def test_the_error_of_a_silent_rank_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(SilentRankError("no answer from rank 3", (3,))))
    assert (str(error), error.ranks) == ("no answer from rank 3", (3,))
