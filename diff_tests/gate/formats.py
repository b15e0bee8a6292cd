"""A gate's result for other programs: JUnit XML, and the annotations of GitHub Actions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diff_tests.gate.report import entries
from diff_tests.gate.running import Candidate, Entry, Result
from diff_tests.report import headline

if TYPE_CHECKING:
    from junitparser import TestSuite


def write_junit(result: Result, path: Path) -> None:
    """JUnit XML: one suite a candidate, a test for each case that was run, failed where it shows a new failure.

    Raises ModuleNotFoundError without junitparser, OSError.
    """
    from junitparser import JUnitXml

    xml = JUnitXml("kvoracle gate")
    for candidate in result.candidates:
        xml.add_testsuite(_suite(candidate))
    path.parent.mkdir(parents=True, exist_ok=True)
    xml.write(str(path), pretty=True)


def _suite(candidate: Candidate) -> TestSuite:
    from junitparser import Error, Failure, TestCase, TestSuite

    suite = TestSuite(candidate.name)
    tests = []
    for name, new in candidate.results:
        test = TestCase(name, classname=candidate.name)
        test.result = [Failure(finding.message, headline(finding)) for finding in new]
        tests.append(test)
    if candidate.error is not None:
        test = TestCase("start", classname=candidate.name)
        test.result = [Error(candidate.error)]
        tests.append(test)
    suite.add_testcases(tests)
    return suite


def github_lines(result: Result) -> list[str]:
    """Workflow commands, a line each: errors for new failures, warnings for changes, notices for what is fixed."""
    lines = []
    for candidate in result.candidates:
        if candidate.error is not None:
            lines.append(_command("error", candidate, "could not be run", candidate.error))
        lines += [
            _command("error" if entry.word == "new failure" else "notice", candidate, _title(entry), entry.finding.message)
            for entry in entries(candidate)
            if entry.word in ("new failure", "fixed")
        ]
        lines += [
            _command("warning", candidate, _title(entry), entry.finding.message) for entry in candidate.changes.values()
        ]
    return lines


def _title(entry: Entry) -> str:
    return f"{entry.word or 'behaviour change'}: {headline(entry.finding)}"


def _command(level: str, candidate: Candidate, title: str, message: str) -> str:
    properties = {"file": candidate.connector} if candidate.connector and Path(candidate.connector).is_file() else {}
    properties["title"] = f"{candidate.name}: {title}"
    written = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    return f"::{level} {written}::{_escaped(message)}"


def _escaped(value: Any, also: str = "") -> str:
    """Characters that would end a workflow command, or one of its properties, as GitHub wants them."""
    return "".join(f"%{ord(char):02X}" if char in "%\r\n" + also else char for char in str(value))
