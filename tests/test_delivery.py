"""The way of a violation: reported once, none lost, the first cause first."""

from __future__ import annotations

import logging
import math
import pathlib
import pickle
import threading

import pytest
import torch

import multiassert
from conftest import ChildRun, finish, step_and_finish
from multiassert import AsyncAssertionError, Violation, delivery, maybe_detect_nan, maybe_detect_oob, simulate


def clean(device: torch.device | None = None) -> torch.Tensor:
    return torch.zeros(4, 8, device=device)


def with_nan(row: int, rows: int = 4, device: torch.device | None = None) -> torch.Tensor:
    tensor = torch.zeros(rows, 8)
    tensor[row, 3] = float("nan")
    return tensor.to(device or "cpu")


def test_a_record_says_what_where_and_when(device: torch.device, platform: str) -> None:
    with multiassert.override("warn"):
        for step in range(6):
            maybe_detect_nan(with_nan(1, device=device) if step == 3 else clean(device), "target logits")
            ids = (
                torch.tensor([5, 7, 900, 3], device=device) if step == 4 else torch.tensor([5, 7, 9, 3], device=device)
            )
            maybe_detect_oob(ids, 0, 100, "ids")
            multiassert.step(tag=f"batch {step}", rows=["req-a", "req-b", "req-c", "req-d"])
        nan, high = multiassert.drain()
    assert (nan.kind, nan.message, nan.step, nan.tag, nan.rows) == ("nan", "target logits", 3, "batch 3", (1,))
    assert nan.row_names == ("req-b",)
    assert (nan.platform, nan.device, nan.dtype, nan.shape) == (platform, device, torch.float32, (4, 8))
    assert nan.bound is None
    assert nan.value != nan.value
    assert nan.site.file == __file__
    assert nan.site.function == "test_a_record_says_what_where_and_when"
    assert "maybe_detect_nan" in pathlib.Path(__file__).read_text().splitlines()[nan.site.line - 1]
    assert (high.kind, high.step, high.rows, high.value, high.bound) == ("high", 4, (2,), 900, 100)
    assert high.row_names == ("req-c",)


def test_what_was_sent_within_a_step_has_the_names_that_the_step_got(
    device: torch.device, simulator: simulate.Simulator
) -> None:
    with multiassert.override("warn"):
        for step in range(delivery.STEPS_REMEMBERED + 2):
            maybe_detect_nan(with_nan(1, device=device), "early")
            assert multiassert.poll() == []  # sends it, and the device has not run yet
            multiassert.step(tag=step, rows=[f"{step} a", f"{step} b"])
            simulator.run_all()
            (early,) = multiassert.poll()
            assert (early.step, early.tag, early.row_names) == (step, step, (f"{step} b",))
    assert len(delivery._delivery.stamps_of_steps) == delivery.STEPS_REMEMBERED


def test_what_has_arrived_before_its_step_ends_has_the_names_too(
    device: torch.device, simulator: simulate.Simulator
) -> None:
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(1, device=device), "early")
        delivery.send()
        simulator.run_all()
        multiassert.step(tag="s", rows=["a", "b"])
        (early,) = multiassert.poll()
    assert (early.tag, early.row_names) == ("s", ("b",))


def test_two_sites_hit_in_one_step_come_in_program_order(device: torch.device) -> None:
    with multiassert.override("raise"):
        maybe_detect_nan(clean(device), "first, clean")
        maybe_detect_oob(torch.tensor([-1], device=device), 0, 4, "second")
        maybe_detect_nan(with_nan(0, device=device), "third")
        with pytest.raises(AsyncAssertionError) as raised:
            step_and_finish(device)
    assert [(v.message, v.order) for v in raised.value.violations] == [("second", 0), ("third", 1)]


def test_the_first_cause_comes_first_although_its_site_was_registered_last(device: torch.device) -> None:
    with multiassert.override("warn"):
        for step in range(3):
            if step == 1:
                maybe_detect_nan(with_nan(2, device=device), "the cause")
            maybe_detect_nan(with_nan(2, device=device) if step == 2 else clean(device), "what follows")
            multiassert.step()
        violations = multiassert.drain()
    assert [(v.message, v.step) for v in violations] == [("the cause", 1), ("what follows", 2)]


