"""One `.so` of many kernels: built, loaded by path, refused with a reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from operator_calls import make_call

from gqa_tvm import BuildError, GroupQueryAttention, InvalidArgument, build, load
from gqa_tvm.build import usual_kernels
from gqa_tvm.kernels import KernelSpec
from gqa_tvm.prepared_call import PreparedCall
from gqa_tvm.runtime import KernelLibrary
from gqa_tvm.strategy import Strategy, StrategyRules
from gqa_tvm.targets import best_target
from gqa_tvm.validation import Inputs, validate
from gqa_tvm.variants import machine_variant


@pytest.mark.slow
def test_build_load_and_refuse(tmp_path):  # B138
    path = tmp_path / "libgqa.so"
    seen = []
    build(output=path, head_sizes=[64], progress=lambda done, total, name: seen.append((done, total)))
    attributes, inputs = make_call("i8", total=70)
    wanted = GroupQueryAttention(**attributes)(**inputs)
    got = GroupQueryAttention(**attributes, library=str(path))(**inputs)
    np.testing.assert_array_equal(got.output, wanted.output)
    assert load(path).kernel(KernelSpec("naive", "f32", "i4", 64))


_WRONG_ARGUMENTS = {
    "dtype": (2, np.zeros((1, 1, 4, 64), np.float32)),
    "columns": (2, np.zeros((1, 1, 4, 32), np.int8)),
    "axes": (4, np.zeros(4, np.int32)),
    "absent": (8, None),
    "strided": (8, np.zeros(128, np.float32)[::2]),
    "no number": (11, "0"),
}


@pytest.mark.parametrize(("number", "wrong"), _WRONG_ARGUMENTS.values(), ids=_WRONG_ARGUMENTS)
def test_a_kernel_names_the_argument_it_refuses(number, wrong):
    spec = KernelSpec("append", "f32", "i8", 64)
    f32, cache = np.float32, np.zeros((1, 1, 4, 64), np.int8)
    rotary = (np.zeros((1, 1), np.int64), np.zeros((1, 1), f32), np.zeros((1, 1), f32))
    rows = [np.zeros((1, 1, 64), f32)] * 2
    arguments = [*rows, cache, cache, np.zeros((1, 4), np.int32), *rotary, np.zeros(64, f32), np.ones(1, f32)]
    arguments += [np.ones(1, f32), 0.0, 0, 0, 0]
    kernel = KernelLibrary().kernel(spec)
    kernel(*arguments)
    arguments[number] = wrong
    with pytest.raises(TypeError, match=f"Mismatched argument #{number} of {spec.name}"):
        kernel(*arguments)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_the_usual_kernels_serve_any_number_of_tokens(group):
    usual = set(usual_kernels(machine_variant(best_target()), [64]))
    for tokens in range(1, 300):
        attributes, inputs = make_call("i8", tokens=tokens, total=300, heads=group, kv_heads=1)
        op = GroupQueryAttention(**attributes)
        problem = validate(op.attributes, Inputs(**{n: inputs.get(n) for n in Inputs._fields}))
        library = _Asked()
        rules = StrategyRules(Strategy.AUTO, False, library.sizes.default.few_rows)
        arguments = (op.attributes, Inputs(**{n: inputs.get(n) for n in Inputs._fields}), problem, library, rules, 1)
        PreparedCall(*arguments).attention(problem)
        assert library.asked <= usual


class _Asked:
    """A library that notes what it is asked for."""

    def __init__(self):
        self.asked, self.target, self.target_reason = set(), best_target(), ""
        self.sizes = machine_variant(self.target).sizes

    def kernel(self, spec):
        self.asked.add(spec)


@pytest.mark.slow
def test_a_library_is_refused_with_a_reason(tmp_path):  # B138
    path = tmp_path / "libgqa.so"
    build(output=path, head_sizes=[64])
    attributes, _ = make_call("i8", total=70)

    with pytest.raises(InvalidArgument, match="not both"):
        GroupQueryAttention(**attributes, library=str(path), target="generic")
    manifest_file = tmp_path / "libgqa.so.json"
    manifest = json.loads(manifest_file.read_text())
    manifest_file.write_text(json.dumps({**manifest, "stamp": "0" * 16}))
    with pytest.raises(BuildError, match=f"{'0' * 16}, wanted {manifest['stamp']}"):
        load(path)
    manifest_file.write_text(json.dumps(manifest))
    broken = tmp_path / "broken.so"
    broken.write_bytes(path.read_bytes()[:1000])
    (tmp_path / "broken.so.json").write_text(json.dumps(manifest))
    with pytest.raises(BuildError, match="damaged: 1000 bytes"):
        load(broken)
    with pytest.raises(BuildError, match="manifest"):
        load(tmp_path / "absent.so")


@pytest.mark.parametrize("name", ["flash_decode_f32_i8_h128_r2", "append_f32_f32_h1", "naive_f32_i4_h80"])
def test_names_and_specs_are_the_same_thing(name):
    assert KernelSpec.parse(name).name == name


@pytest.mark.parametrize("name", ["", "append", "flash_f32_i8_h128", "naive_f32_i8_h128_x"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="not a kernel name"):
        KernelSpec.parse(name)
