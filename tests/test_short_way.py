"""Which calls go the short way; threads and failures do not disturb it, and it keeps nothing of a caller's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from call_ways import Counted, assert_same, forgetful, in_place, like, outcome
from operator_calls import CACHES, STRATEGIES, add_rotary, make_call

from gqa_tvm import GroupQueryAttention, InvalidArgument, KVCache, remembered_calls
from gqa_tvm.launcher import launcher

pytestmark = pytest.mark.skipif(not remembered_calls.arrays_are_readable(), reason="arrays are laid out otherwise here")


class Lent:
    """An array of another framework: only its __dlpack__ is known."""

    def __init__(self, array: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def packed(inputs: dict[str, Any]) -> None:
    inputs["query"] = np.concatenate([inputs[name] for name in ("query", "key", "value")], axis=-1)
    inputs["key"] = inputs["value"] = None


def slices_of_packed(inputs: dict[str, Any]) -> None:
    names = ("query", "key", "value")
    whole = np.concatenate([inputs[name] for name in names], axis=-1)
    ends = np.cumsum([inputs[name].shape[-1] for name in names])
    for name, end in zip(names, ends.tolist(), strict=True):
        inputs[name] = whole[..., end - inputs[name].shape[-1] : end]


def read_only(inputs: dict[str, Any]) -> None:
    for name, array in inputs.items():
        if not name.startswith("past"):
            array.flags.writeable = False


def interleaved(inputs: dict[str, Any]) -> None:
    """Keys and values of a row beside each other in one buffer."""
    keys, values = inputs["past_key"], inputs["past_value"]
    both = np.stack([keys, values], axis=3)
    inputs["past_key"], inputs["past_value"] = both[..., 0, :], both[..., 1, :]


def with_bias(inputs: dict[str, Any]) -> None:
    inputs["attention_bias"] = np.ones((1, 1, 1, 40), inputs["query"].dtype)


def with_positions(inputs: dict[str, Any]) -> None:
    inputs["position_ids"] = np.full((len(inputs["query"]), 3), 5, np.int64)


def ragged(inputs: dict[str, Any]) -> None:
    inputs["seqlens_k"][:] = np.arange(len(inputs["seqlens_k"])) * 13


FORMS = (packed, slices_of_packed, read_only, interleaved, with_bias, with_positions, ragged)


def call_of(cache: str, change: Any = None, **sizes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    attributes, inputs = make_call(cache, **sizes)
    add_rotary(attributes, inputs)
    if change is not None:
        change(inputs)
    return attributes, inputs


@pytest.mark.parametrize("strategy", ("auto", *STRATEGIES))
@pytest.mark.parametrize("change", FORMS, ids=lambda change: change.__name__)
def test_forms_of_a_step(change: Any, strategy: str) -> None:
    attributes, inputs = call_of("i8-channel", change, batch=3, head_size=16)
    op, slow = Counted(**attributes, strategy=strategy), forgetful(**attributes, strategy=strategy)
    for presents in ("past", "past", "other", "new", "new"):
        if change is interleaved and presents == "past":
            # `outcome` would copy each on its own.
            assert_interleaved(op, slow, inputs)
        else:
            assert_same(op, slow, inputs, presents)
    # Others beside an interleaved past have strides that it has not.
    assert op.short == (2 if change is interleaved else 3)


def assert_interleaved(op: Counted, slow: GroupQueryAttention, inputs: dict[str, Any]) -> None:
    results = []
    for each in (op, slow):
        own = {name: array if array is None else array.copy() for name, array in inputs.items()}
        interleaved(own)
        results.append(each(**in_place(own)))
    for got, wanted in zip(results[0][:3], results[1][:3], strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        *(("f32", cache) for cache in (*CACHES, "f16")),
        *(("bf16", cache) for cache in ("bf16", "i8", "i4", "f32")),
    ],
)
def test_formats(dtype: str, cache: str) -> None:
    attributes, inputs = call_of(cache, dtype=dtype, head_size=16)
    op, slow = Counted(**attributes), forgetful(**attributes)
    for presents in ("past", "past", "other", "new", "new"):
        assert_same(op, slow, inputs, presents)
    assert op.short == 3


def test_a_cache_that_grows_by_itself_or_by_new_arrays() -> None:
    attributes, inputs = call_of("f32", head_size=16, total=100)
    tokens = {name: inputs[name] for name in ("query", "key", "value", "cos_cache", "sin_cache")}
    op, slow, by_cache = Counted(**attributes), forgetful(**attributes), Counted(**attributes)
    cache = KVCache(batch=1, kv_num_heads=2, capacity=3, head_size=16)
    past = [inputs[name][:, :, :0] for name in ("past_key", "past_value")]
    for total in range(1, 80):
        lengths = {
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array([total], np.int32),
            "attention_bias": np.full((1, 1, 1, total), 0.5, np.float32),
        }
        results = [o(**tokens, **lengths, past_key=past[0], past_value=past[1]) for o in (op, slow)]
        results.append(by_cache(**tokens, **cache.arguments(1), attention_bias=lengths["attention_bias"]))
        cache.advance()
        for got in results:
            np.testing.assert_array_equal(got.output, results[0].output)
        np.testing.assert_array_equal(results[0].present_key, results[1].present_key)
        past = [results[0].present_key, results[0].present_value]
    # One of every power of two goes the long way.
    assert op.short == by_cache.short == 79 - 8


def test_a_sliding_window() -> None:
    """Rows move once in 8 tokens; a cache below the window is as wrong after a right one."""
    attributes, inputs = call_of("i8", head_size=16, total=100, batch=2)
    attributes |= {"sliding_window_cache": 1, "local_window_size": 17}
    caches = [KVCache(2, 2, 24, 16, 8, k_scale=0.02, v_scale=0.02, sliding_window=17) for _ in range(2)]
    tokens = {name: inputs[name] for name in ("query", "key", "value", "cos_cache", "sin_cache")}
    op, slow = Counted(**attributes), forgetful(**attributes)
    for _ in range(96):
        got, wanted = (o(**tokens, **cache.arguments(1)).output for o, cache in zip((op, slow), caches, strict=True))
        np.testing.assert_array_equal(got, wanted)
        for cache in caches:
            cache.advance()
    for got, wanted in ((caches[0].key, caches[1].key), (caches[0].value, caches[1].value)):
        np.testing.assert_array_equal(got, wanted)
    firsts_of_powers, moves = {1, 2, 3, 5, 9, 17, 33, 65}, set(range(25, 97, 8))
    assert op.short == 96 - len(firsts_of_powers | moves)
    small = inputs | {name: inputs[name][:, :, :16].copy() for name in ("past_key", "past_value")}
    assert_same(op, slow, small, "past")


def test_arrays_of_other_frameworks() -> None:
    attributes, inputs = call_of("i8", head_size=16)
    op = Counted(**attributes)
    wanted = op(**in_place(inputs)).output
    lent = {name: Lent(array) for name, array in in_place(inputs).items()}
    got = op(**lent)
    assert op.short == 1
    np.testing.assert_array_equal(got.output, wanted)
    np.testing.assert_array_equal(got.present_key, inputs["past_key"])


@pytest.mark.parametrize("wrong", ["swapped", "one", "shifted", "read-only", "other", "short"])
def test_wrong_present_arrays(wrong: str) -> None:
    attributes, inputs = call_of("i8", head_size=16)
    texts = []
    for op in (GroupQueryAttention(**attributes), forgetful(**attributes)):
        own = {name: like(array) for name, array in inputs.items()}
        op(**in_place(own))
        keys, values = own["past_key"], own["past_value"]
        longer = np.concatenate([keys, keys], axis=2)
        locked = keys[:]
        locked.flags.writeable = False
        pasts, presents = {
            "swapped": ((keys, values), (values, keys)),
            "one": ((keys, keys), (keys, keys)),
            "shifted": ((longer[:, :, 1:44], values), (longer[:, :, :43], values)),
            "read-only": ((locked, values), (locked, values)),
            "other": ((keys, values), (np.zeros_like(keys), values)),
            "short": ((keys, values), (keys[:, :, :-1], values)),
        }[wrong]
        names = ("past_key", "past_value", "present_key", "present_value")
        before = [array.tobytes() for array in (keys, values)]
        call = own | dict(zip(names, (*pasts, *presents), strict=True))
        if wrong in ("swapped", "other"):  # arrays like any others, if not in place
            texts.append([op(**call).output.tobytes(), call["present_key"].tobytes()])
            continue
        with pytest.raises(InvalidArgument) as error:
            op(**call)
        texts.append(str(error.value))
        assert [array.tobytes() for array in (keys, values)] == before
    assert texts[0] == texts[1]


def test_more_forms_than_are_remembered() -> None:
    attributes, inputs = make_call("f32", total=1, capacity=200, head_size=8)
    op, slow = Counted(**attributes), forgetful(**attributes)
    for tokens in [*range(1, 80), 79, 1, 2]:
        for name in ("query", "key", "value"):
            inputs[name] = np.resize(inputs[name], (1, tokens, inputs[name].shape[-1]))
        inputs["seqlens_k"][:], inputs["total_sequence_length"][:] = tokens, tokens + 1
        assert_same(op, slow, inputs, "past")
    # 79 again; 1 and 2 are forgotten.
    assert op.short == 1 and len(op.op._prepared) <= 64


def test_threads_with_caches_of_their_own() -> None:
    attributes, inputs = call_of("i8", total=64, head_size=16, batch=2)
    shared = [GroupQueryAttention(**attributes, num_threads=1 + i) for i in range(2)]

    def sequence(op: GroupQueryAttention, seed: int) -> list[bytes]:
        own = {name: array.copy() for name, array in inputs.items()}
        rng, outputs = np.random.default_rng(seed), []
        for total in range(2, 65):
            for name in ("query", "key", "value"):
                own[name][...] = rng.standard_normal(own[name].shape)
            own["seqlens_k"][:], own["total_sequence_length"][:] = total - 1, total
            outputs.append(op(**in_place(own)).output.tobytes())
        return [*outputs, own["past_key"].tobytes()]

    wanted = [sequence(forgetful(**attributes), seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            got = pool.map(lambda seed: sequence(shared[seed % 3 // 2], seed), range(8))
            assert list(got) == wanted


def test_a_forked_child_goes_on() -> None:
    attributes, inputs = call_of("i8", head_size=16)
    op = Counted(**attributes, num_threads=2)
    wanted = [outcome(op, inputs, "past") for _ in range(2)][1]
    child = os.fork()
    if child == 0:
        same = all(outcome(op, inputs, "past") == wanted for _ in range(5))
        os._exit(0 if same and op.short == 6 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("is_in_place", [True, False])
def test_nothing_of_the_caller_is_kept(is_in_place: bool) -> None:
    attributes, inputs = call_of("i8", head_size=16)
    given = in_place(inputs) if is_in_place else inputs
    op = GroupQueryAttention(**attributes)
    op(**given)
    wrong = given | {"seqlens_k": np.array([77], np.int32)}
    watched = [*given.values(), *(array.dtype for array in given.values()), op.last_plan, None, wrong["seqlens_k"]]
    before = [sys.getrefcount(item) for item in watched]
    for _ in range(50):
        result = op(**given)
        with pytest.raises(InvalidArgument):
            op(**wrong)
    output = weakref.ref(result.output)
    del result
    assert output() is None
    after = [sys.getrefcount(item) for item in watched]
    # Dtypes and None are everybody's.
    assert all(abs(a - b) < 10 for a, b in zip(after, before, strict=True))
    assert after[: len(given)] == before[: len(given)]


def test_an_operator_is_gone_when_nobody_holds_it() -> None:
    attributes, inputs = call_of("i8", head_size=16)
    op = GroupQueryAttention(**attributes)
    for _ in range(3):
        op(**inputs)
    plan, gone = sys.getrefcount(op.last_plan), weakref.ref(op)
    held = op.last_plan
    del op
    assert gone() is None
    assert sys.getrefcount(held) < plan + 1


def test_a_kernel_that_fails_is_left_to_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes, inputs = call_of("i8", head_size=16, total=3000)
    fails = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
        lambda *_: calls.append(1) or -1
    )
    calls: list[int] = []
    choice = remembered_calls._choice
    address = ctypes.cast(fails, ctypes.c_void_p).value
    monkeypatch.setattr(remembered_calls, "_choice", lambda *given: choice(*given)._replace(address=address))
    op, slow = Counted(**attributes), forgetful(**attributes)
    outcomes = [outcome(op, inputs, "past") for _ in range(3)]
    scratch = launcher().workspace_bytes()
    outcomes += [outcome(op, inputs, "past") for _ in range(20)]
    assert launcher().workspace_bytes() == scratch
    assert op.short == 0 and len(calls) == 22
    assert all(got == outcome(slow, inputs, "past") for got in outcomes)


def test_arrays_laid_out_otherwise_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes, inputs = call_of("i8", head_size=16)
    wanted = GroupQueryAttention(**attributes)(**inputs).output
    monkeypatch.setattr(launcher(), "read_array", lambda array: (0,) * 7)
    remembered_calls.arrays_are_readable.cache_clear()
    try:
        op = Counted(**attributes)
        for _ in range(2):
            np.testing.assert_array_equal(op(**inputs).output, wanted)
        assert op.short == 0
    finally:
        monkeypatch.undo()
        remembered_calls.arrays_are_readable.cache_clear()


LIBRARY_ALONE = """
import os, sys
os.environ["GQA_TVM_CACHE"], os.environ["CC"] = sys.argv[2], "false"
from call_ways import Counted, forgetful, assert_same
from operator_calls import make_call
attributes, inputs = make_call("i8", total=70)
op, slow = (make(**attributes, library=sys.argv[1]) for make in (Counted, forgetful))
for _ in range(2):
    assert_same(op, slow, inputs, "past")
assert op.short == 1 and not os.listdir(sys.argv[2])
"""


@pytest.mark.slow
def test_a_library_brings_the_short_way(small_library: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIBRARY_ALONE, str(small_library), str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