def test_a_second_violation_after_the_first_was_raised_is_raised_too(device: torch.device) -> None:
    with multiassert.override("raise"):
        maybe_detect_nan(with_nan(0, device=device), "first")
        with pytest.raises(AsyncAssertionError, match="first"):
            step_and_finish(device)
        maybe_detect_nan(with_nan(3, device=device), "second")
        with pytest.raises(AsyncAssertionError, match="second") as raised:
            step_and_finish(device)
        assert [(v.message, v.step, v.rows) for v in raised.value.violations] == [("second", 1, (3,))]
        step_and_finish(device)
        multiassert.raise_if_error()


def test_the_next_probe_raises_what_was_seen_before(device: torch.device) -> None:
    def probe_until_it_raises() -> None:
        maybe_detect_nan(with_nan(0, device=device), "bad")
        for _ in range(2 * multiassert.delivery.CALLS_BETWEEN_SNAPSHOTS):
            maybe_detect_nan(clean(device), "fine")
            finish(device)

    with multiassert.override("raise"), pytest.raises(AsyncAssertionError, match="bad"):
        probe_until_it_raises()
    assert multiassert.drain() == []


def test_a_probe_sends_what_was_seen_a_while_ago(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Violation] = []
    remove = multiassert.on_violation(found.append)
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(2, device=device), "a while ago")
        maybe_detect_nan(clean(device), "just now")
        finish(device)
        assert found == []
        monkeypatch.setattr(multiassert.delivery, "SECONDS_BETWEEN_SNAPSHOTS", 0)
        maybe_detect_nan(clean(device), "later")
        finish(device)
        monkeypatch.setattr(multiassert.delivery, "SECONDS_BETWEEN_SNAPSHOTS", math.inf)
        maybe_detect_nan(clean(device), "looks at what has arrived")
        remove()
    assert [(v.message, v.rows) for v in found] == [("a while ago", (2,))]


def test_poll_sends_what_was_seen_so_far(device: torch.device) -> None:
    with multiassert.override("warn"):
        multiassert.step()
        maybe_detect_nan(with_nan(2, device=device), "in the middle of step 1")
        found = multiassert.poll()
        finish(device)
        found += multiassert.poll()
        assert [(v.rows, v.step) for v in found] == [((2,), 1)]
        multiassert.step()
        finish(device)
        assert multiassert.poll() == []
        assert multiassert.drain() == []


def test_a_hit_in_a_thread_reaches_the_main_thread(device: torch.device) -> None:
    with multiassert.override("warn"):
        thread = threading.Thread(target=lambda: maybe_detect_nan(with_nan(1, device=device), "in a thread"))
        thread.start()
        thread.join()
        assert [v.message for v in multiassert.drain()] == ["in a thread"]


