"""The pytest plugin, in runs of pytest of their own: each starts a process, so tests share them where they can."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import multiassert
from multiassert import maybe_detect_nan, maybe_detect_oob, sites
from multiassert.pytest_children import logged_violations, run_in_child_process
from multiassert.pytest_platforms import names_of_environment
from multiassert.pytest_plugin import Tally, counted

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pytest_project"


class Outcome(NamedTuple):
    """What became of a test: the outcomes of its phases, and all that was told about it."""

    outcome: str  # passed, failed, error or skipped
    text: str


class Run(NamedTuple):
    """A run of pytest that has ended."""

    code: int
    output: str
    tests: dict[str, Outcome]

    def outcomes(self) -> dict[str, str]:
        return {name: test.outcome for name, test in self.tests.items()}


RunPytest = Callable[..., Run]


@pytest.fixture(scope="module")
def run_pytest(tmp_path_factory: pytest.TempPathFactory) -> RunPytest:
    """Run pytest in a folder with the given files, with the plugin found by its entry point, as if installed."""
    site = tmp_path_factory.mktemp("site")
    information = site / "multiassert_of_the_test-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: multiassert-of-the-test\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[pytest11]\npytest_multiassert = pytest_multiassert\n")

    def run(files: dict[str, str] | pathlib.Path, *options: str, **environment: str) -> Run:
        if isinstance(files, pathlib.Path):
            folder = files
        else:
            folder = tmp_path_factory.mktemp("project")
            for name, text in {"pytest.ini": "[pytest]\n", **files}.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
        report = tmp_path_factory.mktemp("report") / "report.xml"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MULTIASSERT", "SGLANG", "PYTEST"))}
        path = os.pathsep.join([str(ROOT), str(site)])
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
        ended = subprocess.run(
            command,
            cwd=folder,
            env={
                **inherited,
                "PYTHONPATH": path,
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        tests = read_report(report) if report.exists() else {}
        return Run(ended.returncode, ended.stdout + ended.stderr, tests)

    return run


def read_report(path: pathlib.Path) -> dict[str, Outcome]:
    tests: dict[str, Outcome] = {}
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = problems[-1].tag.replace("failure", "failed") if problems else "passed"
        tests[case.attrib["name"]] = Outcome(outcome, "".join(case.itertext()))
    return tests


PROJECT = """
import unittest

import pytest
import torch

import multiassert
from multiassert import maybe_detect_nan, maybe_detect_oob, maybe_warn_nan


def bad(row):
    tensor = torch.zeros(4, 8)
    tensor[row] = float("nan")
    return tensor


def test_pending():
    maybe_detect_nan(bad(1), "pending")


def test_after_pending():
    maybe_detect_nan(bad(1)[:1], "clean")


def test_own_failure():
    maybe_detect_nan(bad(2), "beside")
    assert "own" == "failure"


def test_after_own_failure():
    pass


@pytest.fixture
def faulty_teardown():
    yield
    maybe_detect_nan(bad(3), "teardown")


def test_teardown(faulty_teardown):
    pass


def test_after_teardown():
    pass


def test_skips():
    maybe_detect_nan(bad(0), "skips")
    pytest.skip("it gives up")


def test_warns():
    maybe_warn_nan(bad(0), "warns")


def test_takes_it():
    maybe_detect_nan(bad(0), "taken")
    with pytest.raises(multiassert.AsyncAssertionError):
        multiassert.raise_if_error()


@pytest.mark.xfail(raises=multiassert.AsyncAssertionError, strict=True)
def test_xfail():
    maybe_detect_nan(bad(0), "expected to fail")


class TestUnittest(unittest.TestCase):
    def test_u_pending(self):
        maybe_detect_nan(bad(1), "u pending")

    def test_u_after(self):
        pass

    def test_u_own_failure(self):
        maybe_detect_nan(bad(2), "u beside")
        self.assertEqual("own", "failure")

    @pytest.mark.async_violations(kind="nan", site="u expected")
    def test_u_expected(self):
        maybe_detect_nan(bad(2), "u expected")
        multiassert.raise_if_error()
"""

EXPECTING = """
from test_project import *  # noqa


@pytest.mark.async_violations(kind="nan", site="the logits", row=1)
def test_expected_and_seen():
    maybe_detect_nan(bad(1), "the logits")


@pytest.mark.async_violations(kind="nan", site="the logits", row=1)
def test_expected_and_raised():
    maybe_detect_nan(bad(1), "the logits")
    multiassert.raise_if_error()
    raise AssertionError("not reached")


