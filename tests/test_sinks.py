"""Metrics, lines of JSON and the log: each violation is told there once, and a storm of them stays within bounds."""

from __future__ import annotations

import collections
import fcntl
import gc
import io
import json
import logging
import os
import pathlib
import pickle
import stat
import threading
from collections.abc import Iterator
from typing import Any

import prometheus_client
import pytest
import torch

import multiassert
import pytest_multiassert
from conftest import ChildRun, finish
from multiassert import (
    AsyncAssertionError,
    Site,
    Violation,
    delivery,
    maybe_detect_nan,
    maybe_detect_oob,
    settings,
    simulate,
    sinks,
    throttle,
)
from multiassert.sinks import jsonlines, prometheus

VIOLATION_KEYS = [
    "event", "time", "pid", "kind", "message", "text", "site", "platform", "device", "rank", "node", "first_step",
    "step", "tag", "order", "sequence", "position", "rows", "row_count", "row_names", "value", "bound", "count",
    "index", "dtype", "shape",
]  # fmt: skip
SUPPRESSED_KEYS = ["event", "time", "pid", "count", "kind", "message", "site"]


def with_nan(row: int, device: torch.device | str = "cpu", rows: int = 4) -> torch.Tensor:
    tensor = torch.zeros(rows, 8)
    tensor[row, 3] = float("nan")
    return tensor.to(device)


