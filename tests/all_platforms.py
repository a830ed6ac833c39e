"""Run the tests on every platform that can be had on this machine, each in a process of its own, and sum them up.

python -m tests.all_platforms                    cpu, simulated npu, simulated musa and a device of no vendor
python -m tests.all_platforms cpu,npu -- -x      these, with options for pytest
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

PLATFORMS = ("cpu", "npu", "musa", "generic")
ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTS = ("tests", "failures", "errors", "skipped")


def run(platform: str, options: list[str], report: pathlib.Path) -> tuple[int, dict[str, int], float, list[str]]:
    """Run pytest on one platform: its exit code, its counts, its seconds, and the numbers that tests recorded."""
    command = [sys.executable, "-m", "pytest", "--platform", platform, f"--junitxml={report}", *options]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not report.exists():
        return code or 1, dict.fromkeys(COUNTS, 0), 0.0, []
    root = xml.etree.ElementTree.parse(report).getroot()
    suite = root.find("testsuite")
    attributes = {} if suite is None else suite.attrib
    counts = {name: int(attributes.get(name, 0)) for name in COUNTS}
    recorded = [f"{item.attrib['name']}: {item.attrib['value']}" for item in root.iter("property")]
    return code, counts, float(attributes.get("time", 0)), recorded


def main(arguments: list[str]) -> int:
    """Run all, print the sums; returns 0 if every platform ran and passed."""
    chosen, _, rest = " ".join(arguments).partition("--")
    platforms = [name for name in chosen.replace(" ", "").split(",") if name] or list(PLATFORMS)
    worst = 0
    numbers: list[str] = []
    lines = [f"{'platform':10}{'tests':>8}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    with tempfile.TemporaryDirectory() as folder:
        for platform in platforms:
            print(f"\n{platform}", flush=True)
            code, counts, seconds, recorded = run(platform, rest.split(), pathlib.Path(folder, f"{platform}.xml"))
            worst = worst or code
            failed = counts["failures"] + counts["errors"]
            passed = counts["tests"] - failed - counts["skipped"]
            lines.append(
                f"{platform:10}{counts['tests']:8}{passed:8}{failed:8}{counts['skipped']:9}{seconds:9.0f}"
                + (f"   exit code {code}" if code else "")
            )
            numbers += [f"{platform}: {number}" for number in recorded]
    print("\n" + "\n".join([*lines, "", *numbers]))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