@pytest.mark.async_violations(kind="nan", site="the logits", row=1)
def test_expected_and_none():
    maybe_detect_nan(bad(1)[2:], "the logits")


@pytest.mark.async_violations(kind="nan", site="the logits", row=1)
def test_expected_and_another():
    maybe_detect_nan(bad(2), "the logits")


@pytest.mark.async_violations(kind="nan", site="the logits", row=1)
def test_expected_beside_another():
    maybe_detect_nan(bad(1), "the logits")
    maybe_detect_oob(torch.tensor([7]), 0, 5, "the ids")


@pytest.mark.async_violations(kind="nan")
def test_expected_with_own_failure():
    maybe_detect_nan(bad(1), "the logits")
    assert "own" == "failure"


@pytest.mark.async_violations(kind="nun")
def test_bad_kind():
    pass


@pytest.mark.async_violations("nan")
def test_bad_argument():
    pass


@pytest.mark.async_violations(site=".py:", row="request-1")
def test_row_by_name():
    maybe_detect_nan(bad(1), "rows")
    multiassert.step(rows=["request-0", "request-1", "request-2", "request-3"])


def test_fixture_expects(async_violations):
    async_violations.expect(kind="low")
    maybe_detect_oob(torch.tensor([-7]), 0, 5, "the ids")


def test_fixture_drains(async_violations):
    maybe_detect_nan(bad(1), "drained")
    assert [violation.rows for violation in async_violations.drain()] == [(1,)]
"""

PLACES = """
from test_project import bad, maybe_detect_nan, multiassert, pytest, torch


def test_places():
    compiled = torch.compile(lambda x: (maybe_detect_nan(x, "compiled"), x + 1)[1], backend="eager", fullgraph=True)
    with pytest.raises(multiassert.AsyncAssertionError, match=r"test_places.py:\\d+ in <lambda>"):
        compiled(bad(1))
        multiassert.raise_if_error()
    mapped = torch.vmap(lambda x: (maybe_detect_nan(x, "mapped"), x)[1])
    with pytest.raises(multiassert.AsyncAssertionError, match=r"test_places.py:\\d+ in <lambda>"):
        mapped(bad(1))
        multiassert.raise_if_error()
