"""The audit: each rule finds its bad snippet and not the clean twin; files, output formats and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from multiassert import audit
from multiassert.audit import __main__ as command
from multiassert.audit import sarif
from multiassert.audit.files import parse
from multiassert.audit.finding import Finding
from multiassert.audit.rules import RULES
from multiassert.audit.search import look_at


def findings_in(code: str, tmp_path: pathlib.Path, name: str = "engine.py") -> list[Finding]:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return look_at(parse(file), RULES)


def call(*arguments: str | pathlib.Path) -> int:
    return command.main([str(argument) for argument in arguments])


def in_function(statements: str, header: str = "def forward(x: torch.Tensor, y, mask):") -> str:
    return f"import torch\n{header}\n{textwrap.indent(textwrap.dedent(statements), '    ')}"


# The rule, the bad snippet, and what to use instead.
BAD = [
    ("assert-without-message", "torch._assert_async(ok)", "maybe_assert_async(ok, msg)"),
    ("assert-without-message", "torch._assert_async(~torch.isnan(x).any())", "maybe_detect_nan(x, msg)"),
    ("assert-without-message", "torch.ops.aten._assert_async.default(ok)", "maybe_assert_async(ok, msg)"),
    ("direct-assert", "torch._assert_async(ok, 'bad')", "maybe_assert_async(ok, 'bad')"),
    ("direct-assert", "torch._assert_async(ok, assert_msg='bad')", "maybe_assert_async(ok, 'bad')"),
    ("direct-assert", "torch._assert_async(*both)", "maybe_assert_async(condition, msg)"),
    ("direct-assert", "torch.ops.aten._assert_async.msg(ok, 'bad')", "maybe_assert_async(ok, 'bad')"),
    ("direct-assert", "torch._assert_async(x.sum() == 7, m)", "maybe_assert_sum(x, 7, m)"),
    ("direct-assert", "torch._assert_async(~torch.isinf(x).any(), m)", "maybe_detect_inf(x, m)"),
    ("direct-assert", "torch._assert_async(((x >= 0) & (x < n)).all(), m)", "maybe_detect_oob(x, 0, n, m)"),
    ("direct-assert", "torch._assert_async(~((x < 0) | (x >= n)).any(), m)", "maybe_detect_oob(x, 0, n, m)"),
    ("direct-assert", "torch._assert_async(~(x > 0).any(), m)", "maybe_assert_async(~(x > 0).any(), m)"),
    ("host-check", "if y.isnan().any():\n    raise ValueError", "maybe_detect_nan(y, msg)"),
    ("host-check", "if torch.isnan(y).any():\n    logger.warning('bad')", "maybe_detect_nan(y, msg)"),
    ("host-check", "if torch.isnan(y).any():\n    y = torch.nan_to_num(y)", "maybe_detect_nan(y, msg)"),
    ("host-check", "assert torch.isfinite(y).all()", "maybe_detect_nan(y, msg); maybe_detect_inf(y, msg)"),
    ("host-check", "assert not torch.isinf(y).any().item(), 'bad'", "maybe_detect_inf(y, msg)"),
    ("host-check", "assert torch.isnan(y).sum() == 0", "maybe_detect_nan(y, msg)"),
    ("host-check", "assert not bool(torch.isnan(y).any())", "maybe_detect_nan(y, msg)"),
    ("host-check", "assert (torch.isfinite(y) & (y > 0)).all()", None),
    ("host-check", "found = torch.isnan(y).any()\nif found:\n    raise ValueError", "maybe_detect_nan(y, msg)"),
    ("host-check", "found = torch.isnan(y).any().item()\nif found:\n    raise ValueError", "maybe_detect_nan(y, msg)"),
    ("host-check", "if len(y) > 3 or (x < 0).any():\n    raise ValueError", "maybe_assert_async(~(x < 0).any(), msg)"),
    (
        "host-check",
        "if (x >= 0).all():\n    pass\nelse:\n    raise ValueError",
        "maybe_assert_async((x >= 0).all(), msg)",
    ),
    ("host-check", "assert torch.equal(x, y)", "maybe_assert_async((x == y).all(), msg)"),
    ("host-check", "assert not torch.equal(x, y)", "maybe_assert_async(~(x == y).all(), msg)"),
    ("host-check", "assert torch.allclose(x, y)", "maybe_assert_async(torch.isclose(x, y).all(), msg)"),
    ("host-check", "assert all(t.isfinite().all() for t in y)", "maybe_detect_nan(t, msg); maybe_detect_inf(t, msg)"),
    ("host-check", "if flag and torch.isnan(y).any():\n    raise ValueError", "maybe_detect_nan(y, msg)"),
    ("host-check", "assert True not in torch.isnan(y).any(-1).tolist()", None),
    (
        "cuda-gate",
        "if x.is_cuda:\n    maybe_detect_nan(x, 'm')",
        "maybe_detect_nan(x, 'm'), without a condition around it",
    ),
    ("cuda-gate", "if torch.cuda.is_available() and y:\n    probes.maybe_detect_inf(x, 'm')", None),
    ("cuda-gate", "if not x.is_cuda:\n    return\nmaybe_detect_nan(x, 'm')", None),
    ("cuda-gate", "if y or not x.is_cuda:\n    return\nmaybe_detect_nan(x, 'm')", None),
    ("cuda-gate", "if x.device.type == 'cuda':\n    maybe_assert_async(y, 'm')", None),
    ("unfilled-index", "ids = torch.empty(4, dtype=torch.int64)\nreturn x[ids]", None),
    ("unfilled-index", "ids = torch.empty_like(y)\nreturn x[:, ids]", None),
    ("unfilled-index", "ids = torch.empty_like(y, dtype=torch.long)\nreturn x.index_select(0, ids)", None),
    ("unfilled-index", "ids = y.new_empty(4, dtype=torch.int32)\nx[ids] = 0\nids.fill_(1)", None),
    ("retired-setting", "os.environ['SGLANG_SPEC_NAN_DETECTION'] = '1'", None),
    ("retired-setting", "y = envs.SGLANG_SPEC_OOB_DETECTION.get()", None),
    ("retired-setting", "parser.add_argument('--enable-nan-detection')", None),
    ("retired-setting", "if args.enable_nan_detection:\n    pass", None),
    ("retired-setting", "serve(enable_nan_detection=True)", None),
    ("retired-setting", "run('SGLANG_SPEC_NAN_DETECTION=1')", None),
]

# The clean twins: none of them breaks any rule.
CLEAN = [
    "maybe_assert_async(ok, 'good')",
    "maybe_detect_nan(x, 'good')",
    "self._assert_async(ok)",
    "torch._assert_scalar(ok, 'good')",
    "if numpy.isnan(y).any():\n    raise ValueError",
    "if math.isnan(y):\n    raise ValueError",
    "import metrics\nif metrics.isfinite():\n    raise ValueError",
    "if y.any():\n    raise ValueError",
    "assert (y >= 0).all()",
    "assert y.equal(mask)",
    "if torch.isnan(y).any():\n    y = recompute(y)",
    "if (x < 0).any():\n    x = x.clamp(min=0)",
    "while torch.isnan(y).any():\n    y = refine(y)",
    "found = torch.isnan(y)\nreturn y.masked_fill(found, 0)",
    "if x.shape[0] > 3 and x.numel():\n    raise ValueError",
    "assert x.dim() == 2 and x.size(0) > 1",
    "assert x is not None and x.is_contiguous()",
    "assert not x.is_floating_point()",
    "on_host = x.cpu()\nassert torch.isfinite(on_host).all()",
    "y = y.cpu().float()\nif torch.isnan(y).any():\n    raise ValueError",
    "assert torch.isfinite(torch.from_numpy(y)).all()",
    "assert (torch.tensor(y) >= 0).all()",
    "if x.device.type == 'cpu':\n    assert torch.isfinite(x).all()",
    "assert torch.isfinite(layer.weight).all()",
    "if x.is_cuda:\n    fast(x)\nelse:\n    slow(x)",
    "if x.is_cuda:\n    maybe_detect_nan(x, 'm')\nelse:\n    maybe_detect_nan(x.float(), 'm')",
    "if not x.is_cuda:\n    maybe_detect_nan(x, 'm')",
    "if x.is_cuda:\n    if y:\n        maybe_detect_nan(x, 'm')",
    "if enabled:\n    maybe_detect_nan(x, 'm')",
    "if x.is_cuda:\n    return\nmaybe_detect_nan(x, 'm')",
    "ids = torch.zeros(4, dtype=torch.int64)\nreturn x[ids]",
    "ids = torch.empty(4, dtype=torch.int64)\nids.fill_(0)\nreturn x[ids]",
    "ids = torch.empty(4, dtype=torch.int64)\nids[:] = y\nreturn x[ids]",
    "ids = torch.empty_like(y)\nfill_kernel[(1,)](ids)\nreturn x[ids]",
    "ids = torch.empty_like(y)\ntorch.add(y, 1, out=ids)\nreturn x[ids]",
    "values = torch.empty_like(y)\nreturn values[x]",
    "values = torch.empty(4)\nreturn values[0]",
    "never_an_index = torch.empty(4)\nreturn x[never_an_index]",
    "for _ in y:\n    if mask:\n        x = x[ids]\n    ids = torch.empty_like(y)\n    ids.zero_()",
    "ids = torch.empty_like(y)\ndef fill():\n    ids.zero_()\nfill()\nreturn x[ids]",
    "log('SGLANG_SPEC_NAN_DETECTION is not read any more')",
    "log('--enable-nan-detection was removed')",
    "log('SGLANG_SPEC_NAN_DETECTION=1 has no effect')",
]


@pytest.mark.parametrize(("rule", "statements", "instead"), BAD)
def test_a_rule_finds_what_breaks_it_and_nothing_else(
    rule: str, statements: str, instead: str | None, tmp_path: pathlib.Path
) -> None:
    found = findings_in(in_function(statements), tmp_path)
    assert [finding.rule for finding in found] == [rule]
    assert instead in (None, found[0].instead)
    assert found[0].source in map(str.strip, in_function(statements).splitlines())


@pytest.mark.parametrize("statements", CLEAN)
def test_a_clean_twin_is_not_told(statements: str, tmp_path: pathlib.Path) -> None:
    assert findings_in(in_function(statements), tmp_path) == []


def test_names_are_followed_through_imports(tmp_path: pathlib.Path) -> None:
    code = """
    import torch as t
    from torch import _assert_async as check, isnan, Tensor
    import numpy as np
    from numpy import isinf

    def forward(x: "Tensor | None", y):
        check(x)
        t._assert_async(x, "bad")
        assert not isnan(y).any()
        assert not isinf(y).any()
        assert not np.isnan(y).any()
        assert (x > 0).all()
    """
    rules = ["assert-without-message", "direct-assert", "host-check", "host-check"]
    assert [finding.rule for finding in findings_in(code, tmp_path)] == rules


@pytest.mark.parametrize("name", ["__init__", "load_weights", "weight_loader", "test_it", "warmup"])
def test_code_that_runs_once_may_wait(name: str, tmp_path: pathlib.Path) -> None:
    check = "assert torch.isfinite(x).all()"
    assert findings_in(in_function(check, f"def {name}(x):"), tmp_path) == []
    assert findings_in(f"import torch\n{check.replace('x', 'torch.zeros(1, device=d)')}\n", tmp_path) == []
    assert len(findings_in(in_function(check), tmp_path)) == 1


def test_scripts_in_the_folder_that_is_searched_may_wait(engine: pathlib.Path) -> None:
    (engine / "scripts" / "engine").mkdir(parents=True)
    (engine / "scripts" / "engine" / "bad.py").write_text(in_function("assert torch.isfinite(x).all()"))
    (engine / "bad.py").unlink()
    assert call("--exclude", "layers", ".") == audit.NOTHING_FOUND
    assert call(engine / "scripts") == audit.FOUND
    assert call("scripts/engine/bad.py") == audit.FOUND


def test_no_probe_of_one_tensor_is_suggested_where_two_are_bad_together(tmp_path: pathlib.Path) -> None:
    for statements in (
        "if (x < 0).any() and (x > 9).any():\n    raise ValueError",
        "assert (x > 0).all() or (x < 0).all()",
    ):
        found = findings_in(in_function(statements), tmp_path)
        assert len(found) == 2
        assert all("joined" in finding.instead for finding in found)


def test_a_name_that_is_computed_from_itself_is_no_endless_search(tmp_path: pathlib.Path) -> None:
    code = in_function("while y:\n    seen = not seen\nif seen:\n    raise ValueError\nassert both and one")
    assert findings_in(code, tmp_path) == []


def test_a_place_is_told_in_characters_from_one(tmp_path: pathlib.Path) -> None:
    (finding,) = findings_in("import torch\ntexts = 'äöü€'; torch._assert_async(ok,\n  'm')\n", tmp_path)
    place = (finding.line, finding.column, finding.end_line, finding.end_column)
    assert place == (2, 17, 3, 7)
    assert finding.place.endswith("engine.py:2:17")


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# multiassert: ignore[direct-assert]", 0),
        ("# why: it runs on CUDA only.  # multiassert:ignore[host-check, direct-assert]", 0),
        ("# multiassert: ignore[host-check]", 1),
        ("# multiassert: ignore", 1),
    ],
)
def test_a_comment_on_the_line_silences_the_rule_that_it_names(
    comment: str, count: int, tmp_path: pathlib.Path
) -> None:
    assert len(findings_in(f"torch._assert_async(ok, 'm')  {comment}\n", tmp_path)) == count
    assert len(findings_in(f"torch._assert_async(\n    ok, 'm',\n)  {comment}\n", tmp_path)) == count
    assert len(findings_in(f"{comment}\ntorch._assert_async(ok, '{comment}')\n", tmp_path)) == 1


@pytest.fixture
def engine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder of sources, which is the current one: two bad files, a clean one, a test, and what cannot be read."""
    (tmp_path / "layers").mkdir()
    (tmp_path / "tests").mkdir()
    bad = in_function("torch._assert_async(y)\nassert torch.isfinite(y).all()")
    (tmp_path / "layers" / "a b.py").write_text(bad)
    (tmp_path / "bad.py").write_text(bad)
    (tmp_path / "clean.py").write_text(in_function("maybe_detect_nan(x, 'm')"))
    (tmp_path / "tests" / "helper.py").write_text(bad)
    (tmp_path / "test_it.py").write_text(bad)
    monkeypatch.chdir(tmp_path)
    return tmp_path


