"""deviceplugin.reload"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deviceplugin import config
from deviceplugin.config import Loaded
from deviceplugin.errors import ConfigError
from deviceplugin.reload import Changed, Reloader
from deviceplugin.stats import Stats


class Place:
    """A configuration file as a ConfigMap's mount has it: links to a folder that is swapped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / "config.yaml"
        self.stats = Stats()
        self._number = 0
        self.swap("logLevel: info")
        self.file.symlink_to("..data/config.yaml")
        self.reloader = Reloader(self.file, self.load, self.load())

    def load(self) -> Loaded:
        try:
            text = self.file.read_text()
        except OSError as error:
            raise ConfigError([f"cannot be read: {error}"]) from error
        return config.load({}, {}, (str(self.file), text))

    def swap(self, text: str) -> None:
        self._number += 1
        data = self.directory / f"..data_{self._number}"
        data.mkdir()
        (data / "config.yaml").write_text(f"version: v1\n{text}\n")
        new = self.directory / "..data_new"
        new.symlink_to(data.name)
        new.replace(self.directory / "..data")

    def look(self) -> Changed | None:
        """Two looks: the first one only sees that something is going on."""
        assert self.reloader.look(self.stats) is None
        return self.reloader.look(self.stats)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_swapped_config_map_is_seen(place: Place) -> None:
    assert place.look() is None
    place.swap("logLevel: debug")
    changed = place.look()
    assert changed is not None
    assert changed.names == {"log_level"}
    assert changed.live
    assert changed.loaded.settings.log_level == "debug"
    assert place.look() is None, "it is told once"
    assert place.stats.counts("config_reloads") == {("ok",): 1}


def test_an_edit_in_place_counts_when_it_has_settled(place: Place) -> None:
    place.file.write_text("version: v1\nlogLevel: deb")
    assert place.reloader.look(place.stats) is None
    place.file.write_text("version: v1\nlogLevel: debug\n")
    assert place.reloader.look(place.stats) is None
    changed = place.reloader.look(place.stats)
    assert changed is not None
    assert changed.loaded.settings.log_level == "debug"
    assert not place.stats.gauges("config_refused").get((), 0)


@pytest.mark.parametrize("text", ["logLevel: loud", "{", "nope: 1"])
def test_a_bad_file_is_reported_once_and_ignored(place: Place, text: str) -> None:
    place.swap(text)
    assert place.look() is None
    assert place.look() is None
    assert place.stats.counts("config_reloads") == {("refused",): 1}
    assert place.stats.gauges("config_refused") == {(): 1}
    place.swap("logLevel: error")
    changed = place.look()
    assert changed is not None
    assert place.stats.gauges("config_refused") == {(): 0}


def test_a_file_that_goes_away_changes_nothing_until_it_is_back(place: Place) -> None:
    (place.directory / "..data").rename(place.directory / "away")
    assert place.look() is None
    assert place.stats.counts("config_reloads") == {("refused",): 1}
    place.swap("logLevel: debug")
    changed = place.look()
    assert changed is not None
    assert changed.names == {"log_level"}


def test_a_file_that_says_the_same_changes_nothing(place: Place) -> None:
    place.swap("logLevel: info")
    assert place.look() is None
    assert place.stats.counts("config_reloads") == {("ok",): 1}


def test_on_demand_it_is_read_at_once(place: Place) -> None:
    place.swap("resourceName: vendor.example/other")
    changed = place.reloader.reload(place.stats)
    assert changed is not None
    assert changed.names == {"resource_name"}
    assert not changed.live


def test_without_a_file_there_is_nothing_to_look_at(place: Place) -> None:
    reloader = Reloader(None, place.load, place.load())
    place.swap("logLevel: debug")
    assert reloader.look(place.stats) is None
    assert reloader.look(place.stats) is None


def test_a_pipe_is_not_waited_for(place: Place) -> None:
    place.file.unlink()
    os.mkfifo(place.file)
    assert place.look() is None
    assert place.reloader.reload(place.stats) is None
    assert place.stats.counts("config_reloads") == {("refused",): 2}