"""

FILES = {"test_project.py": PROJECT, "test_expecting.py": EXPECTING}


@pytest.fixture(scope="module")
def raising(run_pytest: RunPytest) -> Run:
    """Everything, in mode raise."""
    return run_pytest({**FILES, "test_places.py": PLACES}, "--multiassert", "raise")


def test_a_violation_fails_the_test_that_caused_it_and_not_the_next_one(raising: Run) -> None:
    outcomes = raising.outcomes()
    assert outcomes["test_pending"] == outcomes["test_u_pending"] == "failed", raising.output
    assert outcomes["test_after_pending"] == outcomes["test_u_after"] == "passed"
    text = raising.tests["test_pending"].text
    assert "NaN detected! pending" in text
    assert re.search(r"test_project.py:\d+ in test_pending", text)
    assert "pytest_plugin" not in text


def test_a_test_that_fails_keeps_its_own_failure_and_tells_the_violation_too(raising: Run) -> None:
    for name, message in (("test_own_failure", "beside"), ("test_u_own_failure", "u beside")):
        test = raising.tests[name]
        assert test.outcome == "failed"
        assert "own" in test.text
        assert "AssertionError" in test.text
        section = raising.output[raising.output.index(f"NaN detected! {message}") - 200 :]
        assert "multiassert: seen when the call had ended" in section
    assert raising.outcomes()["test_after_own_failure"] == "passed"


def test_a_violation_of_the_teardown_is_an_error_of_that_test(raising: Run) -> None:
    outcomes = raising.outcomes()
    assert outcomes["test_teardown"] == "error"
    assert "NaN detected! teardown" in raising.tests["test_teardown"].text
    assert outcomes["test_after_teardown"] == "passed"


def test_neither_a_skip_nor_a_probe_that_only_warns_hides_a_violation(raising: Run) -> None:
    assert raising.outcomes()["test_skips"] == raising.outcomes()["test_warns"] == "failed"


def test_what_a_test_has_taken_itself_fails_nothing(raising: Run) -> None:
    assert raising.outcomes()["test_takes_it"] == "passed"
    assert raising.outcomes()["test_xfail"] == "skipped", "pytest's word for xfailed in the report"


@pytest.mark.parametrize("run", ["raising", "without_mode"])
def test_expected_violations(run: str, request: pytest.FixtureRequest) -> None:
    ended: Run = request.getfixturevalue(run)
    expecting = {name: test.outcome for name, test in ended.tests.items() if "expected" in name}
    assert expecting == {
        "test_expected_and_seen": "passed",
        "test_expected_and_raised": "passed",
        "test_expected_and_none": "failed",
        "test_expected_and_another": "failed",
        "test_expected_beside_another": "failed",
        "test_expected_with_own_failure": "failed",
        "test_u_expected": "passed",
    }, ended.output
    none = ended.tests["test_expected_and_none"].text
    assert "expected, and not seen: kind='nan', site='the logits', row=1" in none
    assert "Nothing was seen; 1 probe run in this process." in none
    another = ended.tests["test_expected_and_another"].text
    assert "expected, and not seen: kind='nan', site='the logits', row=1" in another
    assert "seen, and not expected: NaN detected! the logits" in another
    beside = ended.tests["test_expected_beside_another"].text
    assert "seen, and not expected: index >= 5" in beside
    assert "also seen: NaN detected! the logits" in beside
    assert "expected, and not seen" not in beside
    assert "own" in ended.tests["test_expected_with_own_failure"].text
    for name in ("test_row_by_name", "test_fixture_expects", "test_fixture_drains"):
        assert ended.tests[name].outcome == "passed", ended.output


def test_a_bad_marker_says_what_it_takes(raising: Run) -> None:
    kind, argument = raising.tests["test_bad_kind"], raising.tests["test_bad_argument"]
    assert kind.outcome == argument.outcome == "error"
    assert "Good kinds: nan, inf, low, high, misaligned, range, cond." in kind.text
    assert "It takes kind=, site= and row=" in argument.text
    assert "Traceback" not in kind.text + argument.text


def test_counting_keeps_the_places_of_probes_and_breaks_no_graph(raising: Run) -> None:
    assert raising.outcomes()["test_places"] == "passed", raising.tests["test_places"].text


@pytest.fixture(scope="module")
def without_mode(run_pytest: RunPytest) -> Run:
    """Probes are off, but for the tests that expect something."""
    return run_pytest(FILES)


def test_without_a_mode_only_tests_that_expect_violations_have_probes(without_mode: Run) -> None:
    assert without_mode.outcomes()["test_pending"] == "passed"
    assert without_mode.outcomes()["test_xfail"] == "failed", "strict, and no violation"


def test_mode_warn_fails_the_same_tests(raising: Run, run_pytest: RunPytest) -> None:
    warning = run_pytest({"test_project.py": PROJECT}, MULTIASSERT="warn")
    assert warning.outcomes() == {name: raising.outcomes()[name] for name in warning.tests}, warning.output
    assert 'message="pending"' in warning.output, "its log line is among what was captured of the test"


def test_the_example_and_its_summary_over_workers(run_pytest: RunPytest) -> None:
    """The ini option, children of a unittest class, and pytest-xdist."""
    run = run_pytest(EXAMPLE, "-n", "2", MULTIASSERT_KERNELS="torch")  # which is no mode
    assert run.outcomes() == {
        "test_a_fault_that_nobody_looks_at": "failed",
        "test_the_next_one": "passed",
        "test_a_fault_is_seen": "passed",
        "test_a_platform[cpu]": "passed",
        "test_the_probe_before_the_embedding_fires": "passed",
        "test_it_answers": "passed",
        "test_the_log_names_the_row": "passed",
    }, run.output
    assert run.code == 1
    summary = "multiassert: 6 probes run at 2 sites, 3 violations, 2 of them expected; cpu: real\n"
    assert run.output.count(summary) == 1
    assert "1 failed, 6 passed" in (EXAMPLE / "README.md").read_text()


PLATFORMS_AND_CHILDREN = """
import os, resource, signal

import pytest
import torch

from multiassert import maybe_detect_nan


@pytest.mark.async_violations(kind="nan", row=2)
def test_device(multiassert_platform, multiassert_device):
    assert multiassert_device.type == multiassert_platform
    tensor = torch.zeros(4, 8)
    tensor[2] = float("nan")
    maybe_detect_nan(tensor.to(multiassert_device), "on the device")


_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # a child writes none all the same


def in_the_child(device_type):
    tensor = torch.full((2, 2), float("nan"), device=device_type)
    print(tensor.device.type, os.environ["MULTIASSERT"], resource.getrlimit(resource.RLIMIT_CORE)[0])
    maybe_detect_nan(tensor, "in the child")


def test_function(multiassert_platform, run_in_child_process):
    ended = run_in_child_process(in_the_child, multiassert_platform)
    assert ended.stdout == f"{multiassert_platform} raise 0\\n", ended.stderr
    assert (ended.returncode, ended.signal) == (1, None)
    assert "NaN detected! in the child" in ended.stderr


