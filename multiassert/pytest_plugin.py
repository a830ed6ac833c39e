"""What the pytest plugin does while a run asks for it: each violation fails the test that caused it, and no other.

A probe only records, and the host looks later: without this, a violation would be raised by whatever test runs then. So
the devices are drained when a test's call and its teardown have ended. pytest sees this through the module
`pytest_multiassert`, which imports it only when it is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
import torch

import multiassert
from multiassert import dispatch, injection, pytest_platforms, settings, sites, transforms
from multiassert.pytest_children import ChildResult, LoggedViolation, logged_violations, run_in_child_process
from multiassert.violation import AsyncAssertionError, Violation

__all__ = ["AsyncViolations", "ChildResult", "LoggedViolation", "logged_violations", "run_in_child_process"]

KINDS = ("nan", "inf", "low", "high", "misaligned", "range", "cond")
MARKER = "async_violations"
HEADING = "multiassert"  # of a report's section, of the summary, of what a worker of pytest-xdist tells


# ---------------------------------------------------------------------------------------------------------------------
# The mode of the run.


def set_mode(config: pytest.Config, mode: str | None, source: str) -> bool:
    """Put a mode in force, here and for child processes, until the run ends; returns whether any platform is on.

    Without a mode it is that of the environment. Raises ValueError for a bad mode, with the good ones.
    """
    if mode is not None:
        settings.parse_mode(mode, source)
        config.add_cleanup(functools.partial(_restore, os.environ.get("MULTIASSERT"), settings.current))
        os.environ["MULTIASSERT"] = mode  # children inherit it; variables of single platforms still win over it
        settings.read_process_environment()
    return settings.active


def _restore(variable: str | None, modes: settings.Modes) -> None:
    if variable is None:
        os.environ.pop("MULTIASSERT", None)
    else:
        os.environ["MULTIASSERT"] = variable
    settings.apply(modes)


# ---------------------------------------------------------------------------------------------------------------------
# What a test expects, and what it gets.


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A violation that a test is about."""

    kind: str | None = None
    site: str | None = None
    row: int | str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is no kind of violation. Good kinds: {', '.join(KINDS)}.")

    def is_met_by(self, violation: Violation) -> bool:
        return (
            self.kind in (None, violation.kind)
            and (self.site is None or self.site in violation.message or self.site in str(violation.site))
            and (self.row is None or self._names_a_row_of(violation))
        )

    def _names_a_row_of(self, violation: Violation) -> bool:
        if isinstance(self.row, str):
            return self.row in map(str, violation.row_names or ())
        return any(self.row in row if isinstance(row, range) else self.row == row for row in violation.rows)

    def __str__(self) -> str:
        given = [f"{name}={value!r}" for name, value in dataclasses.asdict(self).items() if value is not None]
        return ", ".join(given) or "any violation"


class AsyncViolations:
    """The violations of one test, expected and seen. What the fixture `async_violations` is."""

    def __init__(self) -> None:
        self._expected: list[Expectation] = []
        self._seen: list[Violation] = []
        self._known: set[int] = set()  # the ids of these
        self._untaken: list[Violation] = []  # that the test itself was neither given nor has caught

    def expect(self, *, kind: str | None = None, site: str | None = None, row: int | str | None = None) -> None:
        """The test fails unless the probes see such a violation before it ends, and no other; as the marker."""
        self._expected.append(Expectation(kind, site, row))

    def drain(self) -> list[Violation]:
        """Wait for the devices, and return what no other call has raised or returned, whatever the mode."""
        found = _pending()
        self._note(found)
        return found

    def _note(self, violations: Iterable[Violation]) -> None:
        for violation in violations:
            if id(violation) not in self._known:  # a record that is kept in _seen keeps its id
                self._known.add(id(violation))
                self._seen.append(violation)

    def _is_expected(self, violation: Violation) -> bool:
        return any(expectation.is_met_by(violation) for expectation in self._expected)

    def _verdict(self, probes_run: int | None) -> BaseException | None:
        """What fails the test, if anything does; expectations are judged where it is told how many probes were run."""
        unexpected = [violation for violation in self._untaken if not self._is_expected(violation)]
        if not self._expected:
            return AsyncAssertionError(unexpected) if unexpected else None
        unmet = [e for e in self._expected if not any(map(e.is_met_by, self._seen))] if probes_run is not None else []
        if not unmet and not unexpected:
            return None
        lines = [f"expected, and not seen: {expectation}" for expectation in unmet]
        lines += [f"seen, and not expected: {violation.description}" for violation in unexpected]
        others = [violation for violation in self._seen if not any(violation is u for u in unexpected)]
        lines += [f"also seen: {violation.description}" for violation in others]
        if not self._seen:
            lines.append(f"Nothing was seen; {_number(probes_run or 0, 'probe')} run in this process.")
        return pytest.fail.Exception("\n".join(lines), pytrace=False)