def test_threads_lose_no_violation(device: torch.device) -> None:
    threads_count, calls = 8, 200
    sites = [multiassert.site(f"thread {number}") for number in range(threads_count)]

    def probe(number: int) -> None:
        for turn in range(calls):
            maybe_detect_nan(
                with_nan(number, threads_count, device=device)
                if turn == 77
                else torch.zeros(threads_count, 8, device=device),
                sites[number],
            )

    seen: list[Violation] = []
    remove = multiassert.on_violation(seen.append)
    with multiassert.override("warn"):
        threads = [threading.Thread(target=probe, args=(number,)) for number in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        returned = multiassert.drain()
    remove()
    assert sorted((v.message, v.rows) for v in returned) == [(f"thread {n}", (n,)) for n in range(threads_count)]
    assert sorted(v.message for v in seen) == sorted(v.message for v in returned)


def test_one_site_hit_by_all_threads_keeps_every_row(device: torch.device) -> None:
    shared = multiassert.site("shared")
    with multiassert.override("warn"):
        threads = [
            threading.Thread(
                target=lambda row=row: [maybe_detect_nan(with_nan(row, 16, device=device), shared) for _ in range(50)]
            )
            for row in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = {row for violation in multiassert.drain() for row in violation.rows}
    assert rows == set(range(16))


def test_a_callback_that_raises_is_logged_and_loses_nothing(
    caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    seen: list[str] = []

    def bad_callback(violation: Violation) -> None:
        raise OSError("the callback's own trouble")

    removes = [multiassert.on_violation(bad_callback), multiassert.on_violation(lambda v: seen.append(v.message))]
    with multiassert.override("raise"), pytest.raises(AsyncAssertionError) as raised:
        maybe_detect_nan(with_nan(0, device=device), "one")
        maybe_detect_nan(with_nan(0, device=device), "two")
        step_and_finish(device)
    for remove in removes:
        remove()
    assert [v.message for v in raised.value.violations] == ["one", "two"]
    assert seen == ["one", "two"]
    assert caplog.text.count("OSError: the callback's own trouble") == 2


def test_a_callback_that_looks_itself_takes_nothing_away(device: torch.device) -> None:
    looked: list[object] = []
    remove = multiassert.on_violation(lambda v: looked.append(multiassert.drain()))
    with multiassert.override("raise"), pytest.raises(AsyncAssertionError, match="seen"):
        maybe_detect_nan(with_nan(0, device=device), "seen")
        step_and_finish(device)
    remove()
    assert looked == [[]]


def test_an_interrupt_in_a_callback_stops_nothing_after_it(device: torch.device) -> None:
    def interrupted(violation: Violation) -> None:
        raise KeyboardInterrupt

    remove = multiassert.on_violation(interrupted)
    with multiassert.override("raise"):
        maybe_detect_nan(with_nan(0, device=device), "seen")
        with pytest.raises(KeyboardInterrupt):
            multiassert.drain()
        remove()
        with pytest.raises(AsyncAssertionError, match="seen"):
            multiassert.drain()


def test_an_error_on_the_way_of_a_snapshot_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with multiassert.override("raise"):
        maybe_detect_nan(with_nan(0), "seen")
        maybe_detect_oob(torch.tensor([9]), 0, 5, "seen too")
        (state,) = multiassert.state.all_states()
        judge, calls = state._judge, []

        def fails_once(part: object) -> None:
            calls.append(part)
            if len(calls) == 2:
                raise RuntimeError("the device has no memory")
            judge(part)  # type: ignore[arg-type]

        monkeypatch.setattr(state, "_judge", fails_once)
        with pytest.raises(RuntimeError, match="no memory"):
            multiassert.drain()
        with pytest.raises(AsyncAssertionError) as raised:
            multiassert.drain()
    assert [v.message for v in raised.value.violations] == ["seen", "seen too"]
    assert len(state._inboxes) == multiassert.state.SNAPSHOTS_IN_FLIGHT


def test_a_device_that_fails_hides_nothing_that_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(stamp: object) -> None:
        raise RuntimeError("the device has failed")

    with multiassert.override("raise"):
        maybe_detect_nan(with_nan(0), "seen")
        multiassert.delivery._send_all(multiassert.state.Stamp(0))
        (state,) = multiassert.state.all_states()
        monkeypatch.setattr(state, "snapshot", fails)
        with pytest.raises(AsyncAssertionError, match="seen") as raised:
            multiassert.drain()
    assert "the device has failed" in str(raised.value.__cause__)


def test_folded_rows_are_told_by_the_largest_of_the_calls(device: torch.device) -> None:
    site = multiassert.site("tokens")
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(599, 600, device=device), site)
        maybe_detect_nan(torch.zeros(520, 8, device=device), site)
        (violation,) = multiassert.drain()
    assert violation.rows == (range(597, 600),)


def test_callbacks_see_every_mode_and_can_be_taken_off() -> None:
    seen: list[str] = []
    remove = multiassert.on_violation(lambda v: seen.append(v.message))
    with multiassert.override("auto"), pytest.raises(AsyncAssertionError):
        maybe_detect_nan(with_nan(0), "auto")
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0), "warn")
        multiassert.drain()
    with multiassert.override("raise"), pytest.raises(AsyncAssertionError):
        maybe_detect_nan(with_nan(0), "raise")
        multiassert.drain()
    remove()
    remove()
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0), "after")
        multiassert.drain()
    assert seen == ["auto", "warn", "raise"]