def test_code(run_in_child_process):
    ended = run_in_child_process("import os; os.abort()", env={"MULTIASSERT": None})
    assert ended.signal is signal.SIGABRT


def test_hangs(run_in_child_process):
    run_in_child_process("import time; time.sleep(1000)", timeout=1)
"""


def test_platforms_and_children(run_pytest: RunPytest) -> None:
    # A folder whose name is none for Python: pytest gives the module another one, which no child process can import.
    files = {"a.folder/test_project.py": PLATFORMS_AND_CHILDREN}
    run = run_pytest(
        files, "--multiassert-platform", "cpu,musa,npu", "--multiassert", "raise", "--import-mode=importlib"
    )
    assert run.outcomes() == {
        "test_device[cpu]": "passed",
        "test_device[musa]": "passed",
        "test_device[npu]": "skipped",
        "test_function[cpu]": "passed",
        "test_function[musa]": "passed",
        "test_function[npu]": "skipped",
        "test_code": "passed",
        "test_hangs": "failed",
    }, run.output
    assert "this process simulates musa already" in run.tests["test_device[npu]"].text
    assert "; cpu: real, musa: simulated\n" in run.output
    assert "did not end within 1 seconds and was killed" in run.tests["test_hangs"].text


UNRELATED = """
import sys

def test_neither_is_imported():
    assert not {"torch", "multiassert"} & set(sys.modules)
    assert "pytest_multiassert" in sys.modules
"""


@pytest.mark.parametrize(
    "options",
    [(), ("-p", "pytest_multiassert"), ("-p", "no:xdist")],
)
def test_a_project_that_does_not_use_it_imports_nothing(options: tuple[str, ...], run_pytest: RunPytest) -> None:
    conftest = 'pytest_plugins = ["pytest_multiassert"]\n'
    run = run_pytest({"test_project.py": UNRELATED, "conftest.py": conftest}, *options)
    assert run.outcomes() == {"test_neither_is_imported": "passed"}, run.output
    assert "multiassert:" not in run.output


def test_it_can_be_left_out(run_pytest: RunPytest) -> None:
    text = UNRELATED.replace('"pytest_multiassert" in', '"pytest_multiassert" not in')
    run = run_pytest({"test_project.py": text}, "-p", "no:multiassert")
    assert run.outcomes() == {"test_neither_is_imported": "passed"}, run.output


# In this process, since nothing is left behind by these, which the second one shows.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--multiassert", "rase"], "--multiassert='rase' is no mode of multiassert. Good values: off"),
        (["-o", "multiassert=rase"], "the ini option multiassert='rase' is no mode of multiassert. Good values: off"),
        (["--multiassert-platform", "cpu,ascend"], "ascend is no platform. Good names: cpu, cuda, rocm, npu"),
        (["--multiassert-require", "rocm"], "--multiassert-require rocm: rocm is not there: this torch"),
    ],
)
def test_bad_usage_says_what_is_good(options: list[str], message: str, pytester: pytest.Pytester) -> None:
    run = pytester.runpytest_inprocess("-p", "pytest_multiassert", *options)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert message in run.stderr.str()
    assert "Traceback" not in run.stderr.str()


def test_a_violation_outside_of_any_test_fails_the_run_and_no_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, torch, multiassert

        assert os.environ["MULTIASSERT"] == "warn"
        multiassert.maybe_detect_nan(torch.full((2,), float("nan")), "at import")

        def test_it():
            pass
        """
    )
    probe = multiassert.dispatch.probe
    run = pytester.runpytest_inprocess("-p", "pytest_multiassert", "-p", "no:xdist", "--multiassert", "warn")
    run.assert_outcomes(passed=1)
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*multiassert: violations outside of any test*", "NaN detected! at import"])
    run.stdout.fnmatch_lines(["multiassert: 1 probe run at 1 site, 1 violation"])
    assert "MULTIASSERT" not in os.environ
    assert not multiassert.settings.active
    assert multiassert.dispatch.probe is probe


COVERED = """
import pytest, torch
from multiassert import maybe_detect_nan, maybe_detect_oob

def run():
    maybe_detect_nan(torch.zeros(2), "logits")
    maybe_detect_oob(torch.zeros(2, dtype=torch.int64), 0, 5, "ids")

@pytest.mark.async_violations(kind="nan", row=1)
def test_logits(poison_probe):
    with poison_probe("logits", row=1):
        run()

@pytest.mark.async_violations
def test_ids(poison_probe):
    with poison_probe({ids!r}):
        run()
"""