def _pending() -> list[Violation]:
    """Wait for the devices, and take what nobody has looked at; an error of a device is raised as it is."""
    try:
        multiassert.raise_if_error()
    except AsyncAssertionError as error:
        return list(error.violations)
    return []


# ---------------------------------------------------------------------------------------------------------------------
# Counting. Nothing of it is there while the plugin is not used.


@dataclasses.dataclass
class Tally:
    """The numbers of a run, or of one worker of it."""

    probes: int = 0
    sites: set[str] = dataclasses.field(default_factory=set)
    violations: int = 0
    expected: int = 0
    outside: list[str] = dataclasses.field(default_factory=list)  # descriptions of violations of no test
    platforms: dict[str, str] = dataclasses.field(default_factory=dict)
    fired: dict[str, int] = dataclasses.field(default_factory=dict)  # violations of each probe, with coverage only

    def as_plain_data(self) -> dict[str, Any]:
        """For the way from a worker, which takes nothing but plain types."""
        return {**dataclasses.asdict(self), "sites": sorted(self.sites)}

    def add(self, other: dict[str, Any]) -> None:
        self.probes += other["probes"]
        self.sites |= set(other["sites"])
        self.violations += other["violations"]
        self.expected += other["expected"]
        self.outside += other["outside"]
        self.platforms |= other["platforms"]
        for probe, violations in other["fired"].items():
            self.fired[probe] = self.fired.get(probe, 0) + violations

    @property
    def never_fired(self) -> list[str]:
        return sorted(probe for probe, violations in self.fired.items() if not violations)

    def __str__(self) -> str:
        expected = f", {self.expected} of them expected" if self.expected else ""
        text = (
            f"{_number(self.probes, 'probe')} run at {_number(len(self.sites), 'site')}, "
            f"{_number(self.violations, 'violation')}{expected}"
        )
        if self.platforms:
            text += f"; {', '.join(f'{name}: {what}' for name, what in sorted(self.platforms.items()))}"
        return text


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@contextlib.contextmanager
def counted(tally: Tally) -> Iterator[None]:
    """Every call of a probe is counted, with its place; those in compiled code are not calls, and are not."""
    probe = dispatch.probe

    def counting(*arguments: Any, **named: Any) -> RuntimeError | None:
        if not torch.compiler.is_compiling():
            _count(tally)
        return probe(*arguments, **named)

    dispatch.probe = counting
    try:
        yield
    finally:
        dispatch.probe = probe


def _count(tally: Tally) -> None:
    frame = sys._getframe(2)
    if frame.f_code.co_filename == transforms.__file__:
        return  # the inner call of a probe under a transform, which has been counted
    while frame.f_back is not None and not sites.is_callers(frame.f_code.co_filename):
        frame = frame.f_back
    tally.probes += 1
    tally.sites.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")


# ---------------------------------------------------------------------------------------------------------------------
# The run.

WATCH = pytest.StashKey["Watch"]()


def watch_of(config: pytest.Config) -> Watch:
    """What follows the tests of this run, started by the first call."""
    if WATCH not in config.stash:
        config.stash[WATCH] = watch = Watch(config)
        config.pluginmanager.register(watch, "multiassert-watch")
    return config.stash[WATCH]


class _Test:
    """A test that is watched, from its setup to its teardown."""

    def __init__(self, probes_before: int) -> None:
        self.violations = AsyncViolations()
        self.probes_before = probes_before
        self.scope = contextlib.ExitStack()
        self.verdict: BaseException | None = None  # of the phase that has just ended


