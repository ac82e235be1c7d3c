"""Counts the bytes of tensor storages that are alive."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Storages:
    """Bytes of the storages that are alive, each counted once; storages of the tensors in `without` do not count."""

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in without})

    def add(self, tensor: Tensor, num_bytes: int | None = None) -> None:
        """Counts a tensor's storage until it is freed, with num_bytes in place of its size where given."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        size = storage.nbytes() if num_bytes is None else num_bytes
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, size)

    def forget_peak(self) -> None:
        """Starts the peak anew, from the bytes that are alive now."""
        self.peak_bytes = self.live_bytes

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes
