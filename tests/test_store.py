"""deviceplugin.store"""

from __future__ import annotations

import threading

from deviceplugin.store import Store
from tests.builders import snapshot


def test_generations_grow_by_one_with_each_difference() -> None:
    store = Store()
    assert store.publish(snapshot([0])).generation == 1
    assert store.publish(snapshot([0, 1])).generation == 2
    assert store.snapshot.generation == 2


def test_the_same_content_is_no_news() -> None:
    store = Store()
    first = store.publish(snapshot([0], generation=7))
    assert store.publish(snapshot([0], generation=9)) is first


def test_a_reader_gets_what_is_newer_at_once() -> None:
    store = Store()
    published = store.publish(snapshot([0]))
    assert store.wait_newer(0, until=lambda: False) is published


def test_every_waiting_reader_gets_the_next_snapshot() -> None:
    store = Store()
    got = []
    ready = threading.Barrier(4)

    def read() -> None:
        ready.wait(5)
        found = store.wait_newer(0, until=lambda: False)
        assert found is not None
        got.append(found.generation)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    ready.wait(5)
    store.publish(snapshot([0]))
    for reader in readers:
        reader.join(5)
    assert got == [1, 1, 1]


def test_a_reader_that_gives_up_is_woken_and_gets_nothing() -> None:
    store = Store()
    done = threading.Event()
    got = []
    reader = threading.Thread(target=lambda: got.append(store.wait_newer(0, done.is_set)))
    reader.start()
    done.set()
    store.wake()
    reader.join(5)
    assert got == [None]
