"""Keys of requests' noise, from the first prefill of a request to its end."""

import gc
import random
from types import SimpleNamespace

import torch

from sglang_dflash.verify.request_keys import RequestKeys, key_generator


class Request:
    def __init__(self, sampling_seed: int | None = None, n: int = 1) -> None:
        self.sampling_params = SimpleNamespace(sampling_seed=sampling_seed, n=n)


def begin(keys: RequestKeys, *requests: Request, slots: list[int]) -> list[int]:
    batch = SimpleNamespace(reqs=requests, req_pool_indices=torch.tensor(slots))
    begun = keys.begin(batch).tolist()
    assert keys.table[slots].tolist() == begun
    return begun


def test_requests_have_keys_of_their_own_and_keep_them():
    """In another slot after a retraction, and when others come and go."""
    keys, first, second = RequestKeys(9, "cpu", random.Random(1)), Request(), Request()
    one, other = begin(keys, first, second, slots=[3, 4])
    assert one != other
    [third] = begin(keys, Request(), slots=[3])
    assert begin(keys, second, first, slots=[5, 6]) == [other, one] and third not in (one, other)


def test_ranks_have_the_same_keys_and_replicas_others():
    generators = [key_generator(7, replica) for replica in (None, None, 0, 0, 1)]
    keys = [begin(RequestKeys(9, "cpu", generator), Request(), slots=[1]) for generator in generators]
    assert keys[0] == keys[1] and keys[2] == keys[3]
    assert len({key for [key] in keys}) == 3


def test_a_seed_is_the_key_of_a_single_sample():
    keys = RequestKeys(9, "cpu", random.Random(1))
    assert begin(keys, Request(2**62 + 1), Request(-3), slots=[1, 2]) == [2**62 + 1, -3]
    first, second = begin(keys, Request(5, n=2), Request(5, n=2), slots=[1, 2])
    assert len({5, first, second}) == 3


def test_requests_that_ended_are_forgotten():
    keys = RequestKeys(9, "cpu", random.Random(1))
    begin(keys, Request(), slots=[1])
    gc.collect()
    assert len(keys._keys) == 0