UNREADABLE = {
    "syntax.py": (b"def f(:\n", "line 1: "),
    "binary.py": (b"\x00\x01\xff\xfe" * 40, "encoding"),
    "latin.py": ("first = 1\nsecond = 2\ntext = 'ä'\n".encode("latin-1"), "it is not in utf-8: byte 29"),
    "null.py": (b"x = 1\x00\n", "null"),
    "cookie.py": (b"# coding: no-such-code\n", "encoding"),
    "rot13.py": (b"# coding: rot13\nk = 1\n", "rot13"),
    "deep.py": (b"x = " + b"-" * 20_000 + b"1\n", "nested too deeply"),
}


def test_what_cannot_be_read_is_told_and_the_rest_goes_on(
    engine: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (content, _) in UNREADABLE.items():
        (engine / name).write_bytes(content)
    (engine / "nowhere.py").symlink_to(engine / "no such file")
    (engine / "circle.py").symlink_to(engine / "circle.py")
    os.mkfifo(engine / "pipe.py")
    assert call("--json", ".") == audit.FOUND
    found = json.loads(capsys.readouterr().out)
    reasons = {each["path"]: each["why"] for each in found["findings"] if each["rule"] == "unreadable"}
    assert set(reasons) == {*UNREADABLE, "nowhere.py", "circle.py", "pipe.py"}
    assert [name for name, (_, reason) in UNREADABLE.items() if reason not in reasons[name]] == []
    assert found["counts"]["assert-without-message"] == 2
    assert call("--json", "--rule", "direct-assert", ".") == audit.FOUND, "it is told whatever the rule"


def test_a_file_in_the_encoding_that_it_declares_is_read(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "latin.py"
    file.write_bytes("# coding: latin-1\nx = 'ä'; torch._assert_async(ok)\n".encode("latin-1"))
    assert [finding.column for finding in look_at(parse(file), RULES)] == [10]
    file.write_bytes(b"\xef\xbb\xbftorch._assert_async(ok)\r\n\x0ctorch._assert_async(ok)\r\n")
    assert [finding.line for finding in look_at(parse(file), RULES)] == [1, 2]


def test_the_exit_code_tells_whether_something_was_found(
    engine: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("clean.py") == audit.NOTHING_FOUND
    assert call("bad.py", "bad.py", "./bad.py") == audit.FOUND
    assert "1 files read, 2 findings" in capsys.readouterr().out
    assert call("no-such-folder", "bad.py") == audit.CANNOT_RUN
    assert "no such path: no-such-folder" in capsys.readouterr().err
    (engine / "empty").mkdir()
    assert call("empty") == audit.CANNOT_RUN
    assert "no Python file" in capsys.readouterr().err
    assert call("bad.py", "--sarif", "no-such-folder/out.sarif") == audit.CANNOT_RUN
    with pytest.raises(SystemExit) as ended:
        call("--rule", "no-such-rule", ".")
    assert ended.value.code == audit.CANNOT_RUN


@pytest.mark.parametrize(
    ("options", "files", "counts"),
    [
        ([], 3, {"assert-without-message": 2, "host-check": 2}),
        (["--tests"], 5, {"assert-without-message": 4, "host-check": 4}),
        (["--exclude", "layers"], 2, {"assert-without-message": 1, "host-check": 1}),
        (["--exclude", "layers/*", "--exclude", "b?d.py"], 1, {}),
        (["--rule", "host-check"], 3, {"host-check": 2}),
    ],
)
def test_options_choose_files_and_rules(
    options: list[str], files: int, counts: dict[str, int], engine: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("--json", *options, ".") == (audit.FOUND if counts else audit.NOTHING_FOUND)
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == files
    assert {rule: count for rule, count in found["counts"].items() if count} == counts


def test_the_table_tells_each_finding_and_shows_no_markup(
    engine: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (engine / "bad.py").write_text("torch._assert_async(ok)  # [red]not red[/red] \x1b[31m\n")
    assert call(".") == audit.FOUND
    shown = capsys.readouterr().out
    assert "bad.py:1:1" in shown
    assert "maybe_detect_nan(y, msg)" in shown
    assert "Ascend NPU" in shown
    assert "[red]not red[/red]" in shown
    assert "\x1b" not in shown
    assert shown.rstrip().splitlines()[-2].split() == ["│", "unreadable", "│", "0", "│", "0", "│"]


def test_without_rich_json_is_what_there_is(
    engine: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert call("bad.py") == audit.CANNOT_RUN
    assert "pip install rich" in capsys.readouterr().err
    assert call("--json", "bad.py") == audit.FOUND


def test_sarif_has_what_its_schema_and_code_scanning_ask_for(engine: pathlib.Path) -> None:
    (engine / "broken.py").write_text("def f(:\n")
    (engine / "bad.py").write_text("torch._assert_async(ok)\n" * 2 + "torch._assert_async(x, f'{x}')\n")
    assert call(".", "--json", "--sarif", "out.sarif") == audit.FOUND
    log: dict[str, Any] = json.loads((engine / "out.sarif").read_text(encoding="utf-8"))
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "multiassert"
    assert [rule["id"] for rule in rules] == [rule.name for rule in RULES]
    for rule in rules:
        assert all(rule[field]["text"] for field in ("shortDescription", "fullDescription", "help"))
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    assert len(run["results"]) == 6
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        assert "{" not in result["message"]["text"]
        (place,) = (location["physicalLocation"] for location in result["locations"])
        assert place["region"]["startLine"] >= 1
        assert place["region"]["startColumn"] >= 1
        assert place["artifactLocation"]["uriBaseId"] == "%SRCROOT%"
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]}
    assert uris == {"layers/a%20b.py", "bad.py", "broken.py"}
    fingerprints = [result["partialFingerprints"]["multiassert/v1"] for result in run["results"]]
    assert len(set(fingerprints)) == len(fingerprints)


def test_a_fingerprint_outlives_moved_lines(engine: pathlib.Path) -> None:
    code = (engine / "bad.py").read_text()
    before = sarif.log(look_at(parse(pathlib.Path("bad.py")), RULES))["runs"][0]["results"]
    (engine / "bad.py").write_text(f"\n\n{code}")
    after = sarif.log(look_at(parse(pathlib.Path("bad.py")), RULES))["runs"][0]["results"]
    assert [each["partialFingerprints"] for each in before] == [each["partialFingerprints"] for each in after]
    assert before[0]["locations"] != after[0]["locations"]


def test_sarif_of_nothing_found_and_of_files_elsewhere(engine: pathlib.Path, tmp_path_factory: Any) -> None:
    assert call("clean.py", "--sarif", "out.sarif") == audit.NOTHING_FOUND
    assert json.loads((engine / "out.sarif").read_text(encoding="utf-8"))["runs"][0]["results"] == []
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "bad.py"
    elsewhere.write_text("torch._assert_async(ok)\n")
    call(elsewhere, "--sarif", "out.sarif")
    (result,) = json.loads((engine / "out.sarif").read_text(encoding="utf-8"))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": elsewhere.as_uri()}


def test_as_a_command_it_imports_nothing_of_what_it_reads(engine: pathlib.Path) -> None:
    (engine / "clean.py").write_text("raise SystemExit('imported')\n")
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "multiassert.audit", "--json", "."],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (audit.FOUND, "")
    assert json.loads(run.stdout)["files"] == 3