def test_a_record_keeps_the_mode_it_was_made_in(device: torch.device) -> None:
    with multiassert.override("raise"):
        maybe_detect_nan(with_nan(0, device=device), "made in raise")
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device), "made in warn")
    with pytest.raises(AsyncAssertionError) as raised:
        multiassert.drain()
    assert [v.message for v in raised.value.violations] == ["made in raise"]
    assert [v.message for v in multiassert.drain()] == ["made in warn"]


def test_raise_if_error_raises_in_mode_warn(device: torch.device) -> None:
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device), "only warned")
        with pytest.raises(AsyncAssertionError, match="NaN detected! only warned"):
            multiassert.raise_if_error()
        multiassert.raise_if_error()


def test_warn_nan_never_raises(device: torch.device) -> None:
    with multiassert.override("raise"):
        multiassert.maybe_warn_nan(with_nan(1, device=device), "heals it later")
        multiassert.step()
        assert [v.message for v in multiassert.drain()] == ["heals it later"]
    with multiassert.override("auto"):
        multiassert.maybe_warn_nan(with_nan(1, device=device), "on CPU too")
        assert [v.rows for v in multiassert.drain()] == [(1,)]


def test_suspend_records_nothing_in_this_thread_only(device: torch.device) -> None:
    with multiassert.override("warn"), multiassert.suspend(), multiassert.suspend():
        maybe_detect_nan(with_nan(0, device=device), "warm-up")
        other = threading.Thread(target=lambda: maybe_detect_nan(with_nan(0, device=device), "other thread"))
        other.start()
        other.join()
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device), "after")
    assert [v.message for v in multiassert.drain()] == ["other thread", "after"]


def test_suspend_ends_when_the_body_raises() -> None:
    with multiassert.override("auto"):
        with pytest.raises(KeyError), multiassert.suspend():
            raise KeyError
        with pytest.raises(AsyncAssertionError):
            maybe_detect_nan(with_nan(0))


def test_messages_are_called_only_on_a_violation(device: torch.device) -> None:
    calls: list[int] = []

    def message() -> str:
        calls.append(1)
        return "computed"

    for mode in ("off", "auto", "warn", "raise"):
        with multiassert.override(mode):
            maybe_detect_nan(clean(device), message)
            multiassert.drain()
    assert calls == []
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device), message)
        assert [v.message for v in multiassert.drain()] == ["computed"]
    assert calls == [1]


