"""Log lines as events: a constant phrase and key=value fields, for someone at 3 a.m.

``get(name)`` gives a logger whose methods take the phrase and fields as
keywords. On a terminal a line reads

    14:03:11.482 WARNING monitor  gpu unhealthy  gpu=GPU-… reason=xid-79

and everywhere else one JSON object with an RFC 3339 time in UTC. Lines go to
stderr; stdout belongs to what a command prints. A log line that cannot be
written (full disk, closed pipe) is dropped: the service goes on.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys
from typing import TextIO

_ROOT = "deviceplugin"


class EventLogger:
    """A logger for one part of the daemon."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def debug(self, event: str, **fields: object) -> None:
        """A poll or a step: nothing has changed."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A change that is as it should be."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something is wrong that the plugin copes with; say how it goes on."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, *, cause: BaseException | None = None, **fields: object) -> None:
        """Something is wrong that a person has to see to."""
        self._log(logging.ERROR, event, fields, cause)

    def _log(
        self,
        level: int,
        event: str,
        fields: dict[str, object],
        cause: BaseException | None = None,
    ) -> None:
        if self._logger.isEnabledFor(level):
            info = (type(cause), cause, cause.__traceback__) if cause is not None else None
            self._logger.log(level, event, extra={"fields": fields}, exc_info=info)


def get(name: str) -> EventLogger:
    """The logger of a part of the daemon, named as its module."""
    return EventLogger(name)


def _plain(value: object) -> object:
    """A field as JSON can say it."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


class TextFormatter(logging.Formatter):
    """One line for a person. Values with blanks are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        time = dt.datetime.fromtimestamp(record.created).astimezone()
        part = record.name.removeprefix(_ROOT + ".")
        words = [f"{time:%H:%M:%S}.{time.microsecond // 1000:03d}", f"{record.levelname:<7}"]
        words += [f"{part:<9}", record.getMessage()]
        fields: dict[str, object] = getattr(record, "fields", {})
        words += (f"{key}={self._quote(value)}" for key, value in fields.items())
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    @staticmethod
    def _quote(value: object) -> str:
        text = str(value)
        bare = text and text.isprintable() and not any(c in ' "=' for c in text)
        return (
            text if bare else '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
        )


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # not needed on a terminal

    class EventFormatter(JsonFormatter):
        """Time, level, part and event first; then the event's own fields."""

        def process_log_record(self, log_data: dict[str, object]) -> dict[str, object]:
            fields = log_data.pop("fields", None)
            if isinstance(fields, dict):
                # A field never hides one of ours.
                log_data.update((k, _plain(v)) for k, v in fields.items() if k not in log_data)
            return log_data

        def add_fields(
            self,
            log_data: dict[str, object],
            record: logging.LogRecord,
            message_dict: dict[str, object],
        ) -> None:
            time = dt.datetime.fromtimestamp(record.created, dt.UTC)
            log_data["time"] = time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            log_data["level"] = record.levelname.lower()
            log_data["part"] = record.name.removeprefix(_ROOT + ".")
            super().add_fields(log_data, record, message_dict)

    return EventFormatter("%(message)s", rename_fields={"message": "event"})


def set_up(form: str | None, level: str, stream: TextIO | None = None) -> None:
    """Send everything that is logged to ``stream``.

    Args:
        form: "text", "json", or None: text on a terminal, JSON otherwise.
        level: "debug", "info", "warning" or "error".
        stream: stderr when None.
    """
    stream = sys.stderr if stream is None else stream
    logging.raiseExceptions = False  # a broken stderr must not break the caller
    handler = logging.StreamHandler(stream)
    text = form == "text" or (form is None and stream.isatty())
    handler.setFormatter(TextFormatter() if text else _json_formatter())
    ours = logging.getLogger(_ROOT)
    ours.handlers[:] = [handler]
    ours.propagate = False
    ours.setLevel(level.upper())
    # What libraries have to say comes in the same form; watchdog warns of
    # events that come while it is being stopped, which is no news.
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("watchdog").setLevel(logging.ERROR)
