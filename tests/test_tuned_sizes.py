"""Which sizes a call gets: of the exact record, of the nearest, or the defaults; whose records count."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from gqa_tvm.schedules.block_sizes import default_block_sizes
from operator_calls import make_call

from gqa_tvm import GroupQueryAttention, runtime, variants
from gqa_tvm.errors import BuildError
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.targets import best_target, family_facts, find_target
from gqa_tvm.tuned_sizes import ORDER_FIELDS, SizesTable, TunedRecord
from gqa_tvm.tuning.fields import recorded_fields

TARGET = find_target("x86-avx2", "x86-64")
DEFAULT = default_block_sizes(family_facts(TARGET))
DECODE = KernelSpec.parse("flash_decode_f32_i8_h64_r1")
PREFILL = KernelSpec.parse("flash_prefill_f32_i8_h64")


def record(spec: KernelSpec, group_size: int, total: int, threads: int, **sizes: object) -> TunedRecord:
    return TunedRecord(spec.name, group_size, total, threads, sizes, 2.0, 1.0, 8)


RECORDS = (
    record(DECODE, 1, 512, 1, decode_sv_unroll=2),
    record(DECODE, 1, 4096, 1),
    record(DECODE, 1, 4096, 2, decode_sv_unroll=8),
    record(PREFILL, 4, 4096, 1, elementwise_vectors=1),
)


@pytest.mark.parametrize(
    "spec,group_size,total,threads,origin,field",
    [
        (DECODE, 1, 300, 1, "tuned at T=512, 1 threads (exact)", ("decode_sv_unroll", 2)),
        (DECODE, 1, 9, 1, "tuned at T=512, 1 threads (nearest)", ("decode_sv_unroll", 2)),
        (DECODE, 1, 2049, 1, "tuned at T=4096, 1 threads (exact)", ("decode_sv_unroll", DEFAULT.decode_sv_unroll)),
        (DECODE, 1, 99999, 8, "tuned at T=4096, 2 threads (nearest)", ("decode_sv_unroll", 8)),
        (DECODE, 2, 512, 1, "default", ("decode_sv_unroll", DEFAULT.decode_sv_unroll)),
        (PREFILL, 1, 4096, 1, "tuned at T=4096, 1 threads (exact)", ("elementwise_vectors", 1)),
        (replace(PREFILL, row_tile=32), 4, 4096, 1, "default", ("elementwise_vectors", 2)),
    ],
)
def test_lookup(spec, group_size, total, threads, origin, field):
    table = SizesTable(DEFAULT, RECORDS)
    chosen = table.choose(spec, group_size, total, threads)
    assert chosen.origin == origin and getattr(chosen.sizes, field[0]) == field[1]
    assert chosen.spec.tuned == ("" if chosen.sizes == DEFAULT else chosen.spec.tuned)
    assert table.sizes(chosen.spec) == chosen.sizes
    assert (
        SizesTable.from_dict(json.loads(json.dumps(table.as_dict()))).choose(spec, group_size, total, threads) == chosen
    )


@pytest.mark.parametrize("spec", [DECODE, PREFILL, replace(PREFILL, row_tile=32)], ids=lambda spec: spec.name)
def test_recorded_defaults_need_no_kernel_of_their_own(spec):
    """A record names all sizes; on a machine with other defaults it would mean other code."""
    sizes = DEFAULT.with_q_block(spec.row_tile) if spec.row_tile > 1 else DEFAULT
    kept = record(spec, 1, 512, 1, **recorded_fields(spec, sizes))
    table = SizesTable(DEFAULT, [kept])
    assert table.choose(spec, 1, 512, 1).spec == spec and not table.tuned_specs()
    other = SizesTable(replace(DEFAULT, kv_block=2 * DEFAULT.kv_block, kv_chunk=2048), [kept])
    assert other.choose(spec, 1, 512, 1).spec.tuned == kept.digest


@pytest.mark.parametrize("field", ["kv_chunk", "decode_kv_block", "q_block", "decode_rows"])
def test_records_that_add_in_different_orders_are_refused(field):
    other = record(DECODE, 1, 32768, 1, **{field: 2 * getattr(DEFAULT, field)})
    assert field in ORDER_FIELDS
    with pytest.raises(ValueError, match="records differ"):
        SizesTable(DEFAULT, [*RECORDS, other])


def write(folder, target, *records: TunedRecord, name: str = ""):
    file = folder / target.name / "block_sizes.json"
    file.parent.mkdir(parents=True)
    content = {"target": name or target.name, "architecture": target.architecture}
    file.write_text(json.dumps({**content, "records": [asdict(r) for r in records]}))
    return file


def test_the_users_records_come_first(tmp_path):
    user = write(tmp_path, TARGET, record(DECODE, 1, 512, 1, decode_sv_unroll=8))
    assert [r.sizes for r in variants.tuned_records(TARGET, user)] == [{"decode_sv_unroll": 8}]


def test_records_of_another_target_are_not_used(tmp_path):
    user = write(tmp_path, TARGET, record(DECODE, 1, 512, 1, decode_sv_unroll=8), name="x86-avx512")
    assert variants.tuned_records(TARGET, user) == []


def test_a_broken_log_is_named(tmp_path):
    user = write(tmp_path, TARGET)
    user.write_text('{"target": "x86-avx2"')
    with pytest.raises(BuildError, match=r"block_sizes\.json: not a table"):
        variants.tuned_records(TARGET, user)


@pytest.mark.slow
def test_a_call_uses_the_users_records_and_says_so(tmp_path, monkeypatch):
    target = find_target(best_target())
    spec = KernelSpec.parse("flash_decode_f32_f32_h8_r2")
    runtime.launcher()
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setattr(runtime, "_libraries", {})
    write(variants.user_logs(), target, record(spec, 2, 64, 1, decode_sv_unroll=2))
    attributes, inputs = make_call("f32", total=40, head_size=8)
    operator = GroupQueryAttention(**attributes, num_threads=1)
    operator(**inputs)
    plan = operator.last_plan
    assert plan is not None and plan.sizes_origin == "tuned at T=64, 1 threads (exact)"
    assert plan.block_sizes.decode_sv_unroll == 2 and "_t" in plan.kernels[-1]
    family = variants.family_variant(target.name)
    assert not [r for r in family.sizes.records if r.kernel == spec.name]
