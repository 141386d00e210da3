"""Bytes of tensors that are alive at once, of everything that torch allocates meanwhile."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchweft.core.operators.operator import Observer

__all__ = ["LiveBytes"]


class LiveBytes(Observer):
    """Bytes of storages made inside: the most that were alive at once, and those that are now."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _real(t)}
        for tensor in filter(_real, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        self.most = max(self.most, self.now)
        return result

    @property
    def now(self) -> int:
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        return sum(self._made.values())


def _real(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "meta"
