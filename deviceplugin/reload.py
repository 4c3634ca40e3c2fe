"""Settings that change while the daemon runs: the file is read again when it changes.

Looked at once a second by its identity, symlinks followed, so that the swap
of a ConfigMap's directory is seen as well as an edit in place. A change
counts when two looks in a row see the same: an editor may still be writing.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deviceplugin import config, logs
from deviceplugin.errors import ConfigError, ProfileError
from deviceplugin.stats import Stats

LIVE = frozenset(
    {
        "health_hold_down_s",
        "health_max_unhealthy",
        "health_mode",
        "health_observe",
        "health_unknown_xids",
        "health_xids",
        "log_format",
        "log_level",
        "monitoring_lost_after_s",
        "node_name",
        "on_monitoring_lost",
        "poll_interval_s",
        "require_gpu",
    }
)
"""Settings that take effect in place; any other takes a new start within the process."""

_log = logs.get("config")

Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Changed:
    """New settings, and which of them differ."""

    loaded: config.Loaded
    names: frozenset[str]

    @property
    def live(self) -> bool:
        """All of them can take effect in place."""
        return self.names <= LIVE


class Reloader:
    """Used by one thread."""

    def __init__(
        self, path: Path | None, load: Callable[[], config.Loaded], current: config.Loaded
    ) -> None:
        """
        Args:
            path: the configuration file; None: there is none to look at.
            load: reads all settings anew; raises ConfigError or ProfileError.
        """
        self._path = path
        self._load = load
        self._current = current
        self._used = self._seen = self._identity()

    def look(self, stats: Stats) -> Changed | None:
        """What changed, if the file did. Never raises."""
        found = self._identity()
        settled, self._seen = found == self._seen, found
        if self._path is None or found == self._used or not settled:
            return None
        self._used = found
        return self.reload(stats)

    def reload(self, stats: Stats) -> Changed | None:
        """Read the settings now; None when nothing differs or they are wrong. Never raises."""
        try:
            if self._would_block():
                raise ConfigError(
                    [f"file {self._path}: is no regular file, read only at the start"]
                )
            loaded = self._load()
        except (ConfigError, ProfileError) as error:
            stats.add("config_reloads", "refused")
            stats.set("config_refused", to=1)
            _log.error(
                "new settings are wrong, going on with those before", why="; ".join(error.mistakes)
            )
            return None
        stats.add("config_reloads", "ok")
        stats.set("config_refused", to=0)
        before, after = self._current.settings, loaded.settings
        names = {
            field.name
            for field in config.FIELDS
            if getattr(before, field.name) != getattr(after, field.name)
        }
        self._current = loaded
        _log.info("settings read again", changed=",".join(sorted(names)) or "nothing")
        return Changed(loaded, frozenset(names)) if names else None

    def _identity(self) -> Identity | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return (
                found.st_dev,
                found.st_ino,
                found.st_mode,
                0,
            )  # a pipe's times change as it is read
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def _would_block(self) -> bool:
        """A pipe would keep the daemon waiting for whoever writes."""
        if self._path is None:
            return False
        try:
            mode = self._path.stat().st_mode
        except OSError:
            return False  # reading tells why
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
