"""Run the tests on every platform that can be had on this machine, each in a process of its own, and sum them up.

python -m tests.all_platforms                    cpu, simulated npu, simulated musa and a device of no vendor
python -m tests.all_platforms cpu,npu -- -x      these, with options for pytest
python -m tests.all_platforms --write            all, and write docs/alive.md from what they saw

Without --write, docs/alive.md must be what the run saw.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

from tests import alive_page, test_alive

PLATFORMS = tuple(alive_page.COLUMNS)
ROOT = pathlib.Path(__file__).resolve().parent.parent
# What takes long and says nothing new there, since it is about what is above the device: another platform runs it.
LEFT_OUT = {
    "musa": (),
    "generic": tuple(f"--ignore=tests/test_{name}.py" for name in ("example_engine", "sinks", "watch")),
}
NOT_TWICE = "--deselect=tests/test_simulate.py::test_these_tests_pass_without_the_compiled_half"
COUNTS = ("tests", "failures", "errors", "skipped")


def run(platform: str, options: list[str], report: pathlib.Path) -> tuple[int, xml.etree.ElementTree.Element]:
    """Run pytest on one platform: its exit code and its report."""
    left_out = (*LEFT_OUT[platform], NOT_TWICE) if platform in LEFT_OUT else ()
    command = [sys.executable, "-m", "pytest", "--platform", platform, f"--junitxml={report}", *left_out, *options]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    nothing = xml.etree.ElementTree.Element("testsuite")
    if not report.exists():
        return code or 1, nothing
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    return code, nothing if suite is None else suite


def summary(platform: str, code: int, suite: xml.etree.ElementTree.Element) -> str:
    """One line of the table that is printed last."""
    tests, failures, errors, skipped = (int(suite.get(name, 0)) for name in COUNTS)
    failed = failures + errors
    line = f"{platform:10}{tests:8}{tests - failed - skipped:8}{failed:8}{skipped:9}{float(suite.get('time', 0)):9.0f}"
    return line + (f"   exit code {code}" if code else "")


def recorded(suite: xml.etree.ElementTree.Element) -> tuple[dict[str, str], dict[str, str]]:
    """What tests recorded: the cells of docs/alive.md, and the other numbers."""
    cells: dict[str, str] = {}
    numbers: dict[str, str] = {}
    # pytest-xdist reports tests as they end; names have the same order each time.
    for case in sorted(suite.iter("testcase"), key=lambda case: (case.get("classname", ""), case.get("name", ""))):
        for item in case.iter("property"):
            name, value = item.attrib["name"], item.attrib["value"]
            if name != "alive":
                numbers[name] = value
                continue
            row, _, seen = value.rpartition(": ")
            skipped = case.find("skipped")
            cells[row] = seen if skipped is None else skipped.get("message", "")
            if case.find("failure") is not None or case.find("error") is not None:
                cells[row] = "**no**"
    return cells, numbers


def check_page(text: str, write: bool) -> int:
    """Write docs/alive.md, or say that it is not what was seen; returns an exit code."""
    if write:
        alive_page.PAGE.write_text(text)
        print(f"written: {alive_page.PAGE.relative_to(ROOT)}")
        return 0
    if alive_page.PAGE.exists() and alive_page.PAGE.read_text() == text:
        print(f"{alive_page.PAGE.relative_to(ROOT)} is what this run saw")
        return 0
    print(f"{alive_page.PAGE.relative_to(ROOT)} is not what this run saw: python -m tests.all_platforms --write")
    return 1


def main() -> int:
    """Run all, print the sums; returns 0 if every platform ran and passed and the page is right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("platforms", nargs="?", default=",".join(PLATFORMS))
    parser.add_argument("--write", action="store_true", help="write docs/alive.md from what the tests saw")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    platforms = options.platforms.split(",")
    worst = 0
    lines = [f"{'platform':10}{'tests':>8}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    cells: alive_page.Cells = {row.name: {} for row in test_alive.rows}
    numbers: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for platform in platforms:
            print(f"\n{platform}", flush=True)
            code, suite = run(platform, given[split + 1 :], pathlib.Path(folder, f"{platform}.xml"))
            worst = worst or code
            lines.append(summary(platform, code, suite))
            cells_here, numbers_here = recorded(suite)
            for row, seen in cells_here.items():
                cells.setdefault(row, {})[platform] = seen
            for name, value in numbers_here.items():
                numbers.setdefault(name, {})[platform] = value
    print("\n" + "\n".join(lines) + "\n")
    for name, by_platform in numbers.items():
        print(f"{name}: {', '.join(f'{platform} {value}' for platform, value in by_platform.items())}")
    if tuple(platforms) == PLATFORMS and not worst:
        worst = check_page(alive_page.page(cells, numbers), options.write)
    return worst


if __name__ == "__main__":
    sys.exit(main())
