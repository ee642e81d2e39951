"""Keys of requests' noise: what makes the sampled text of one request another than that of the next."""

from __future__ import annotations

import random
import weakref

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils.common import async_h2d

_KEY_BITS = 63


def key_generator(seed: int, replica: int | None) -> random.Random:
    """Return the generator of random keys. It is equal on the tensor-parallel ranks of a replica, and on no others.

    Args:
        seed: `--random-seed`, which all replicas of a server share.
        replica: rank of the data-parallel replica; None: the server has one.
    """
    return random.Random(seed if replica is None else f"{seed}, replica {replica}")


class RequestKeys:
    """The key of every running request; see :mod:`sglang_dflash.ops.noise`.

    A request keeps its key from its first prefill to its end, also when it is retracted and resumed. Its
    `sampling_seed` is its key, if it has one and asks for one sample. All other keys are random.

    Attributes:
        table: [slots] int64, by rows of `req_to_token`. CUDA graphs hold its address.
    """

    def __init__(self, num_slots: int, device: torch.device | str, generator: random.Random) -> None:
        """
        Args:
            num_slots: rows of `req_to_token`, or more.
            generator: of the random keys. Equal on all tensor-parallel ranks, which see the same requests.
        """
        self.table = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._generator = generator
        self._keys: weakref.WeakKeyDictionary[Req, int] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def begin(self, batch: ScheduleBatch) -> torch.Tensor:
        """Write the keys of a batch's requests to the table, before a prefill draws tokens.

        Returns:
            [bs] int64. The keys.
        """
        keys = async_h2d([self._key(req) for req in batch.reqs], dtype=torch.int64, device=self.table.device)
        self.table[batch.req_pool_indices] = keys
        return keys

    def _key(self, req: Req) -> int:
        params = req.sampling_params
        # All samples of a request share its seed, and have to differ.
        if params.sampling_seed is not None and params.n == 1:
            return params.sampling_seed
        if req not in self._keys:
            self._keys[req] = self._generator.getrandbits(_KEY_BITS)
        return self._keys[req]
