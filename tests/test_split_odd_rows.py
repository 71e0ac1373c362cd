"""Integer dot products over rows that are no multiple of 64 bytes: accuracy, and no byte read that is not of a row."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from avx_vnni import BASE, TARGET, needs_stand_in, operator
from operator_calls import assert_close, assert_same_cache, copies, expected, make_call, run
from test_definitions import _run
from tvm import te, tirx

from gqa_tvm import GroupQueryAttention
from gqa_tvm.definitions.split_vectors import RowVectors
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import missing_features
from gqa_tvm.variants import machine_variant

VNNI = "x86-avx512-vnni"
needs_vnni = pytest.mark.skipif(bool(missing_features(VNNI)), reason="needs AVX-512 VNNI")
# Targets, and the one that multiplies the same by float32.
TARGETS = [pytest.param(VNNI, "x86-avx512", marks=needs_vnni), pytest.param(TARGET, BASE, marks=needs_stand_in)]
BY_TARGET = pytest.mark.parametrize(("target", "base"), TARGETS)
# 32, 40 and 88 bytes; INT8 rows that float32 has to pad, too.
ROWS = (("i4", 64), ("i4-channel", 80), ("i8-channel", 88))
SHAPES = [(1, 130), (1, 1100), (40, 75)]


def _shapes(target: str, cache: str, head_size: int) -> list[tuple[int, int]]:
    """(tokens, keys) of calls whose kernels multiply integers: prompts need more of a row."""
    columns = head_size // 2 if cache.startswith("i4") else head_size
    splits_prefill = machine_variant(target).sizes.default.splits_prefill(cache[:2], columns)
    return SHAPES if splits_prefill else SHAPES[:2]


@pytest.mark.parametrize("size", [64, 32])
def test_vectors_of_a_row(size):
    """Every column is somewhere, once where it counts; no vector reaches beyond the row."""
    for columns in range(size, 4 * size + 1):
        vectors = RowVectors(size, columns)
        loaded = [int(vectors._column(position)) for position in range(vectors.padded)]
        assert min(loaded) == 0 and max(loaded) == columns - 1 and set(loaded) == set(range(columns))
        starts = loaded[::size]
        assert [loaded[p] for p in range(vectors.padded)] == [s + x for s in starts for x in range(size)]
        positions = [vectors.position(c) for c in range(columns)]
        assert [loaded[p] for p in positions] == list(range(columns))
        assert positions == [c + (vectors.gap if c >= (vectors.count - 1) * size else 0) for c in range(columns)]
        accumulated = [vectors.accumulator_position(c) for c in range(columns)]
        assert len(set(accumulated)) == columns and max(accumulated) < vectors.padded


def test_rows_that_share_a_vector():
    """Two rows of 32 bytes: rows 4 t + r of the vectors are the keys 8 t + r and 8 t + 4 + r."""
    vectors = RowVectors(64, 32, 2)
    assert (vectors.count, vectors.padded, vectors.gap, vectors.quad, vectors.row_groups) == (1, 32, 0, 8, 2)
    cache = te.placeholder((16, 32), "int32", name="cache")
    loaded = vectors.load(cache, tirx.const(13, "int32"), "loaded")
    rows = np.arange(16 * 32, dtype=np.int32).reshape(16, 32)
    got = _run([cache, loaded], [rows, np.zeros((8, 64), np.int32)])
    keys = np.minimum(np.array([[t // 4 * 8 + t % 4, t // 4 * 8 + t % 4 + 4] for t in range(8)]), 13)
    np.testing.assert_array_equal(got, rows[keys].reshape(8, 64))


@pytest.mark.parametrize(
    ("target", "columns", "decode", "values"),
    [
        *(
            (VNNI, *case)
            for case in ((32, 32, 32), (40, 32, 32), (64, 64, 64), (72, 32, 32), (80, 32, 64), (96, 32, 64))
        ),
        *((VNNI, *case) for case in ((112, 64, 64), (31, 0, 0), (50, 32, 0), (192, 64, 64))),
        *((TARGET, *case) for case in ((32, 32, 32), (40, 32, 0), (48, 32, 32), (128, 32, 32), (31, 0, 0))),
    ],
)
def test_widths_of_vectors(target, columns, decode, values):
    sizes = machine_variant(target).sizes.default
    assert (sizes.dot_width(columns), sizes.value_width(columns)) == (decode, values)


def _operator(target, attributes, **options):
    if target == TARGET:
        return operator(attributes, **options)
    return GroupQueryAttention(**attributes, target=target, **options)


def _call(cache, head_size, tokens, total, group=1, **options):
    options = {"heads": 2 * group, "kv_heads": 2, "capacity": total, **options}
    return make_call(cache, tokens=tokens, total=total, head_size=head_size, **options)


def _assert_split(op, target):
    spec = KernelSpec.parse(op.last_plan.kernels[-1])
    assert machine_variant(target).owner(spec).target.name == target


@BY_TARGET
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), ROWS)
def test_errors_are_those_of_float32(target, base, cache, head_size):
    for tokens, total in _shapes(target, cache, head_size):
        attributes, inputs = _call(cache, head_size, tokens, total)
        op = _operator(target, attributes)
        split, single = op(**copies(inputs)), run(attributes, inputs, target=base)
        _assert_split(op, target)
        exact = expected(attributes, inputs)
        assert_same_cache(split, exact)
        errors = [np.abs(result.output - exact.output.astype(np.float64)).max() for result in (split, single)]
        assert errors[0] <= 2 * errors[1] + 4e-7 * np.abs(exact.output).max(), errors


class _Guarded:
    """Arrays that end where memory ends: a page that may not be read follows."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def copy(self, array: np.ndarray) -> np.ndarray:
        pages = -(-array.nbytes // mmap.PAGESIZE)
        memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        self._maps.append(memory)
        end = pages * mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(address + end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        guarded = np.frombuffer(memory, array.dtype, array.size, end - array.nbytes).reshape(array.shape)
        guarded[:] = array
        return guarded


@BY_TARGET
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), ROWS)
def test_nothing_is_read_beyond_the_last_row(target, base, cache, head_size):
    guard = _Guarded()
    for tokens, total in _shapes(target, cache, head_size):
        attributes, inputs = _call(cache, head_size, tokens, total)
        wanted = _operator(target, attributes)(**copies(inputs)).output
        for name in ("key", "value"):
            inputs[f"past_{name}"] = inputs[f"present_{name}"] = guard.copy(inputs[f"past_{name}"])
        op = _operator(target, attributes)
        np.testing.assert_array_equal(op(**inputs).output, wanted)
        _assert_split(op, target)