def clean(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(4, 8, device=device)


def strict(line: str) -> dict[str, Any]:
    """A line as a reader of strict JSON takes it, which has no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return read


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


def violation_of(number: int, step: int = 0, **fields: Any) -> Violation:
    """A violation of a site of its own."""
    given: dict[str, Any] = {
        "kind": "nan", "message": f"site {number}", "site": Site(f"site {number}", "model.py", number, "forward"),
        "platform": "npu", "device": torch.device("cpu"), "rank": None, "node": None, "step": step, "tag": None,
        "rows": (0,), "row_names": None, "value": float("nan"), "bound": None, "count": None, "index": None,
        "dtype": torch.float32, "shape": (4, 8), "order": 0, "headline": "NaN detected!",
    }  # fmt: skip
    return Violation(**{**given, **fields})


def again(violation: Violation, step: int) -> Violation:
    """Another violation of the same site, made as cheaply as can be."""
    copy = object.__new__(Violation)
    copy.__dict__.update(violation.__dict__, step=step)
    return copy


def hand_over(*violations: Violation, raises: bool = False) -> None:
    """What a snapshot that has arrived does with its violations."""
    delivery._hand_over([(violation, raises) for violation in violations])


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle, "now", clock)
    return clock


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "logs" / "violations.jsonl"


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    for sink in list(jsonlines._open.values()):
        sink.close()
    for export in list(prometheus._running):
        export.stop()


# ---------------------------------------------------------------------------------------------------------------------
# The throttle.


def test_a_key_is_told_so_often_in_a_while_and_then_counted(clock: Clock) -> None:
    told = throttle.Throttle[str](2, seconds=10)
    assert [told.admits(key) for key in "aaaab"] == [True, True, False, False, True]
    clock.time += 9
    assert told.ended() == []
    assert not told.admits("a")
    clock.time += 1
    assert told.ended() == [("a", 3)], "b was never silenced"
    assert told.ended() == []
    assert [told.admits("a") for _ in range(5)] == [True, True, False, False, False]
    assert told.ended(all_of_them=True) == [("a", 3)], "without waiting"


def test_a_throttle_forgets_what_is_over_and_tells_only_so_many_keys_apart(clock: Clock) -> None:
    told = throttle.Throttle[int](1, seconds=10)
    admitted = sum(told.admits(key) for key in range(5000))
    assert admitted == throttle.KEYS_TOLD_APART + 1
    assert len(told._windows) == throttle.KEYS_TOLD_APART + 1
    clock.time += 10
    assert told.ended() == [(None, 5000 - admitted)]
    assert not told._windows


# ---------------------------------------------------------------------------------------------------------------------
# Plain data, and the log.


def test_plain_data_is_strict_json_with_the_same_keys_always() -> None:
    full = violation_of(
        7, step=(3, 5), rank=2, node="host", tag=object, rows=(0, 1, 2, 5, range(8, 12)), row_names=("a", 7),
        value=float("-inf"), bound=2**64 - 1, count=3, index=1, position=4,
    )  # fmt: skip
    plain = strict(json.dumps(full.to_dict(), allow_nan=False))
    assert plain == {
        "kind": "nan", "message": "site 7", "text": "NaN detected! site 7",
        "site": {"file": "model.py", "line": 7, "function": "forward"},
        "platform": "npu", "device": "cpu", "rank": 2, "node": "host", "first_step": 3, "step": 5,
        "tag": "<class 'object'>", "order": 0, "sequence": 0, "position": 4,
        "rows": [[0, 2], [5, 5], [8, 11]], "row_count": 8, "row_names": ["a", "7"],
        "value": "-inf", "bound": 2**64 - 1, "count": 3, "index": 1, "dtype": "float32", "shape": [4, 8],
    }  # fmt: skip
    assert list(violation_of(0).to_dict()) == list(plain) == VIOLATION_KEYS[3:]
    assert violation_of(0).to_dict()["value"] == "nan"


def test_plain_data_is_short_whatever_the_callers_objects_are() -> None:
    class Silent:
        def __str__(self) -> str:
            raise OSError

    violation = violation_of(0, tag=Silent(), rows=tuple(range(0, 8192, 2)), row_names=("n" * 9999,) * 4096)
    plain = violation.to_dict()
    assert plain["tag"] == "(its text raised OSError)"
    assert plain["row_count"] == 4096
    assert len(json.dumps(plain)) < 300_000
    assert [len(plain["rows"]), len(plain["row_names"])] == [256, 256]  # type: ignore[arg-type]


def test_a_log_record_has_the_violation_as_plain_data(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    with multiassert.override("warn"):
        maybe_detect_nan(clean(device), "logits")
        multiassert.drain()
        assert caplog.records == []
        maybe_detect_nan(with_nan(2, device), "logits")
        (violation,) = multiassert.drain()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("multiassert.delivery", "WARNING")
    assert record.getMessage() == violation.log_line
    told = strict(json.dumps(record.__dict__["multiassert"]))
    assert told == {"event": "violation", **violation.to_dict()}
    assert (told["kind"], told["rows"], told["value"], told["step"]) == ("nan", [[2, 2]], "nan", 0)
    assert pickle.loads(pickle.dumps(record)).multiassert == told, "as a queue between processes does"


def test_the_log_says_how_many_it_left_out_once_their_time_is_over(
    device: torch.device, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    site = multiassert.site("chatty")
    with multiassert.override("warn"):
        for _ in range(5):
            maybe_detect_nan(with_nan(0, device), site)
            multiassert.step()
        multiassert.drain()
        assert len(caplog.records) == 1
        clock.time += delivery.SECONDS_BETWEEN_LOGS
        multiassert.step()
        multiassert.step()
    (record,) = caplog.records[1:]
    assert record.getMessage() == f"4 more violations nan 'chatty' at {site} were not logged"
    told = strict(json.dumps(record.__dict__["multiassert"]))
    assert (told["event"], told["count"], told["kind"], told["site"]["line"]) == ("suppressed", 4, "nan", site.line)


# ---------------------------------------------------------------------------------------------------------------------
# Lines of JSON.


def test_a_violation_is_a_line_and_a_clean_run_makes_no_file(device: torch.device, path: pathlib.Path) -> None:
    sink = jsonlines.write_to(path)
    with multiassert.override("warn"):
        maybe_detect_nan(clean(device), "logits")
        multiassert.step()
        multiassert.drain()
        assert not path.exists()
        maybe_detect_nan(with_nan(1, device), "logits")
        maybe_detect_oob(torch.tensor([3, 2**40], device=device), 0, 100, "ids")
        multiassert.step(tag="batch 7", rows=["req-a", "req-b", "req-c", "req-d"])
        nan, high = multiassert.drain()
    first, second = lines_of(path)
    assert list(first) == list(second) == VIOLATION_KEYS
    assert first == {**first, **nan.to_dict(), "event": "violation", "pid": os.getpid()}
    assert (first["value"], first["step"], first["rows"], first["row_names"]) == ("nan", 1, [[1, 1]], ["req-b"])
    assert (second["kind"], second["value"], second["bound"], second["tag"]) == ("high", 2**40, 100, "batch 7")
    assert second["message"] == high.message
    sink.close()
    hand_over(violation_of(0))
    assert len(lines_of(path)) == 2, "closed"
    sink.close()
    assert delivery._delivery.callbacks == delivery._delivery.observers == []


def test_mode_raise_is_written_too(device: torch.device, path: pathlib.Path) -> None:
    jsonlines.write_to(path)
    with multiassert.override("raise"), pytest.raises(AsyncAssertionError):
        maybe_detect_nan(with_nan(3, device), "logits")
        multiassert.drain()
    assert [line["rows"] for line in lines_of(path)] == [[[3, 3]]]


def test_a_site_that_writes_too_much_is_counted_and_the_count_is_written(
    device: torch.device, path: pathlib.Path, clock: Clock
) -> None:
    sink = jsonlines.write_to(path, per_site=2)
    site = multiassert.site("chatty")
    with multiassert.override("warn"):
        for _ in range(5):
            maybe_detect_nan(with_nan(0, device), site)
            multiassert.step()
        multiassert.drain()
        assert [line["event"] for line in lines_of(path)] == ["violation"] * 2
        clock.time += jsonlines.SECONDS
        multiassert.step()
        suppressed = lines_of(path)[2]
        assert list(suppressed) == SUPPRESSED_KEYS
        assert (suppressed["event"], suppressed["count"], suppressed["kind"]) == ("suppressed", 3, "nan")
        assert suppressed["message"] == "chatty"
        assert suppressed["site"] == {"file": __file__, "line": site.line, "function": site.function}
        for _ in range(3):
            maybe_detect_nan(with_nan(0, device), site)
            multiassert.step()
        multiassert.drain()
    sink.close()
    assert [(line["event"], line.get("count")) for line in lines_of(path)[3:]] == [
        ("violation", None), ("violation", None), ("suppressed", 1),
    ]  # fmt: skip


def test_a_full_file_is_moved_away_and_both_stay_below_the_limit(path: pathlib.Path) -> None:
    limit, older = 20_000, path.with_name(path.name + ".1")
    jsonlines.write_to(path, max_bytes=limit)
    for number in range(200):
        hand_over(violation_of(number))
        assert path.stat().st_size <= limit
    assert older.stat().st_size <= limit
    assert sorted(child.name for child in path.parent.iterdir()) == [path.name, older.name]
    kept = [line["site"]["line"] for line in lines_of(older) + lines_of(path)]
    assert kept == list(range(200 - len(kept), 200)), "the newest, in order"
    assert len(kept) > 20


def test_a_line_longer_than_the_limit_has_a_file_of_its_own(path: pathlib.Path) -> None:
    jsonlines.write_to(path, max_bytes=1)
    hand_over(violation_of(1), violation_of(2), violation_of(3))
    assert [line["site"]["line"] for line in lines_of(path)] == [3]
    assert [line["site"]["line"] for line in lines_of(path.with_name(path.name + ".1"))] == [2]


def test_a_forked_child_writes_nothing_of_its_parents(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    sink = jsonlines.write_to(path, per_site=1)
    violation = violation_of(0)
    hand_over(violation, violation, violation)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    sink.step_ended()
    assert isinstance(sink.target, jsonlines._Path)
    assert sink.target._descriptor is None, "a lock on it would be the parent's too"
    hand_over(violation)
    sink.close()
    assert [(line["event"], line["pid"] - parent) for line in lines_of(path)] == [("violation", 0), ("violation", 1)]


def test_a_file_that_another_program_moves_is_made_anew(path: pathlib.Path) -> None:
    jsonlines.write_to(path)
    hand_over(violation_of(1))
    path.rename(path.with_name("by logrotate"))
    hand_over(violation_of(2))
    assert [line["site"]["line"] for line in lines_of(path)] == [2]
    assert [line["site"]["line"] for line in lines_of(path.with_name("by logrotate"))] == [1]


def test_of_two_processes_one_moves_the_file_and_the_other_follows(path: pathlib.Path) -> None:
    """Each process has such an object; here one process has both, so that they take turns."""
    mine, others = jsonlines._Path(str(path), 30), jsonlines._Path(str(path), 30)
    older = path.with_name(path.name + ".1")
    mine.append("mine, the first\n")
    others.append("others\n")
    others.append("others, moved\n")
    assert older.read_text() == "mine, the first\nothers\n"
    assert mine._descriptor is not None
    assert mine._move_away(mine._descriptor), "it has been moved by the other"
    assert path.read_text() == "others, moved\n", "and what is there now stays"
    mine.append("mine\n")
    assert path.read_text() == "others, moved\nmine\n"
    assert others._descriptor is not None
    fcntl.flock(others._descriptor, fcntl.LOCK_EX)  # the other is moving it right now
    mine.append("mine, and nobody waits\n")
    assert path.read_text() == "others, moved\nmine\nmine, and nobody waits\n"
    fcntl.flock(others._descriptor, fcntl.LOCK_UN)
    mine.append("mine, at last\n")
    assert path.read_text() == "mine, at last\n"
    others.append("all\n")
    assert path.read_text() == "mine, at last\nall\n"
    mine.release()
    others.release()


def test_a_full_disk_is_logged_once_and_takes_nothing_down(
    device: torch.device,
    caplog: pytest.LogCaptureFixture,
    path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: _no_space())
    sink = jsonlines.write_to(path)
    with multiassert.override("warn"):
        for number in range(10):
            maybe_detect_nan(with_nan(number % 4, device), f"site {number}")
            multiassert.step()
        assert len(multiassert.drain()) == 10
    sink.close()
    told = [record.getMessage() for record in caplog.records if record.name == "multiassert.sinks.jsonlines"]
    assert [("No space left" in text, text[:20]) for text in told] == [
        (True, "violations cannot be"), (False, "10 lines were not wr"),
    ]  # fmt: skip


def test_a_pipe_is_never_waited_for_and_never_moved(path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    jsonlines.write_to(path, max_bytes=1)
    hand_over(violation_of(0))
    assert "violations cannot be written" in caplog.text, "nobody reads"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    hand_over(violation_of(1), violation_of(2))
    told = [strict(line) for line in os.read(reader, 2**16).decode().splitlines()]
    os.close(reader)
    assert [line["event"] for line in told] == ["lost", "violation", "violation"]
    assert stat.S_ISFIFO(os.stat(path).st_mode)
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_after_a_failure_the_file_says_how_many_are_lost(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonlines.write_to(path)
    hand_over(violation_of(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
    hand_over(violation_of(1))
    monkeypatch.setattr(os, "write", lambda descriptor, data: _no_space())
    hand_over(violation_of(2))
    monkeypatch.undo()
    hand_over(violation_of(3))
    first, half, *others = path.read_text().splitlines()
    assert strict(first)["message"] == "site 0"
    assert half.startswith('{"event": "violation"')
    assert not half.endswith("}")
    lost, last = map(strict, others)
    assert (lost["event"], lost["count"], last["message"]) == ("lost", 2, "site 3")


def test_half_a_line_of_an_earlier_run_does_not_spoil_the_next(path: pathlib.Path) -> None:
    path.parent.mkdir()
    path.write_text('{"event": "viol')
    jsonlines.write_to(path)
    hand_over(violation_of(0), violation_of(1))
    half, *whole = path.read_text().splitlines()
    assert half == '{"event": "viol'
    assert [strict(line)["message"] for line in whole] == ["site 0", "site 1"]


def _no_space() -> int:
    raise OSError(28, "No space left on device")


def test_threads_write_whole_lines(device: torch.device, path: pathlib.Path) -> None:
    jsonlines.write_to(path)
    sites = [multiassert.site(f"thread {number}") for number in range(8)]

    def probe(number: int) -> None:
        for turn in range(20):
            maybe_detect_nan(with_nan(turn % 4, device), sites[number])
            if turn % 7 == number % 7:
                multiassert.poll()

    found = []
    remove = multiassert.on_violation(found.append)
    with multiassert.override("warn"):
        threads = [threading.Thread(target=probe, args=(number,)) for number in range(len(sites))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        multiassert.drain()
    remove()
    jsonlines.write_to(path).close()
    lines = lines_of(path)
    counts = [line["count"] for line in lines if line["event"] == "suppressed"]
    assert sum(line["event"] == "violation" for line in lines) + sum(counts) == len(found) >= len(sites)
    assert {line["message"] for line in lines} == {site.message for site in sites}


def test_the_rank_and_the_process_may_be_in_the_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    jsonlines.write_to(tmp_path / "{rank}" / "violations-{pid}.jsonl")
    hand_over(violation_of(0))
    monkeypatch.setenv("RANK", "3")  # it is known later than the path
    hand_over(violation_of(1))
    name = f"violations-{os.getpid()}.jsonl"
    for rank, line in (("none", 0), ("3", 1)):
        assert [told["site"]["line"] for told in lines_of(tmp_path / rank / name)] == [line]
    with pytest.raises(ValueError, match=r"\{host\} in .* stands for nothing. Good names: \{rank\}, \{pid\}"):
        jsonlines.write_to(tmp_path / "{host}.jsonl")


def test_a_path_has_one_sink(path: pathlib.Path) -> None:
    sink = jsonlines.write_to(path)
    assert jsonlines.write_to(str(path)) is sink
    hand_over(violation_of(0))
    assert len(lines_of(path)) == 1
    sink.close()
    assert jsonlines.write_to(path) is not sink
    hand_over(violation_of(0))
    assert len(lines_of(path)) == 2


def test_an_open_text_file_is_written_and_never_closed(caplog: pytest.LogCaptureFixture, path: pathlib.Path) -> None:
    file = io.StringIO()
    sink = jsonlines.write_to(file)
    hand_over(violation_of(0))
    sink.close()
    assert strict(file.getvalue())["message"] == "site 0"
    assert not file.closed
    other = jsonlines.write_to(file)
    file.close()
    hand_over(violation_of(0), violation_of(1))
    assert [record.getMessage()[:20] for record in caplog.records if "sinks" in record.name] == ["violations cannot be"]
    other.close()
    path.parent.mkdir()
    with path.open("a") as buffered:
        third = jsonlines.write_to(buffered)
        hand_over(violation_of(0))
        assert len(lines_of(path)) == 1, "at once"
        third.close()
    for wrong in (path.open("wb"), 7):
        with pytest.raises(TypeError, match="must be a path or an open text file, got"):
            jsonlines.write_to(wrong)  # type: ignore[arg-type]


def test_what_can_be_no_file_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    with pytest.raises(IsADirectoryError):
        jsonlines.write_to(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        jsonlines.write_to(tmp_path / "file" / "violations.jsonl")
    for limits in ({"max_bytes": 0}, {"per_site": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(limits))} must be at least 1, got 0"):
            jsonlines.write_to(tmp_path / "violations.jsonl", **limits)
    assert jsonlines._open == {}


PROCESSES = """
import os, sys, torch
from multiassert.sinks import jsonlines
from tests.test_sinks import hand_over, violation_of

sink = jsonlines.write_to(sys.argv[1], max_bytes=int(sys.argv[2]), per_site=1000)
hand_over(violation_of(0))
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        for turn in range(300):
            hand_over(violation_of(number, turn))
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
sink.close()
"""


def test_processes_share_a_file_and_move_it_one_at_a_time(run_child: ChildRun, path: pathlib.Path) -> None:
    everything, limited = path.with_name("all"), path.with_name("limited")
    code = "import sys\n"
    for target, limit in ((everything, 2**30), (limited, 60_000)):
        code += f"sys.argv = ['', {str(target)!r}, {limit}]\n{PROCESSES}"
    run = run_child(code, PYTHONPATH=str(pathlib.Path(__file__).parent.parent))
    assert run.stdout == "[0, 0, 0, 0]\n" * 2, run.stderr
    told = collections.Counter((line["pid"], line["site"]["line"]) for line in lines_of(everything))
    assert sorted(told.values()) == [1, 300, 300, 300, 300]
    older = limited.with_name("limited.1")
    assert sorted(child.name for child in path.parent.iterdir()) == ["all", "limited", "limited.1"]
    for file in (limited, older):
        assert file.stat().st_size <= 60_000 + 4 * 1000, "a line of each process may come while it is moved"
        assert lines_of(file)


FROM_THE_ENVIRONMENT = """
import json, logging, sys, torch, multiassert

class Json(logging.Formatter):
    def format(self, record):
        return json.dumps(record.multiassert, allow_nan=False)

handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(Json())
logging.getLogger("multiassert").addHandler(handler)
bad, site = torch.full((2, 2), float("nan")), multiassert.site("only warned")
for _ in range(6):
    multiassert.maybe_warn_nan(bad, site)
    multiassert.step()
multiassert.maybe_detect_nan(bad, "last step")
"""


def test_a_variable_turns_it_on_and_the_last_step_is_written(run_child: ChildRun, path: pathlib.Path) -> None:
    run = run_child(FROM_THE_ENVIRONMENT, MULTIASSERT="raise", MULTIASSERT_JSONL=str(path))
    assert run.returncode == 1, run.stderr
    lines, logged = lines_of(path), [strict(line) for line in run.stdout.splitlines()]
    for told, written in ((lines, jsonlines.PER_SITE), (logged, 1)):
        counts = collections.Counter((line["event"], line["message"]) for line in told)
        assert counts[("violation", "last step")] == 1
        in_time = counts[("violation", "only warned")]
        assert in_time >= written, "more if the machine is slow"
        counted = sum(line["count"] for line in told if line["event"] == "suppressed")
        assert in_time + counted == 6, "the rest is counted at the end"
    assert "AsyncAssertionError at exit" in run.stderr


def test_a_path_that_cannot_be_written_to_ends_no_engine(run_child: ChildRun, tmp_path: pathlib.Path) -> None:
    run = run_child("import multiassert; print('goes on')", MULTIASSERT="warn", MULTIASSERT_JSONL=str(tmp_path))
    assert (run.returncode, run.stdout) == (0, "goes on\n"), run.stderr
    assert f"MULTIASSERT_JSONL: violations are not written to {tmp_path}: " in run.stderr


def test_the_variable_sets_no_mode(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MULTIASSERT"):
            monkeypatch.delenv(name)
    for name in settings.OTHER_VARIABLES:
        value = {settings.KERNELS_VARIABLE: "torch"}.get(name, str(tmp_path / "violations.jsonl"))
        assert settings.read_environment({name: value}, []).by_platform == {}
        monkeypatch.setenv(name, value)
    assert not pytest_multiassert._environment_asks()
    sinks.open_those_of_environment({settings.JSONL_VARIABLE: " "})
    assert jsonlines._open == {}
    with pytest.raises(ValueError, match=r"^MULTIASSERT_JSONL: \{x\} in"):
        sinks.open_those_of_environment({settings.JSONL_VARIABLE: "{x}.jsonl"})
    with pytest.raises(ValueError, match="MULTIASSERT_JSON="):
        settings.read_environment({"MULTIASSERT_JSON": "violations.jsonl"}, [])


# ---------------------------------------------------------------------------------------------------------------------
# Metrics.


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


def samples(registry: prometheus_client.CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == name
    }


def value(registry: prometheus_client.CollectorRegistry, name: str) -> float:
    return samples(registry, name)[()]


def test_violations_probes_and_snapshots_are_counted(
    device: torch.device, platform: str, registry: prometheus_client.CollectorRegistry
) -> None:
    prometheus.export(registry)
    site = multiassert.site("logits")
    with multiassert.override("warn"):
        for step in range(3):
            maybe_detect_nan(with_nan(1, device) if step == 1 else clean(device), site)
            maybe_detect_oob(torch.tensor([9, -1] if step == 1 else [1], device=device), 0, 5, "ids")
            multiassert.step()
            finish(device)
            if step == 0:
                assert samples(registry, "multiassert_violations_total") == {}
                assert value(registry, "multiassert_probe_calls_total") == 2
        multiassert.drain()
    told = samples(registry, "multiassert_violations_total")
    assert sum(told.values()) == 3
    assert told[("nan", f"logits tests/test_sinks.py:{site.line}", platform)] == 1
    assert sorted(kind for kind, _, _ in told) == ["high", "low", "nan"]
    assert value(registry, "multiassert_probe_calls_total") == 6
    sent = value(registry, "multiassert_snapshots_sent_total")
    assert (
        sent == value(registry, "multiassert_snapshots_arrived_total") == value(registry, "multiassert_lag_steps_count")
    )
    assert sent == (1 if platform == "cpu" else 3), "on the CPU a clean step has nothing to send"
    assert value(registry, "multiassert_lag_steps_sum") == sent, "each was opened one step later"


def test_the_lag_is_how_many_steps_later_the_host_knows(
    simulator: simulate.Simulator, device: torch.device, registry: prometheus_client.CollectorRegistry
) -> None:
    prometheus.export(registry)
    with multiassert.override("warn"):
        for _ in range(3):
            maybe_detect_nan(clean(device), "logits")
            multiassert.step()
        assert value(registry, "multiassert_snapshots_sent_total") == 3
        assert value(registry, "multiassert_snapshots_arrived_total") == 0
        finish(device)
        multiassert.step()
    buckets = samples(registry, "multiassert_lag_steps_bucket")
    assert [buckets[(limit,)] for limit in ("0.0", "1.0", "2.0", "4.0")] == [0, 1, 2, 3], "3, 2 and 1 steps later"


def test_only_so_many_sites_have_a_label(registry: prometheus_client.CollectorRegistry) -> None:
    prometheus.export(registry, max_sites=5)
    for number in range(50):
        hand_over(violation_of(number), violation_of(number))
    told = samples(registry, "multiassert_violations_total")
    assert len(told) == 6
    assert told[("nan", "site 4 model.py:4", "npu")] == 2
    assert told[("nan", "other", "npu")] == 90


def test_messages_of_single_calls_and_text_that_is_no_utf8_do_no_harm(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    prometheus.export(registry)
    site = Site("", "/srv/engine/model/layer.py", 3, "forward")
    for number in range(20):
        hand_over(violation_of(0, site=site, message=f"request {number}"))
    hand_over(violation_of(0, site=Site("\ud800", "a.py", 1, "f")))
    assert samples(registry, "multiassert_violations_total") == {
        ("nan", "model/layer.py:3", "npu"): 20, ("nan", "? a.py:1", "npu"): 1,
    }  # fmt: skip
    assert b'site="model/layer.py:3"' in prometheus_client.generate_latest(registry)


def test_a_registry_has_one_export_until_it_is_stopped(registry: prometheus_client.CollectorRegistry) -> None:
    export = prometheus.export(registry)
    assert prometheus.export(registry) is export
    hand_over(violation_of(0))
    assert sum(samples(registry, "multiassert_violations_total").values()) == 1
    export.stop()
    export.stop()
    hand_over(violation_of(0))
    assert list(registry.collect()) == []
    assert prometheus.export(registry) is not export
    assert samples(registry, "multiassert_violations_total") == {}


def test_other_metrics_of_the_same_names_are_left_alone(registry: prometheus_client.CollectorRegistry) -> None:
    prometheus_client.Gauge("multiassert_lag_steps", "somebody else's", registry=registry)
    with pytest.raises(ValueError, match="multiassert_lag_steps"):
        prometheus.export(registry)
    assert [metric.name for metric in registry.collect()] == ["multiassert_lag_steps"]
    assert prometheus._running == []
    with pytest.raises(ValueError, match="max_sites must be at least 0, got -1"):
        prometheus.export(registry, max_sites=-1)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r'pip install "multiassert\[prometheus\]"'):
        prometheus.export()


def test_the_default_registry_is_prometheus_clients_own() -> None:
    export = prometheus.export()
    assert export.registry is prometheus_client.REGISTRY
    assert b"multiassert_probe_calls_total" in prometheus_client.generate_latest()
    export.stop()
    assert b"multiassert" not in prometheus_client.generate_latest()


def test_a_sink_that_fails_loses_no_violation(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(delivery.Observer):
        def snapshot_arrived(self, steps: int) -> None:
            raise OSError("the sink's own trouble")

    delivery.observe(Fails())
    with multiassert.override("warn"):
        for _ in range(2):
            maybe_detect_nan(with_nan(0, device), "logits")
            multiassert.step()
            finish(device)
        assert len(multiassert.drain()) == 2
    assert caplog.text.count("OSError: the sink's own trouble") == 1


SEVERAL_PROCESSES = """
import os, prometheus_client, torch, multiassert
from prometheus_client import multiprocess
from multiassert.sinks import prometheus

torch.set_num_threads(1)
prometheus.export()
site = multiassert.site("logits")
def work():
    multiassert.maybe_detect_nan(torch.full((2, 2), float("nan")), site)
    multiassert.step()
    multiassert.drain()
work()
child = os.fork()
if child == 0:
    work()
    work()
    os._exit(0)
os.waitpid(child, 0)
registry = prometheus_client.CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(prometheus_client.generate_latest(registry).decode())
"""


def test_processes_are_added_up_in_multiprocess_mode(run_child: ChildRun, tmp_path: pathlib.Path) -> None:
    run = run_child(SEVERAL_PROCESSES, MULTIASSERT="warn", PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    told = dict(line.rsplit(" ", 1) for line in run.stdout.splitlines() if line and not line.startswith("#"))
    assert told.pop('multiassert_violations_total{kind="nan",platform="cpu",site="logits <string>:8"}') == "3.0", run
    assert told["multiassert_probe_calls_total"] == "3.0"
    assert told["multiassert_snapshots_arrived_total"] == told["multiassert_lag_steps_count"] == "3.0"


# ---------------------------------------------------------------------------------------------------------------------
# Storms.


def kept_objects() -> int:
    gc.collect()
    return sum(type(thing) is Violation for thing in gc.get_objects())


class Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records = 0
        self.characters = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.records += 1
        self.characters += len(record.getMessage())


@pytest.fixture
def counting() -> Iterator[Counting]:
    """All that is logged, counted and not kept, as caplog would."""
    handler, logger = Counting(), logging.getLogger("multiassert")
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.propagate = True


SITES, ROUNDS, CAUSES = 2000, 500, 10_000


def test_a_million_violations_leave_bounded_memory_log_file_and_metrics(
    path: pathlib.Path, registry: prometheus_client.CollectorRegistry, clock: Clock, counting: Counting
) -> None:
    before = kept_objects()
    sink = jsonlines.write_to(path, per_site=1)
    prometheus.export(registry)
    causes = [violation_of(number) for number in range(SITES)]
    for step in range(ROUNDS):
        hand_over(*(again(cause, step) for cause in causes))
    told_apart = throttle.KEYS_TOLD_APART + 1
    assert kept_objects() - before - SITES <= delivery.KEPT_VIOLATIONS
    assert len(delivery._delivery.to_return) == delivery.KEPT_VIOLATIONS
    assert counting.records == told_apart
    assert counting.characters < told_apart * 1000
    assert len(lines_of(path)) == told_apart
    told = samples(registry, "multiassert_violations_total")
    assert len(told) == prometheus.MAX_SITES + 1
    assert sum(told.values()) == SITES * ROUNDS
    clock.time += delivery.SECONDS_BETWEEN_LOGS
    multiassert.step()  # the storm is over, and now it is told how large it was
    sink.close()
    assert counting.records == 2 * told_apart
    lines = lines_of(path)
    assert len(lines) == 2 * told_apart
    assert sum(line.get("count") or 1 for line in lines[told_apart:]) + told_apart == SITES * ROUNDS
    first = multiassert.poll()
    assert [violation.step for violation in first] == [step for step in range(5) for _ in range(SITES)], "the causes"
    assert counting.records == 2 * told_apart + 1, "that others were not kept"
    del first
    assert kept_objects() - before - SITES <= 0


def test_what_is_held_for_ranks_is_bounded_and_the_error_counts_the_rest() -> None:
    delivery._delivery.held_for_ranks = True
    causes = [violation_of(number) for number in range(100)]
    for step in range(1000):
        hand_over(*(again(cause, step) for cause in causes), raises=True)
    assert len(delivery._delivery.to_raise) == delivery.KEPT_VIOLATIONS
    with pytest.raises(AsyncAssertionError) as raised:
        multiassert.drain()
    assert len(raised.value.violations) == delivery.KEPT_VIOLATIONS
    assert raised.value.left_out == 100 * 1000 - delivery.KEPT_VIOLATIONS
    text = str(raised.value)
    assert "and 90000 that came later, and were not kept" in text
    assert len(text) < 20_000
    assert pickle.loads(pickle.dumps(raised.value)).left_out == raised.value.left_out
    assert multiassert.drain() == []
    hand_over(violation_of(0), raises=True)
    with pytest.raises(AsyncAssertionError) as later:
        multiassert.raise_if_error()
    assert later.value.left_out == 0


def test_a_storm_of_a_device_is_bounded_too(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, clock: Clock, counting: Counting, path: pathlib.Path
) -> None:
    monkeypatch.setattr(delivery, "KEPT_VIOLATIONS", 50)
    sink = jsonlines.write_to(path, per_site=3)
    sites, bad = [multiassert.site(f"layer {number}") for number in range(30)], with_nan(1, device)
    with multiassert.override("warn"):
        for _ in range(10):
            for site in sites:
                maybe_detect_nan(bad, site)
            multiassert.step()
            finish(device)
        delivery._bring_in_everything()
        assert counting.records == 30
        found = multiassert.poll()
        assert [(v.step, v.message) for v in found] == [(n // 30, f"layer {n % 30}") for n in range(50)]
        assert counting.records == 31, "250 were not kept"
    sink.close()
    counts = collections.Counter(line["event"] for line in lines_of(path))
    assert counts == {"violation": 90, "suppressed": 30}
    assert {line["count"] for line in lines_of(path)[90:]} == {7}


@pytest.mark.parametrize("mode", ["warn", "raise"])
def test_the_error_and_raise_if_error_tell_what_was_left_out(
    mode: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "KEPT_VIOLATIONS", 5)
    with multiassert.override(mode):
        for number in range(8):
            maybe_detect_nan(with_nan(0, device), f"site {number}")
        with pytest.raises(AsyncAssertionError, match="and 3 that came later, and were not kept") as raised:
            multiassert.raise_if_error()
        assert [v.message for v in raised.value.violations] == [f"site {number}" for number in range(5)]
        maybe_detect_nan(with_nan(0, device), "later")
        with pytest.raises(AsyncAssertionError) as later:
            multiassert.raise_if_error()
    assert later.value.left_out == 0


def test_rows_and_names_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "KEPT_ROWS", 1000)
    wide = violation_of(0, rows=tuple(range(400)), row_names=("a",) * 400)
    hand_over(wide, wide, violation_of(1))
    assert [v.message for v in multiassert.poll()] == ["site 0", "site 1"]
    hand_over(violation_of(2, rows=tuple(range(2000))))
    assert [v.message for v in multiassert.poll()] == ["site 2"], "one is kept whatever its size"


def test_a_record_of_very_many_rows_has_the_first_names_only() -> None:
    rows = 3 * delivery.ROWS_LISTED
    with multiassert.override("warn"):
        maybe_detect_nan(torch.full((rows, 2), float("nan")), "tokens")
        multiassert.step(rows=range(rows))
        (violation,) = multiassert.drain()
    assert sum(map(len, violation.rows)) == rows  # type: ignore[arg-type]
    assert violation.row_names == tuple(range(delivery.ROWS_LISTED))


def test_a_message_of_any_length_is_cut(device: torch.device) -> None:
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device), lambda: "x" * 10**6)
        (violation,) = multiassert.drain()
    assert violation.message == "x" * delivery.LONGEST_MESSAGE + "..."


def test_a_callback_that_fails_in_a_storm_makes_none_of_the_log(clock: Clock, counting: Counting) -> None:
    def fails(violation: Violation) -> None:
        raise OSError

    remove = multiassert.on_violation(fails)
    causes = [violation_of(number) for number in range(3)]
    for step in range(100):
        hand_over(*(again(cause, step) for cause in causes), raises=True)
    assert counting.records == 3
    clock.time += delivery.SECONDS_BETWEEN_LOGS
    hand_over(causes[0], raises=True)
    assert counting.records == 4
    remove()


def test_a_sink_may_be_opened_by_a_callback_while_another_thread_opens_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens a sink takes delivery's lock first, as whoever is called back has it already."""
    opening, called = threading.Event(), threading.Event()
    check = jsonlines._Path.check

    def check_slowly(path: jsonlines._Path) -> None:
        opening.set()
        called.wait(1)
        check(path)

    def from_a_callback() -> None:
        opening.wait(10)
        with multiassert.override("warn"):
            multiassert.maybe_detect_nan(torch.full((2,), float("nan")), "bad")
            multiassert.drain()

    def on_violation(violation: multiassert.Violation) -> None:
        called.set()
        jsonlines.write_to(tmp_path / "second").close()

    monkeypatch.setattr(jsonlines._Path, "check", check_slowly)
    remove = multiassert.on_violation(on_violation)
    try:
        threads = [
            threading.Thread(target=lambda: jsonlines.write_to(tmp_path / "first").close(), daemon=True),
            threading.Thread(target=from_a_callback, daemon=True),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    finally:
        remove()
    assert called.is_set()


def test_a_line_that_another_process_is_writing_is_not_taken_for_half_a_line(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir(parents=True)
    path.write_text('{"event": "of another process", ')

    def written_to_its_end(seconds: float) -> None:
        with path.open("a") as file:
            file.write('"rest": 1}\n')

    monkeypatch.setattr(jsonlines.time, "sleep", written_to_its_end)
    sink = jsonlines.write_to(path)
    with multiassert.override("warn"):
        multiassert.maybe_detect_nan(with_nan(1), "bad")
        multiassert.drain()
    sink.close()
    assert [line["event"] for line in lines_of(path)] == ["of another process", "violation"]
