"""Memory that tensors lie in, added up while it lives."""

import weakref
from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Storages:
    """Bytes of storages, each counted once, until it is freed; `without` are there and do not count."""

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in without})

    def add(self, tensor: Tensor, num_bytes: int | None = None) -> None:
        """Counts a tensor's storage, by its own size unless another is given."""
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        size = storage.nbytes() if num_bytes is None else num_bytes
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, size)

    def forget_peak(self) -> None:
        """From now on the peak is that of what comes; what lives counts on."""
        self.peak_bytes = self.live_bytes

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes
