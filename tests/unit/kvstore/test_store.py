"""Values by name, through a real master and real engines in this process."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
import torch

from configs.kvstore_masters import KVMastersConfig
from kvstore import (
    GetOutcome,
    InvalidKey,
    InvalidValue,
    Pin,
    PutOptions,
    PutOutcome,
    RegionPiece,
    Store,
)
from tests.support.store_pool import SEGMENT, Pool
from tests.support.waits import eventually
from transfer import allocate


@pytest.fixture
def pool(stack):
    return Pool(stack)


@pytest.mark.parametrize("nbytes", [1, 4096, 100_003, 1 << 20])
def test_what_was_put_is_got(pool, nbytes):
    value = secrets.token_bytes(nbytes)
    assert pool.store.put("a name", value) is PutOutcome.STORED
    assert pool.store.get("a name") == value
    assert pool.store.exists("a name")
    other = pool.connect()
    assert other.get("a name") == value
    target = bytearray(nbytes + 3)
    assert other.get_into("a name", target) == nbytes
    assert target[:nbytes] == value
    assert pool.store.remove("a name")
    assert not pool.store.remove("a name")
    assert pool.store.get("a name") is None
    assert pool.store.get_into("a name", bytearray(nbytes)) is None
    assert not pool.store.exists("a name")


def test_a_configuration_says_where_the_masters_are(pool, rng):
    masters = KVMastersConfig(addresses=(pool.master.address,))
    value = rng.randbytes(100)
    knobs = pool.config.model_copy(update={"masters": masters})
    with Store.connect(secret=pool.secret, config=knobs) as store:
        assert store.put("a name", value) == "stored"
    assert pool.connect().get("a name") == value
    with pytest.raises(ValueError, match=r"neither addresses nor etcd\.endpoints are set"):
        Store.connect(secret=pool.secret)


def test_values_of_every_kind_are_their_bytes(pool):
    array = np.arange(100, dtype=np.int32).reshape(10, 10)
    tensor = torch.arange(70, dtype=torch.bfloat16)
    memory = allocate(4096)
    pool.stack.callback(memory.close)
    region = pool.store.register(memory)
    region.array[:] = np.frombuffer(secrets.token_bytes(4096), dtype=np.uint8)
    values = {
        "bytes": (b"abc", b"abc"),
        "bytearray": (bytearray(b"abcd"), b"abcd"),
        "memoryview": (memoryview(b"abcdefgh")[::2], b"aceg"),
        "array": (array, array.tobytes()),
        "transposed": (array.T, np.ascontiguousarray(array.T).tobytes()),
        "tensor": (tensor, tensor.view(torch.uint8).numpy().tobytes()),
        "column": (tensor.reshape(7, 10)[:, 3],
                   tensor.reshape(7, 10)[:, 3].contiguous().view(torch.uint8).numpy().tobytes()),
        "piece": (RegionPiece(region, 5, 1000), region.array[5:1005].tobytes()),
        "inside": (region.tensor[100:300], region.array[100:300].tobytes()),
        "parts": ([b"ab", array, RegionPiece(region, 1, 2), (b"c",)],
                  b"ab" + array.tobytes() + region.array[1:3].tobytes() + b"c"),
        "large parts": ([bytes(300_000), b"x", bytes(400_000)],
                        bytes(300_000) + b"x" + bytes(400_000)),
    }  # fmt: skip
    outcomes = pool.store.put_batch(list(values), [value for value, _ in values.values()])
    assert set(outcomes) == {PutOutcome.STORED}
    results = pool.store.get_batch([*values, "no such name"])
    assert [result.value for result in results[:-1]] == [data for _, data in values.values()]
    assert results[-1].outcome is GetOutcome.MISS
    assert not results[-1]
    targets = [bytearray(result.nbytes) for result in results[:-1]]
    got = pool.store.get_batch_into(list(values), targets)
    assert all(got)
    assert [bytes(target) for target in targets] == [data for _, data in values.values()]
    pool.master.check_invariants()


def test_a_duplicate_is_equal_or_a_conflict(pool):
    assert pool.store.put("name", b"first") is PutOutcome.STORED
    assert pool.store.put("name", b"first") is PutOutcome.EXISTS
    assert pool.store.put("name", b"other") is PutOutcome.CONFLICT
    assert pool.store.put("name", b"longer") is PutOutcome.CONFLICT
    assert pool.store.get("name") == b"first"


@pytest.mark.parametrize("name", ["", "x" * 1025, "\u00e4" * 600, b"", b"short", b"x" * 17, 3])
def test_bad_names_are_refused(pool, name):
    with pytest.raises(InvalidKey) as caught:
        pool.store.put(name, b"value")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(InvalidKey):
        pool.store.get(name)
    with pytest.raises(InvalidKey):
        pool.store.get_batch("a name is no list of names")


@pytest.mark.parametrize(
    "value",
    [b"", bytearray(), np.empty(0), torch.empty(0), [], [b"", b""], None, 7, "text", [None]],
    ids=repr,
)
def test_values_without_bytes_are_refused(pool, value):
    with pytest.raises(InvalidValue):
        pool.store.put("name", value)
    assert pool.store.get("name") is None
    assert pool.master.statistics().open_puts == 0


def test_targets_that_cannot_take_the_value_are_refused(pool):
    pool.store.put("name", bytes(100))
    frozen = np.zeros(100, dtype=np.uint8)
    frozen.flags.writeable = False
    for target in (bytes(100), bytearray(99), frozen, np.zeros((20, 20))[:, ::2], b"", None):
        with pytest.raises(InvalidValue):
            pool.store.get_into("name", target)
    with pytest.raises(InvalidValue):
        pool.store.get_batch_into(["name"], [])
    with pytest.raises(InvalidValue):
        pool.store.put_batch(["a", "b"], [b"one"])
    assert pool.store.get_into("name", bytearray(100)) == 100


def test_a_value_larger_than_the_pool_does_not_fit(pool):
    value = bytes(SEGMENT + 1)
    patient = PutOptions(wait_for_space=True)
    assert pool.store.put("large", value, options=patient) is PutOutcome.TOO_LARGE, "at once"
    assert pool.store.get("large") is None
    assert pool.store.put("small", b"x") is PutOutcome.STORED


@pytest.mark.parametrize("chunk_bytes", [0, 64, 1000])
def test_tensors_keep_type_and_shape(pool, chunk_bytes):
    options = PutOptions(chunk_bytes=chunk_bytes)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        tensor = torch.randn(3, 5, 7).to(dtype)
        name = f"tensor {dtype}"
        assert pool.store.put_tensor(name, tensor, options=options) is PutOutcome.STORED
        found = pool.store.get_tensor(name)
        assert found.dtype is dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        target = torch.zeros_like(tensor)
        assert pool.store.get_tensor_into(name, target)
        assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(InvalidValue):
        pool.store.get_tensor_into(name, torch.zeros(5, 3, 7, dtype=dtype))
    with pytest.raises(InvalidValue):
        pool.store.get_tensor_into(name, torch.zeros(3, 5, dtype=dtype))
    with pytest.raises(InvalidValue):
        pool.store.put_tensor("nothing", torch.empty(0))
    assert pool.store.get_tensor("no such") is None
    assert not pool.store.get_tensor_into("no such", target)
    pool.store.put("bytes", bytes(500))
    with pytest.raises(InvalidValue):
        pool.store.get_tensor("bytes")


def test_a_large_tensor_moves_through_registered_memory(pool):
    memory = allocate(2 << 20)
    region = pool.store.register(memory)
    source = memory.tensor[: 1 << 20].view(torch.float32)
    source.normal_()
    assert pool.store.put_tensor("weights", source) is PutOutcome.STORED
    target = memory.tensor[1 << 20 :].view(torch.float32)
    assert pool.store.get_tensor_into("weights", target)
    assert torch.equal(source, target)
    pool.store.release(region)
    assert torch.equal(pool.store.get_tensor("weights"), source)
    memory.close()


def test_hot_values_need_no_master(pool):
    value = secrets.token_bytes(4096)
    pool.store.put("hot", value)
    for _ in range(10):
        assert pool.store.get("hot") == value
    assert pool.store.client.statistics().hot_blocks == 8, "from the third on"
    eventually(lambda: pool.master.statistics().leases == 1, "others are released soon")
    # Our own removal is seen at once.
    pool.store.remove("hot")
    assert pool.store.get("hot") is None
    pool.store.put("hot", b"new")
    assert [pool.store.get("hot") for _ in range(5)] == [b"new"] * 5


def test_a_hot_value_that_goes_bad_is_found_out(pool):
    value = secrets.token_bytes(4096)
    pool.store.put("hot", value)
    for _ in range(4):
        pool.store.get("hot")
    segment = pool.nodes[0].segments[0]
    memory = segment.region.array
    (place,) = [i for i in range(0, SEGMENT, 64) if memory[i : i + 4096].tobytes() == value]
    memory[place + 17] ^= 4
    result = pool.store.get_batch(["hot"])[0]
    assert result.outcome is GetOutcome.CORRUPT
    assert pool.store.get("hot") is None
    assert pool.master.statistics().corrupt_blocks == 1
    assert pool.store.put("hot", value) is PutOutcome.STORED
    assert pool.store.get("hot") == value


def test_pins_survive_what_others_do_not(stack):
    pool = Pool(stack, segment_bytes=1 << 16)
    value = secrets.token_bytes(4096)
    assert pool.store.put("kept", value, options=PutOptions(pin=Pin.HARD)) is PutOutcome.STORED
    for i in range(40):
        assert pool.store.put(f"other {i}", secrets.token_bytes(4096)) is PutOutcome.STORED
    assert pool.store.get("kept") == value
    assert pool.store.get("other 0") is None
    pool.master.check_invariants()


def test_a_name_that_is_no_text_is_no_key(pool):
    with pytest.raises(InvalidKey, match="no UTF-8"):
        pool.store.put("\ud800", b"x")


@pytest.mark.parametrize(
    ("option", "expected"),
    [({"pin": "hard"}, "pin is a kvstore.Pin, not 'hard'"),
     ({"media": "ssd"}, "media is a tuple of kvstore.Medium, not 'ssd'"),
     ({"media": ("tape",)}, "media is a tuple of kvstore.Medium, not ('tape',)"),
     ({"replicas": True}, "replicas is an integer, not True"),
     ({"prefer": "node"}, "prefer is a tuple of nodes' names, not 'node'")],
)  # fmt: skip
def test_options_of_another_type_say_what_is_expected(option, expected):
    with pytest.raises(InvalidValue) as caught:
        PutOptions(**option)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"replicas": 0}, {"replicas": 9}, {"chunk_bytes": -1}, {"pin_s": -1.0},
     {"pin_s": float("nan")}, {"pin_s": float("inf")}, {"group": "g" * 65}],
)  # fmt: skip
def test_options_out_of_range_say_what_was_seen(options):
    (value,) = options.values()
    with pytest.raises(InvalidValue) as caught:
        PutOptions(**options)
    assert str(len(value) if isinstance(value, str) else value) in str(caught.value)


def test_other_tensors_are_told_apart_from_those_asked_for(pool):
    pool.store.put_tensor("tensor", torch.arange(10.0))
    pool.store.put("small", b"x")
    with pytest.raises(InvalidValue, match=r"target of 12 bytes for a tensor of 40"):
        pool.store.get_tensor_into("tensor", torch.zeros(3))
    with pytest.raises(InvalidValue, match=r"target of int32 \[10\] for a tensor of float32 \[10"):
        pool.store.get_tensor_into("tensor", torch.zeros(10, dtype=torch.int32))
    with pytest.raises(InvalidValue, match="1 bytes is no tensor"):
        pool.store.get_tensor("small")