def test_a_message_that_raises_loses_no_violation(device: torch.device) -> None:
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device), lambda: str(1 // 0))
        (violation,) = multiassert.drain()
    assert "ZeroDivisionError" in violation.message


def test_warnings_are_throttled_per_site(caplog: pytest.LogCaptureFixture, device: torch.device) -> None:
    with multiassert.override("warn"), caplog.at_level(logging.WARNING, "multiassert"):
        for _ in range(20):
            maybe_detect_nan(with_nan(0, device=device), "chatty")
            maybe_detect_nan(with_nan(0, device=device), "chatty too")
            multiassert.step()
        assert len(multiassert.drain()) == 40
    assert len(caplog.records) == 2


def test_the_log_line_is_frozen(device: torch.device, platform: str) -> None:
    with multiassert.override("warn"):
        maybe_detect_oob(torch.tensor([[3], [-7]], dtype=torch.int32, device=device), 0, 5, 'ids "of"\nrequest')
        multiassert.step(tag="t", rows=["a", "b c"])
        (violation,) = multiassert.drain()
    site = f"{violation.site.file}:{violation.site.line}:test_the_log_line_is_frozen"
    assert violation.log_line == (
        f"multiassert violation kind=low platform={platform} device={device} rank=- node=- step=0 "
        'tag="t" order=0 rows=1 row_names=["b c"] '
        f'value=-7 bound=0 count=- index=- dtype=int32 shape=2x1 site="{site}" message="ids \\"of\\"\\nrequest"'
    )


def test_the_rank_is_in_the_record(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv("RANK", "3")
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(0, device=device))
        assert [v.rank for v in multiassert.drain()] == [3]


def test_the_error_goes_through_pickle_and_keeps_its_text() -> None:
    with multiassert.override("auto"), pytest.raises(AsyncAssertionError) as raised:
        maybe_detect_nan(with_nan(2), "pickled")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert str(copy) == str(raised.value)
    assert copy.violations[0].rows == (2,)


def test_the_error_says_which_is_the_first_cause_and_where(device: torch.device) -> None:
    with multiassert.override("raise"), pytest.raises(AsyncAssertionError) as raised:
        for row in range(20):
            maybe_detect_nan(with_nan(row, 20, device=device), f"probe {row}")
        step_and_finish(device)
    text = str(raised.value)
    assert text.startswith("NaN detected! probe 0\n")
    assert __file__ in text
    assert "and 4 more in .violations" in text
    assert "The first is the first cause" in text


def test_more_rows_than_the_state_holds_are_told_as_ranges() -> None:
    tensor = torch.zeros(1000, 2)
    tensor[777] = float("nan")
    tensor[999] = float("nan")
    with multiassert.override("warn"):
        maybe_detect_nan(tensor, "tokens")
        (violation,) = multiassert.drain()
    assert [777 in rows for rows in violation.rows] == [True, False]
    assert violation.rows[1] == range(996, 1000)


def test_a_step_that_finds_all_buffers_under_way_loses_nothing() -> None:
    """Snapshots that do not arrive: the host is ahead of the device, and the next record covers a range of steps."""
    arrives = False
    with multiassert.override("warn"):
        maybe_detect_nan(clean(), "probe")
        (state,) = multiassert.state.all_states()

        class Event:
            def query(self) -> bool:
                return arrives

            def synchronize(self) -> None:
                nonlocal arrives
                arrives = True

        state.backend = type("Late", (type(state.backend),), {"record_event": lambda self, stream: Event()})()
        for step in range(10):
            maybe_detect_nan(with_nan(step, 10), "probe")
            multiassert.step()
        assert multiassert.poll() == []
        violations = multiassert.drain()
    assert [v.step for v in violations] == [0, 1, 2, 3, (4, 10)]
    assert [v.rows for v in violations] == [(0,), (1,), (2,), (3,), (4, 5, 6, 7, 8, 9)]


def test_bounds_that_vary_are_compared_with_what_was_seen_under_them(device: torch.device) -> None:
    with multiassert.override("warn"):
        for step in range(50):
            for length in (step + 1, 1000 + step):
                maybe_detect_oob(
                    torch.tensor([step + 1 if length == step + 1 == 31 else 0], device=device), 0, length, "positions"
                )
            multiassert.step()
        (violation,) = multiassert.drain()
        assert (violation.step, violation.value, violation.bound) == (30, 31, 31)
        (state,) = multiassert.state.all_states()
        assert sum(len(page.slots) for page in state._pages) <= 8


def test_many_messages_at_one_place_share_a_site_and_keep_their_text(device: torch.device) -> None:
    with multiassert.override("warn"):
        for number in range(600):
            maybe_detect_nan(with_nan(0, device=device) if number == 590 else clean(device), f"message {number}")
            multiassert.step()
        assert [v.message for v in multiassert.drain()] == ["message 590"]
        (state,) = multiassert.state.all_states()
        assert sum(len(page.slots) for page in state._pages) <= 257


def test_state_made_in_inference_mode_works_outside(device: torch.device) -> None:
    with multiassert.override("warn"):
        with torch.inference_mode():
            maybe_detect_nan(with_nan(0, device=device), "inside")
            multiassert.step()
        maybe_detect_nan(with_nan(1, device=device), "outside")
        with torch.inference_mode():
            maybe_detect_nan(with_nan(2, device=device), "inside again")
        multiassert.step()
        assert [v.rows for v in multiassert.drain()] == [(0,), (1,), (2,)]


def test_autograd_sees_nothing_of_a_probe() -> None:
    for mode in ("auto", "raise", "trap"):
        weight = torch.ones(4, 8, requires_grad=True)
        with multiassert.override(mode):
            hidden = weight * 2
            maybe_detect_nan(hidden, "hidden")
            multiassert.maybe_detect_inf(weight, "weight")
            multiassert.maybe_assert_sum(hidden, 64)
            multiassert.step()
            hidden.sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full((4, 8), 2.0))