class Watch:
    """Drains when a test's call and its teardown have ended, and fails that test. A plugin, while it is needed."""

    def __init__(self, config: pytest.Config) -> None:
        self.watches_all = False  # else only the tests that expect violations
        self._config = config
        self._tally = Tally()
        self._tests: dict[pytest.Item, _Test] = {}
        counting = contextlib.ExitStack()
        counting.enter_context(counted(self._tally))
        self._coverage: injection.Coverage | None = None
        if config.getoption("multiassert_coverage"):
            self._coverage = counting.enter_context(injection.coverage())
        config.add_cleanup(counting.close)

    def violations_of(self, item: pytest.Item) -> AsyncViolations:
        """What the fixture of that test is."""
        return self._tests[item].violations

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        __tracebackhide__ = True
        expects = expects_violations(item)
        if self.watches_all or expects:
            self._take_what_no_test_left()
            test = self._tests[item] = _Test(self._tally.probes)
            test.scope.callback(multiassert.on_violation(lambda violation: test.violations._note([violation])))
            if expects and not settings.active:
                test.scope.enter_context(multiassert.override("raise"))
        yield
        for marker in item.iter_markers(MARKER):  # each makes the test one that expects, so it is watched
            _expect_as_marked(self.violations_of(item), marker)

    # Next to the phase itself (trylast), so that what draining logs is in the test's own log.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        __tracebackhide__ = True
        test = self._tests.get(item)
        if test is None:
            return (yield)
        error: BaseException | None = None
        try:
            yield
            error = _violations_kept_by_unittest(item, test)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception) as raised:
            error = raised
        is_about_violations = isinstance(error, AsyncAssertionError) and bool(test.violations._expected)
        self._judge(test, error if is_about_violations else None, self._tally.probes - test.probes_before)
        gives_way = is_about_violations or (isinstance(error, pytest.skip.Exception) and test.verdict is not None)
        if error is not None and not gives_way:
            raise error  # its own failure stays; the verdict becomes a section of the report
        if test.verdict is not None:
            raise test.verdict
        return None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        __tracebackhide__ = True
        test = self._tests.get(item)
        if test is None:
            return (yield)
        try:
            yield
        finally:
            self._judge(test, None, None)
            test.scope.close()
            self._tally.violations += len(test.violations._seen)
            self._tally.expected += sum(map(test.violations._is_expected, test.violations._seen))
        if test.verdict is not None:
            raise test.verdict
        return None

    def _judge(self, test: _Test, error: BaseException | None, probes_run: int | None) -> None:
        """Drain, and decide whether the phase that has ended fails; `error` is one that tells violations itself."""
        test.verdict = None
        try:
            test.violations._untaken = [*getattr(error, "violations", ()), *_pending()]
        except RuntimeError as failure:  # of a device
            test.verdict = failure
            return
        test.violations._note(test.violations._untaken)
        test.verdict = test.violations._verdict(probes_run)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        test = self._tests.get(item)
        if test is None or call.when == "setup":
            return report
        if test.verdict is not None:
            if call.excinfo is None or call.excinfo.value is not test.verdict:
                report.sections.append((f"{HEADING}: seen when the {call.when} had ended", str(test.verdict)))
            elif report.failed:
                report.longrepr = call.excinfo.getrepr(style="value")  # the traceback is ours, and tells nothing
        if call.when == "teardown":
            del self._tests[item]
        return report

    # The session.

    def _take_what_no_test_left(self) -> None:
        """Violations of no test: of an import, of a thread. They must not fail the test that is run next."""
        for violation in _pending():
            self._tally.outside.append(violation.description)
            self._tally.violations += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        try:
            self._take_what_no_test_left()
        except RuntimeError as failure:
            self._tally.outside.append(str(failure))
        if pytest_platforms.PLATFORMS in self._config.stash:
            self._tally.platforms |= self._config.stash[pytest_platforms.PLATFORMS].found
        if self._coverage is not None:
            fired = {str(each): each.violations for each in self._coverage.sites}
            self._tally.add({**Tally().as_plain_data(), "fired": fired})
        is_covered = bool(self._tally.fired) and not self._tally.never_fired
        must_fail = self._tally.outside or (self._requires_coverage and not is_covered)
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[HEADING] = self._tally.as_plain_data()
        elif must_fail and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _requires_coverage(self) -> bool:
        return bool(self._config.getoption("multiassert_coverage") == "require")

    def add_worker(self, told: dict[str, Any]) -> None:
        """Add what a worker of pytest-xdist has counted."""
        self._tally.add(told)

    def pytest_report_header(self) -> str | None:
        modes = settings.current
        platforms = [f", {platform}: {mode.value}" for platform, mode in modes.by_platform.items()]
        return f"{HEADING}: mode {modes.default.value}{''.join(platforms)}" if self.watches_all else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._tally.outside:
            terminalreporter.section(f"{HEADING}: violations outside of any test", red=True)
            for description in self._tally.outside:
                terminalreporter.line(description)
        never_fired = self._tally.never_fired
        if self._config.getoption("multiassert_coverage") and not self._tally.fired:
            terminalreporter.line(f"{HEADING}: no probe was called, so none was seen to fire: are they on?", red=True)
        if never_fired:
            title = f"{HEADING}: {len(never_fired)} of {_number(len(self._tally.fired), 'probe')} never seen to fire"
            terminalreporter.section(title, red=self._requires_coverage)
            for probe in never_fired:
                terminalreporter.line(probe)
        if self.watches_all or self._tally.probes or self._tally.platforms:
            terminalreporter.line(f"{HEADING}: {self._tally}")


def expects_violations(item: pytest.Item) -> bool:
    """Whether a test has the marker or the fixture."""
    return MARKER in getattr(item, "fixturenames", ()) or item.get_closest_marker(MARKER) is not None


def _expect_as_marked(violations: AsyncViolations, marker: pytest.Mark) -> None:
    __tracebackhide__ = True
    try:
        violations.expect(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as error:
        problem = f"@pytest.mark.{MARKER}: {error} It takes kind=, site= and row=, all optional."
        raise pytest.fail.Exception(problem, pytrace=False) from None


def _violations_kept_by_unittest(item: pytest.Item, test: _Test) -> AsyncAssertionError | None:
    """The error of a unittest.TestCase's method that expects it: pytest keeps it there instead of raising it."""
    kept = getattr(item, "_excinfo", None) or []
    if test.violations._expected and len(kept) == 1 and isinstance(kept[0].value, AsyncAssertionError):
        error: AsyncAssertionError = kept.pop().value
        return error
    return None
