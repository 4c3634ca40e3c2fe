"""deviceplugin.logs"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from deviceplugin import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def _put_logging_back() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in (None, "deviceplugin", "watchdog")]
    before = [(log, log.handlers[:], log.level, log.propagate) for log in loggers]
    raising = logging.raiseExceptions
    yield
    logging.raiseExceptions = raising
    for log, handlers, level, propagate in before:
        log.propagate = propagate
        log.handlers[:] = handlers
        log.setLevel(level)


def test_a_pipe_gets_one_json_object_a_line() -> None:
    out = io.StringIO()
    logs.set_up(None, "info", out)
    logs.get("monitor").warning("GPU unhealthy", gpu="GPU-1", xid=79, slice=None)
    line = json.loads(out.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning",
        "part": "monitor",
        "event": "GPU unhealthy",
        "gpu": "GPU-1",
        "xid": 79,
        "slice": None,
    }


def test_a_terminal_gets_a_line_to_read() -> None:
    out = Terminal()
    logs.set_up(None, "info", out)
    logs.get("agent").info("registered", devices=8, why='no "good" one', empty="")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d{3} INFO    agent     registered devices=8"
        r' why="no \\"good\\" one" empty=""\n',
        out.getvalue(),
    )


def test_the_format_can_be_chosen() -> None:
    out = Terminal()
    logs.set_up("json", "info", out)
    logs.get("agent").info("x")
    assert json.loads(out.getvalue())["event"] == "x"


def test_what_is_below_the_level_is_not_written() -> None:
    out = io.StringIO()
    logs.set_up("json", "warning", out)
    logs.get("agent").info("x")
    logs.get("agent").debug("x")
    assert out.getvalue() == ""


def test_a_field_never_hides_ours_and_line_breaks_do_not_make_lines() -> None:
    for form in ("json", "text"):
        out = io.StringIO()
        logs.set_up(form, "info", out)
        logs.get("agent").info("x", level="none", text="a\nb")
        assert out.getvalue().count("\n") == 1
    logs.set_up("json", "info", out := io.StringIO())
    logs.get("agent").info("x", level="none")
    assert json.loads(out.getvalue())["level"] == "info"


def test_the_cause_of_an_error_is_written_with_its_traceback() -> None:
    out = io.StringIO()
    logs.set_up("json", "info", out)
    try:
        raise ValueError("why")
    except ValueError as error:
        logs.get("agent").error("stopping", cause=error)
    assert "ValueError: why" in json.loads(out.getvalue())["exc_info"]


def test_what_libraries_say_comes_in_the_same_form() -> None:
    out = io.StringIO()
    logs.set_up("json", "info", out)
    logging.getLogger("somelibrary").warning("careful with %s", "that")
    logging.getLogger("somelibrary").info("never mind")
    line = json.loads(out.getvalue())
    assert (line["part"], line["event"]) == ("somelibrary", "careful with that")


def test_a_full_disk_does_not_reach_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("text", "info", Broken())
    logs.get("agent").info("x")
    assert capsys.readouterr() == ("", "")