EXIT = """
    import torch, multiassert
    x = torch.zeros(4, 8)
    x[2] = float("nan")
    multiassert.maybe_detect_nan(x, "last step")
    print("end of the program")
"""


def test_at_exit_mode_raise_ends_with_exit_code_1(run_child: ChildRun) -> None:
    run = run_child(EXIT, MULTIASSERT="raise")
    assert run.returncode == 1
    assert run.stdout == "end of the program\n"
    assert "NaN detected! last step" in run.stderr
    assert run.stderr.count("last step") == 1


def test_at_exit_mode_warn_logs_and_says_that_nobody_looked(run_child: ChildRun) -> None:
    run = run_child(EXIT, MULTIASSERT="warn")
    assert run.returncode == 0
    assert 'message="last step"' in run.stderr
    assert "call multiassert.drain()" in run.stderr


def test_at_exit_a_clean_run_says_nothing(run_child: ChildRun) -> None:
    run = run_child(EXIT.replace('float("nan")', "1.0"), MULTIASSERT="raise")
    assert (run.returncode, run.stdout, run.stderr) == (0, "end of the program\n", "")


def test_a_forked_child_reports_its_own_and_not_its_parents(run_child: ChildRun) -> None:
    run = run_child(
        """
        import os, torch, multiassert
        torch.set_num_threads(1)
        x = torch.full((2, 2), float("nan"))
        multiassert.maybe_detect_nan(x, "parent")
        child = os.fork()
        multiassert.maybe_detect_nan(x, "child") if child == 0 else None
        print(child == 0, [v.message for v in multiassert.drain()], flush=True)
        if child:
            os.waitpid(child, 0)
        else:
            os._exit(0)
        """,
        MULTIASSERT="warn",
    )
    assert sorted(run.stdout.splitlines()) == ["False ['parent']", "True ['child']"], run.stderr


WORKERS = """
import multiprocessing, sys, torch, multiassert

def work(value):
    torch.set_num_threads(1)
    multiassert.maybe_detect_nan(torch.full((2, 2), value), "in a worker")

if __name__ == "__main__":
    multiassert.maybe_detect_nan(torch.zeros(2), "in the parent")
    context = multiprocessing.get_context(sys.argv[1])
    codes = []
    for value in (0.0, float("nan")):
        process = context.Process(target=work, args=(value,))
        process.start()
        process.join(100)
        codes.append(process.exitcode)
    print(codes)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_process_ends_with_exit_code_1_as_any_other(
    method: str, tmp_path: pathlib.Path, run_child: ChildRun
) -> None:
    """Engines start their workers both ways: by fork after the import, and by spawn."""
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    code = f"import runpy, sys; sys.argv = ['', {method!r}]; runpy.run_path({str(script)!r}, run_name='__main__')"
    run = run_child(code, MULTIASSERT="raise")
    assert run.stdout == "[0, 1]\n", run.stderr
    assert run.stderr.count("NaN detected! in a worker") == 1


def test_the_users_traceback_ends_in_the_public_call() -> None:
    with multiassert.override("auto"), pytest.raises(AsyncAssertionError) as raised:
        maybe_detect_nan(with_nan(0))
    assert [entry.name for entry in raised.traceback] == [
        "test_the_users_traceback_ends_in_the_public_call",
        "maybe_detect_nan",
    ]


def test_a_first_probe_that_takes_long_is_no_reason_to_send(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call on a device may load and compile; what it saw is sent with its step, which has names."""
    now = 0.0
    record = delivery.DeviceState.record

    def record_slowly(*arguments: object, **named: object) -> None:
        nonlocal now
        record(*arguments, **named)  # type: ignore[arg-type]
        now += 5

    monkeypatch.setattr(delivery, "SECONDS_BETWEEN_SNAPSHOTS", 0.1)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: now)
    monkeypatch.setattr(delivery.DeviceState, "record", record_slowly)
    sent: list[object] = []
    monkeypatch.setattr(delivery, "_send_all", sent.append)
    with multiassert.override("warn"):
        maybe_detect_nan(with_nan(1, device=device), "first")
        assert sent == []
        maybe_detect_nan(with_nan(1, device=device), "second")
        assert len(sent) == 1
    delivery.start_anew()
