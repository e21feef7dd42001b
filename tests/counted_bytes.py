"""Bytes of tensors in host memory, counted by their storages: ``tracemalloc`` does not see torch's memory."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedBytes(TorchDispatchMode):
    """Counts storages that operators of this thread return within ``with``.

    Attributes:
        live: bytes that are alive.
        peak: the most that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        before = {tensor.untyped_storage() for tensor in arguments}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage not in self._known and storage not in before:
                    self._known.add(storage)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size):
        self.live -= size