@pytest.mark.parametrize(
    ("option", "ids", "code", "lists"),
    [
        ("--multiassert-coverage", "logits", pytest.ExitCode.OK, True),
        ("--multiassert-coverage=require", "logits", pytest.ExitCode.TESTS_FAILED, True),
        ("--multiassert-coverage=require", "ids", pytest.ExitCode.OK, False),
        ("--multiassert=raise", "logits", pytest.ExitCode.OK, False),
    ],
)
def test_coverage_lists_the_probes_that_no_test_has_seen_fire(
    option: str,
    ids: str,
    code: pytest.ExitCode,
    lists: bool,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sites, "_made_beforehand", {})  # those of other tests in this process
    pytester.makepyfile(COVERED.format(ids=ids))
    run = pytester.runpytest_inprocess("-p", "pytest_multiassert", "-p", "no:xdist", option)
    run.assert_outcomes(passed=2)
    assert run.ret == code
    mine = [line for line in run.outlines if line.startswith("ids (bounds) at ") and line.endswith(" in run")]
    assert bool(mine) is lists
    assert not any(line.startswith("logits (") for line in run.outlines)


def test_coverage_is_not_there_where_no_probe_was_called(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "_made_beforehand", {})
    pytester.makepyfile(COVERED.format(ids="ids").partition("@pytest")[0] + "\ndef test_run():\n    run()\n")
    run = pytester.runpytest_inprocess("-p", "pytest_multiassert", "-p", "no:xdist", "--multiassert-coverage=require")
    run.assert_outcomes(passed=1)
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["multiassert: no probe was called, so none was seen to fire: are they on?"])


def test_log_lines_are_read_as_they_were_written(caplog: pytest.LogCaptureFixture) -> None:
    with multiassert.override("warn"):
        maybe_detect_oob(torch.tensor([[3], [-7]]), 0, 5, 'ids "of" a=b\nrequest]')
        maybe_detect_nan(torch.full((), float("nan")), "a scalar")
        maybe_detect_nan(torch.full((600, 2), float("nan")), "many rows")
        multiassert.step(tag="t", rows=["a", 'b "] c'])
        violations = multiassert.drain()
    logged = logged_violations("a line\n" + "\n".join(record.getMessage() for record in caplog.records))
    assert len(logged) == len(violations) == 3
    for line, violation in zip(logged, violations, strict=True):
        assert (line.kind, line.message, line.platform) == (violation.kind, violation.message, violation.platform)
        assert line.site == f"{violation.site.file}:{violation.site.line}:{violation.site.function}"
        assert line.rows == violation.rows[:32]
        assert line.row_names == (None if violation.row_names is None else violation.row_names[:32])
        assert (line.value, line.step, line.rank) == (str(violation.value), str(violation.step), violation.rank)
        assert line.bound == (None if violation.bound is None else str(violation.bound))
    assert logged_violations("multiassert violation of a rule of ours") == []


def test_calls_are_counted_once_and_by_their_place() -> None:
    def probe_rows(tensor: torch.Tensor) -> None:
        torch.vmap(lambda row: (maybe_detect_nan(row, "mapped"), row)[1])(tensor)
        torch.compile(lambda x: (maybe_detect_nan(x, "compiled"), x + 1)[1], backend="eager", fullgraph=True)(tensor)

    tally = Tally()
    with multiassert.override("warn"), counted(tally):
        for _ in range(3):
            probe_rows(torch.full((2, 2), float("nan")))
        violations = multiassert.drain()
    assert tally.probes == 3
    assert [(v.site.file, v.site.function) for v in violations] == [(__file__, "<lambda>")] * 2
    assert tally.sites == {f"{__file__}:{violations[0].site.line}"}


def test_what_cannot_go_to_a_child_is_refused_at_the_call() -> None:
    with pytest.raises(TypeError, match="Pass a function at the top level of a module"):
        run_in_child_process(lambda: None)


def test_torchs_own_variables_choose_platforms() -> None:
    assert names_of_environment({}) == ("cpu",)
    assert names_of_environment({"PYTORCH_TESTING_DEVICE_ONLY_FOR": "musa, cpu,musa"}) == ("musa", "cpu")
    assert names_of_environment({"PYTORCH_TESTING_DEVICE_ONLY_FOR": "privateuse1"}) in (("npu",), ("musa",))
    assert names_of_environment({"PYTORCH_TESTING_DEVICE_EXCEPT_FOR": "cpu"}) == ()