@BY_TARGET
@pytest.mark.slow
@pytest.mark.parametrize(("cache", "head_size"), ROWS)
def test_bytes_between_and_behind_rows_do_not_matter(target, base, cache, head_size):
    """Rows with a gap after each, and room behind the last token, both full of garbage."""
    for tokens, total in _shapes(target, cache, head_size):
        attributes, inputs = _call(cache, head_size, tokens, total, capacity=total + 20)
        outputs = []
        for garbage in (0x00, 0x7F, 0xFF):
            changed = copies(inputs)
            for name in ("past_key", "past_value"):
                cached = inputs[name]
                wide = np.full((*cached.shape[:3], cached.shape[3] + 24), garbage, np.uint8).view(cached.dtype)
                changed[name] = wide[..., : cached.shape[3]]
                changed[name][:, :, : total - tokens] = cached[:, :, : total - tokens]
                changed[name.replace("past", "present")] = changed[name]
            outputs.append(_operator(target, attributes)(**changed).output)
        np.testing.assert_array_equal(outputs[1], outputs[0])
        np.testing.assert_array_equal(outputs[2], outputs[0])
        assert not np.isnan(outputs[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-avx512", "x86-avx2", "generic"])
@pytest.mark.parametrize(("cache", "head_size"), [("i8", 72), ("i4", 100), ("f32", 70), ("f16", 9)])
def test_float32_kernels_read_nothing_beyond_the_last_row(target, cache, head_size):
    if missing_features(target):
        pytest.skip(f"needs {target}")
    guard = _Guarded()
    for (tokens, total), strategy in zip([*SHAPES, (3, 50)], ("flash", "flash", "flash", "naive"), strict=True):
        attributes, inputs = _call(cache, head_size, tokens, total)
        wanted = expected(attributes, inputs).output
        for name in ("key", "value"):
            inputs[f"past_{name}"] = inputs[f"present_{name}"] = guard.copy(inputs[f"past_{name}"])
        op = GroupQueryAttention(**attributes, target=target, strategy=strategy)
        assert_close(op(**inputs).output, wanted)
