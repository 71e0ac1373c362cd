"""Whole ONNX models with GroupQueryAttention nodes: equal to onnxruntime, clear about what they cannot take."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from operator_calls import make_call

from gqa_tvm import InvalidArgument
from gqa_tvm.cli import main
from gqa_tvm.onnx import OnnxModel, run
from gqa_tvm.strategy import Strategy

TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD = 5, 24, 4, 2, 8
OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]


def projections(rng):
    """x -> q, k, v by three matrix products."""
    widths = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
    weights = {n: rng.standard_normal((HIDDEN, width)).astype(np.float32) / 5 for n, width in widths.items()}
    nodes = [helper.make_node("MatMul", ["x", f"w_{name}"], [name]) for name in weights]
    return nodes, [numpy_helper.from_array(weight, f"w_{name}") for name, weight in weights.items()]


def two_layers(**attributes):
    """A model of two attention nodes after one another: x [1, 5, 24] -> y [1, 5, 32] and the first layer's cache."""
    nodes, constants = projections(np.random.default_rng(0))
    constants += [
        numpy_helper.from_array(np.array([TOKENS - 1], np.int32), "seqlens"),
        numpy_helper.from_array(np.array([TOKENS], np.int32), "total"),
    ]
    attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    for name, source, outputs in (("first", "q", ["a", "keys", "values"]), ("second", "a", ["y", "", ""])):
        inputs = [source, "k", "v", "", "", "seqlens", "total"]
        nodes.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, name, domain="com.microsoft", **attributes)
        )
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)  # noqa: E731
    outputs = [value("y", [1, TOKENS, HEADS * HEAD]), value("keys", [1, KV_HEADS, TOKENS, HEAD])]
    graph = helper.make_graph(nodes, "two_layers", [value("x", [1, TOKENS, HIDDEN])], outputs, constants)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=10)


@pytest.mark.parametrize("attributes", [{}, {"softcap": 3.0}, {"local_window_size": 2}], ids=str)
def test_a_model_is_what_onnxruntime_makes_of_it(attributes):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = two_layers(**attributes)
    inputs = {"x": np.random.default_rng(1).standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = dict(zip(("y", "keys"), session.run(["y", "keys"], inputs), strict=True))
    got = run(model, inputs)
    assert got.keys() == wanted.keys()
    np.testing.assert_allclose(got["y"], wanted["y"], atol=2e-5)
    np.testing.assert_allclose(got["keys"], wanted["keys"], atol=2e-5)


def test_options_reach_every_node():
    model = OnnxModel(two_layers(), strategy="naive", num_threads=1)
    model.run(model.random_inputs())
    names, plans, seconds = zip(*model.node_runs, strict=True)
    assert names == ("first", "second") and all(s > 0 for s in seconds)
    assert {plan.strategy for plan in plans} == {Strategy.NAIVE} and {plan.num_threads for plan in plans} == {1}


def test_the_command(tmp_path, capsys):
    path, inputs, outputs = tmp_path / "model.onnx", tmp_path / "in.npz", tmp_path / "out.npz"
    model = two_layers()
    onnx.save(model, path)
    x = np.random.default_rng(2).standard_normal((1, TOKENS, HIDDEN)).astype(np.float32)
    np.savez(inputs, x=x)
    assert main(["run", str(path), "--inputs", str(inputs), "--outputs", str(outputs)]) == 0
    printed = capsys.readouterr().out
    assert "second: flash, append_f32_f32_h8, " in printed and "y: float32 [1, 5, 32]" in printed
    with np.load(outputs) as file:
        np.testing.assert_array_equal(file["y"], run(model, {"x": x})["y"])
    assert main(["run", str(path)]) == 0


@pytest.mark.parametrize(
    ("inputs", "message"), [({}, "inputs missing: x; wanted x"), ({"x": 0, "z": 0}, "unknown inputs: z; wanted x")]
)
def test_wrong_inputs_are_named(inputs, message):
    with pytest.raises(InvalidArgument, match=message):
        run(two_layers(), inputs)


def test_what_a_node_cannot_be_is_refused():
    with pytest.raises(InvalidArgument, match="num_heads"):
        OnnxModel(two_layers(num_heads=3))
    with pytest.raises(InvalidArgument, match="colour"):
        OnnxModel(two_layers(colour=1))


def test_free_dimensions_need_values():
    model = two_layers()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "tokens"
    with pytest.raises(InvalidArgument, match=r"x has free dimensions \[1, tokens, 24\]"):
        OnnxModel(model).random_inputs()


@pytest.mark.parametrize("content", [b"", b"\x7fELF no model", b"\x08\x07"])
def test_files_that_are_no_model(content, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert main(["run", str(path)]) == 1
    assert "model.onnx is not an ONNX model" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "absent.onnx")]) == 1


def test_a_quantised_node_keeps_its_cache(tmp_path):
    attributes, arrays = make_call("i8-channel", total=9, head_size=HEAD)
    names = [name for name in arrays if not name.startswith("present")]
    order = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length")
    inputs = [*order, *[""] * 5, "k_scale", "v_scale"]
    node = helper.make_node("GroupQueryAttention", inputs, ["output", "pk", "pv"], domain="com.microsoft", **attributes)
    value = lambda name, dtype, shape: helper.make_tensor_value_info(  # noqa: E731
        name, helper.np_dtype_to_tensor_dtype(dtype), shape
    )
    graph_inputs = [value(name, arrays[name].dtype, arrays[name].shape) for name in names]
    outputs = [value("output", np.dtype(np.float32), None), value("pk", np.dtype(np.int8), None)]
    model = helper.make_model(
        helper.make_graph([node], "quantised", graph_inputs, outputs), opset_imports=OPSETS, ir_version=10
    )
    got = run(model, {name: arrays[name] for name in names})
    from gqa_tvm import GroupQueryAttention

    wanted = GroupQueryAttention(**attributes)(**{name: arrays[name] for name in names})
    np.testing.assert_array_equal(got["output"], wanted.output)
    np.testing.assert_array_equal(got["pk"], wanted.present_key)
