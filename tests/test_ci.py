"""The settings for CI jobs, as the formats' own readers take them, and the workflow and the page that show them."""

from __future__ import annotations

import argparse
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from multiassert import backends, ci, settings
from multiassert.__main__ import main
from multiassert.settings import Mode

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text()
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"

VALUES = {"A": "raise", "B": "off", "C": 'it\'s "x" $HOME `id` \\n #, 1', "D": ""}


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ci.add_arguments(parser)
    return parser.parse_args(arguments)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert ci.run(parse(*arguments)) == 0
    return capsys.readouterr().out


def test_what_is_printed_for_a_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--platform", "npu,cpu") == (
        "# npu: a violation raises AsyncAssertionError some steps later, or ends the process with exit code 1.\n"
        "# cpu: a violation raises AsyncAssertionError in the probe's own call.\n"
        "env:\n"
        '  MULTIASSERT_NPU: "raise"\n'
        '  MULTIASSERT_CPU: "auto"\n'
    )


def test_github_takes_each_value_as_it_is() -> None:
    assert yaml.safe_load(ci.formatted(VALUES, "github")) == {"env": VALUES}


def test_gitlab_takes_each_value_as_it_is() -> None:
    """GitLab puts variables into values, after YAML has been read: two dollars are one."""
    read = yaml.safe_load(ci.formatted(VALUES, "gitlab"))["variables"]
    assert {name: value.replace("$$", "$") for name, value in read.items()} == VALUES
    assert "$HOME" not in read["C"].replace("$$", "")


def test_a_shell_takes_each_value_as_it_is() -> None:
    script = ci.formatted(VALUES, "shell") + '\nprintf "%s\\0" "$A" "$B" "$C" "$D"'
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split("\0")[:-1] == list(VALUES.values())


def test_docker_takes_each_value_as_it_is() -> None:
    words = shlex.split(ci.formatted(VALUES, "docker"))
    assert words[::2] == ["-e"] * len(VALUES)
    assert words[1::2] == [f"{name}={value}" for name, value in VALUES.items()]


def test_what_is_printed_for_docker_can_stand_in_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--platform", "npu,rocm", "--format", "docker") == (
        "-e MULTIASSERT_NPU=raise -e MULTIASSERT_ROCM=raise\n"
    )


@pytest.mark.parametrize("mode", [mode.value for mode in Mode if mode is not Mode.TRAP])
@pytest.mark.parametrize("form", ci.FORMATS)
def test_what_is_printed_is_what_multiassert_reads(form: str, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--platform", ",".join(ci.MODES), "--mode", mode, "--format", form)
    environment: dict[str, str]
    if form in ("github", "gitlab"):
        (environment,) = yaml.safe_load(text).values()
    else:
        environment = dict(word.split("=", 1) for word in shlex.split(text, comments=True) if "=" in word)
    modes = settings.read_environment(environment, [])
    assert {platform: modes.of(platform).value for platform in ci.MODES} == dict.fromkeys(ci.MODES, mode)


def test_auto_is_the_default_only_where_it_is_known_to_fail_the_job() -> None:
    known = {"cpu", "cuda"}
    assert {platform for platform, (mode, _) in ci.MODES.items() if mode is Mode.AUTO} == known
    assert {mode for platform, (mode, _) in ci.MODES.items() if platform not in known} == {Mode.RAISE}
    assert backends.named("cuda").native is backends.NativeAssert.FIRES
    assert backends.named("cpu").native is backends.NativeAssert.RAISES


def test_a_mode_that_fails_no_job_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does NOT fail the job" in printed(capsys, "--platform", "npu", "--mode", "log")
    assert "no violation fails the job" in printed(capsys, "--platform", "npu", "--mode", "off")
    assert "named('rocm').why()" in printed(capsys, "--platform", "rocm", "--mode", "auto")


def test_a_trap_that_would_wait_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ci.run(parse("--platform", "cuda,npu", "--mode", "trap")) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "--mode trap is refused on npu. " in told.err
    assert "Use raise" in told.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--platform", "npu", "--mode", "rase"], "--mode='rase' is no mode of multiassert. Good values: off"),
        (["--platform", "ascend"], "good names are cuda, rocm, npu, musa, xpu, cpu, with commas between them"),
        (["--platform", "npu", "--format", "jenkins"], "invalid choice: 'jenkins'"),
        ([], "required: --platform"),
    ],
)
def test_bad_usage_says_what_is_good(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    examples = "".join(blocks_of("yaml") + blocks_of("sh"))
    for platform, (mode, _) in ci.MODES.items():
        name = f"MULTIASSERT_{platform.upper()}"
        assert re.search(rf'\b{name}(: "{mode.value}"|={mode.value} |={mode.value}$)', examples, re.MULTILINE), name
        assert f"| `{platform}` | {mode.value} |" in PAGE
    sections = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    assert sections
    assert all(re.search(r"\((not run|run)\b", section) for section in sections)


def test_the_examples_are_yaml() -> None:
    for block in blocks_of("yaml"):
        (job,) = (yaml.safe_load(block).get("jobs") or yaml.safe_load(block)).values()
        variables = job.get("env") or job.get("variables") or {}
        assert all(isinstance(value, str) for value in variables.values()), block


def test_the_workflow_runs_the_versions_that_are_promised() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    oldest_python = re.search(r'requires-python = ">=(\S+)"', project)
    oldest_torch = re.search(r'"torch>=(\S+)"', project)
    newest_torch = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert oldest_python
    assert oldest_torch
    assert newest_torch
    assert matrix["python"] == [oldest_python[1], "3.11", "3.12", "3.13"]
    assert matrix["torch"] == [f"{oldest_torch[1]}.0", newest_torch[1]]


def test_real_platforms_are_off_unless_asked_for() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    choice = workflow[True]["workflow_dispatch"]["inputs"]["platform"]  # `on` is true, in YAML 1.1
    assert choice["default"] == "none"
    assert set(choice["options"]) - {"none"} == set(ci.MODES) - {"cpu"}
    real = workflow["jobs"]["real"]
    assert real["if"] == "github.event_name == 'workflow_dispatch' && inputs.platform != 'none'"
    assert "--multiassert-require" in real["steps"][-1]["run"]


@pytest.mark.parametrize("arguments", [["ci", "--platform", "npu"], ["audit", str(ROOT / "multiassert" / "ci.py")]])
def test_the_command_line_knows_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out
