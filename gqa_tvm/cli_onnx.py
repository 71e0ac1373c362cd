"""The command `gqa-tvm run MODEL.onnx`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx")
    parser.add_argument("--inputs", metavar="FILE.npz", help="arrays by input name (random where shapes are fixed)")
    parser.add_argument("--outputs", metavar="FILE.npz", help="where to write the outputs")
    parser.add_argument("--strategy", default="auto", help="auto, naive, flash or flash_decoding (%(default)s)")
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Runs a model once and prints its outputs and what its attention nodes did."""
    import numpy as np

    from gqa_tvm.onnx import OnnxModel

    model = OnnxModel(options.model, strategy=options.strategy, num_threads=options.threads)
    if options.inputs is None:
        inputs = model.random_inputs(options.seed)
    else:
        with np.load(options.inputs) as file:
            inputs = dict(file)
    outputs = model.run(inputs)
    for name, plan, seconds in model.node_runs:
        how = "" if plan is None else f"{plan.strategy.value}, {', '.join(plan.kernels)}, {plan.target}"
        print(f"{name}: {how}, {1000 * seconds:.2f} ms")
    for name, array in outputs.items():
        print(f"{name}: {array.dtype} {list(array.shape)}")
    if options.outputs is not None:
        np.savez(options.outputs, **outputs)  # type: ignore[arg-type]
    return 0
