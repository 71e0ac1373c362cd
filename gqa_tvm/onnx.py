"""ONNX models with GroupQueryAttention nodes: those nodes run here, all others in onnx's reference evaluator."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from .errors import InvalidArgument
from .operator import GroupQueryAttention, Plan

DOMAIN = "com.microsoft"


class NodeRun(NamedTuple):
    """What a GroupQueryAttention node did."""

    name: str
    plan: Plan | None
    seconds: float


class OnnxModel:
    """A model ready to run.

    model: path or ModelProto. strategy, num_threads, target, library: of GroupQueryAttention, for every node. Raises
    InvalidArgument for a file that is no ONNX model and for attributes that a node cannot have.
    """

    def __init__(self, model: str | os.PathLike[str] | onnx.ModelProto, **options: Any) -> None:
        self.model = model if isinstance(model, onnx.ModelProto) else _read(model)
        self.node_runs: list[NodeRun] = []  # of the latest run, in the graph's order
        self._evaluator = ReferenceEvaluator(self.model, new_ops=[_node_class(options, self.node_runs)])

    @property
    def input_names(self) -> tuple[str, ...]:
        """Inputs that a run must be given: those without an initializer."""
        constants = {tensor.name for tensor in self.model.graph.initializer}
        return tuple(value.name for value in self.model.graph.input if value.name not in constants)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The model's outputs by name. Raises InvalidArgument for a missing or unknown input."""
        names = set(self.input_names)
        if missing := names - inputs.keys():
            raise InvalidArgument(f"inputs missing: {', '.join(sorted(missing))}; wanted {', '.join(self.input_names)}")
        if unknown := inputs.keys() - names:
            raise InvalidArgument(f"unknown inputs: {', '.join(sorted(unknown))}; wanted {', '.join(self.input_names)}")
        self.node_runs.clear()
        outputs = self._evaluator.run(None, dict(inputs))
        return dict(zip(self._evaluator.output_names, outputs, strict=True))

    def random_inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Normal numbers (zeros for integers) in the shapes that the model declares. Raises InvalidArgument for a free
        dimension."""
        rng = np.random.default_rng(seed)
        wanted = {value.name: value for value in self.model.graph.input}
        return {name: _random_tensor(rng, wanted[name]) for name in self.input_names}


def run(model: str | os.PathLike[str] | onnx.ModelProto, inputs: Mapping[str, np.ndarray], **options: Any) -> dict:
    """The outputs of a model, once: `OnnxModel(model, **options).run(inputs)`."""
    return OnnxModel(model, **options).run(inputs)


def _read(path: str | os.PathLike[str]) -> onnx.ModelProto:
    try:
        model = onnx.load(os.fspath(path))
    except OSError:
        raise
    except Exception as error:  # protobuf has an exception of its own for malformed bytes
        raise InvalidArgument(f"{os.fspath(path)} is not an ONNX model: {error}") from error
    if not model.graph.node:
        raise InvalidArgument(f"{os.fspath(path)} is not an ONNX model: it has no nodes")
    return model


def _random_tensor(rng: np.random.Generator, value: onnx.ValueInfoProto) -> np.ndarray:
    tensor = value.type.tensor_type
    if not all(d.HasField("dim_value") for d in tensor.shape.dim):
        names = [str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
        raise InvalidArgument(f"input {value.name} has free dimensions [{', '.join(names)}]: give its values")
    shape = [int(d.dim_value) for d in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    if np.issubdtype(dtype, np.floating):
        return rng.standard_normal(shape).astype(dtype)
    return np.zeros(shape, dtype)


def _node_class(options: Mapping[str, Any], runs: list[NodeRun]) -> type[OpRun]:
    """The class that onnx's evaluator makes an instance of for every node of this operator."""

    class GroupQueryAttentionNode(OpRun):
        op_domain = DOMAIN

        def __init__(self, onnx_node: onnx.NodeProto, run_params: dict, schema: Any = None) -> None:
            super().__init__(onnx_node, run_params, schema)
            self._attention = GroupQueryAttention(**_attributes_of(onnx_node), **options)

        def _run(self, *inputs: np.ndarray | None, **_attributes: Any) -> tuple[np.ndarray | None, ...]:
            start = time.perf_counter()
            try:
                result = self._attention(*inputs)
            except TypeError as error:  # the evaluator would replace the text by its own
                raise InvalidArgument(f"node {self.onnx_node.name or self.onnx_node.output[0]}: {error}") from error
            name = self.onnx_node.name or self.onnx_node.output[0]
            runs.append(NodeRun(name, self._attention.last_plan, time.perf_counter() - start))
            return tuple(result)[: len(self.onnx_node.output)]

    GroupQueryAttentionNode.__name__ = "GroupQueryAttention"
    return GroupQueryAttentionNode


def _attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: _python_value(value) for name, value in values.items()}


def _python_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
