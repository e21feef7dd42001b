"""Tensors and texts that were used last, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from threading import Lock
from typing import Any


class TensorCache:
    """Entries by key. The last used entries stay, up to ``most_bytes`` in total; the newest entry always stays.

    An entry is a tensor, a text in ASCII, or a mapping, a list or an object of tensors. Several threads may use a cache
    at a time: with ``async_steps``, the engine's thread and the trainer's.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Any:
        """Return the entry of a key, which becomes the last used one; None without one."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def add(self, key: Hashable, entry: Any) -> None:
        """Store an entry, and drop those that were not used for longest."""
        size = len(entry) if isinstance(entry, str) else sum(tensor.nbytes for tensor in _list_tensors(entry))
        with self._lock:
            self._bytes += size - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = entry, size
            while len(self._entries) > 1 and self._bytes > self._most_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][1]


def _list_tensors(entry: Any) -> Iterator[Any]:
    if hasattr(entry, "element_size"):
        yield entry
    elif isinstance(entry, (list, tuple)):
        for value in entry:
            yield from _list_tensors(value)
    else:
        values = entry if isinstance(entry, Mapping) else getattr(entry, "__dict__", {})
        for value in values.values():
            yield from _list_tensors(value)
