"""The command line ``gqa-tvm``: one function a subcommand, all of them in ``COMMANDS``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gqa_tvm import cli_onnx
from gqa_tvm.cli_arguments import not_negative, positive
from gqa_tvm.cli_library import (
    add_build_arguments,
    add_info_arguments,
    build_command,
    build_with_progress,
    info_command,
)
from gqa_tvm.cli_tune import add_tune_arguments, run_tune

if TYPE_CHECKING:
    from gqa_tvm.language_model.calibration import LayerMagnitudes
    from gqa_tvm.language_model.load import LanguageModel
    from gqa_tvm.language_model.transformer import AttentionFactory

DESCRIPTION = "Grouped query attention for CPUs with a float32, INT8 or INT4 KV cache."
DEMO_PROMPT = "Write one sentence about the ocean."
DEMO_CACHE = "int8-per-channel"
MODEL_HEAD_SIZE = 64
MAX_EVALUATION_TOKENS = 2048  # the byte vocabulary of the tiny model needs many more tokens


@dataclass(frozen=True)
class Command:
    """A subcommand: how it is called and what it runs; ``run`` returns the exit code."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand named by ``arguments`` (default: ``sys.argv``)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"gqa-tvm: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gqa-tvm", description=DESCRIPTION)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    from gqa_tvm.language_model.cache_modes import CACHE_MODES

    parser.add_argument("--prompt", default=DEMO_PROMPT, help="what to ask (%(default)s)")
    parser.add_argument(
        "--cache",
        choices=tuple(CACHE_MODES),
        default=DEMO_CACHE,
        help="how keys and values are kept (%(default)s)",
    )
    parser.add_argument("--max-tokens", type=positive, default=128, help="(%(default)s)")
    parser.add_argument(
        "--model",
        choices=("smollm2", "tiny"),
        default="smollm2",
        help="tiny: random weights, no network (%(default)s)",
    )
    parser.add_argument("--threads", type=positive, help="default: all usable cores")


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model_arguments(parser)
    parser.add_argument("--temperature", type=not_negative, default=0.0, help="0 = greedy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (%(default)s)")


def _generate(options: argparse.Namespace) -> int:
    """Answers one prompt."""
    with _limited_blas_threads(options.threads):
        model, attention = _load(options)
        magnitudes = None if options.cache == "fp32" else _calibrate(model, attention)
        _answer(model, attention, magnitudes, options)
    return 0


def _demo(options: argparse.Namespace) -> int:
    """Answers one prompt, then prints the table of all cache modes."""
    from gqa_tvm.kernel_cache import prebuilt_path
    from gqa_tvm.language_model import corpus, report

    options.temperature, options.seed = 0.0, 0
    if not prebuilt_path().exists():
        build_with_progress(head_sizes=(MODEL_HEAD_SIZE,))
    with _limited_blas_threads(options.threads):
        model, attention = _load(options)
        magnitudes = _calibrate(model, attention)
        _answer(model, attention, magnitudes, options)
        tokens = model.tokenizer.encode(corpus.evaluation_text())[:MAX_EVALUATION_TOKENS]
        reports = report.compare_cache_modes(model.weights, attention, magnitudes, tokens)
    print(f"\n{report.format_table(reports)}\n")
    print(f"{model.name}; {report.machine_line()}")
    print(f"Perplexity over {len(tokens)} tokens, decoding after them; scales from another text.")
    return 0


def _load(options: argparse.Namespace) -> tuple[LanguageModel, AttentionFactory]:
    from functools import partial

    from gqa_tvm import GroupQueryAttention
    from gqa_tvm.language_model.load import load_smollm2_or_tiny, load_tiny

    model = load_tiny() if options.model == "tiny" else load_smollm2_or_tiny()
    return model, partial(GroupQueryAttention, num_threads=options.threads)


def _calibrate(model: LanguageModel, attention: AttentionFactory) -> tuple[LayerMagnitudes, ...]:
    from gqa_tvm.language_model import calibration, corpus

    tokens = model.tokenizer.encode(corpus.calibration_text())
    return calibration.observe(model.weights, attention, tokens)


def _answer(
    model: LanguageModel,
    attention: AttentionFactory,
    magnitudes: tuple[LayerMagnitudes, ...] | None,
    options: argparse.Namespace,
) -> None:
    from gqa_tvm.language_model.cache_modes import CACHE_MODES
    from gqa_tvm.language_model.calibration import scales_for
    from gqa_tvm.language_model.generate import Sampling, Timing, generate
    from gqa_tvm.language_model.tokenizer import TextStream, chat_prompt
    from gqa_tvm.language_model.transformer import Transformer

    mode = CACHE_MODES[options.cache]
    prompt = model.tokenizer.encode(chat_prompt(options.prompt))
    capacity = len(prompt) + options.max_tokens
    scales = None if magnitudes is None else scales_for(mode, magnitudes)
    transformer = Transformer(model.weights, attention, mode, scales, capacity)
    sampling = Sampling(options.temperature, options.seed)
    end_token = model.tokenizer.end_token
    timing, text = Timing(), TextStream(model.tokenizer)
    for token in generate(transformer, prompt, options.max_tokens, sampling, end_token, timing):
        print(text.feed(token), end="", flush=True)
    print(text.close())
    speed = f"{timing.tokens_per_second:.1f} tokens/s"
    share = f"{100 * timing.attention_share:.1f} % of the time in attention"
    print(f"[{model.name}, {mode.name} cache: {speed}, {share}]", file=sys.stderr)


def _limited_blas_threads(threads: int | None) -> AbstractContextManager[Any]:
    """Keeps NumPy's matrix products on as many threads as the attention kernels."""
    if threads is None:
        return nullcontext()
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[Any] = threadpool_limits(limits=threads, user_api="blas")
    return limits


COMMANDS = (
    Command("generate", "answer a prompt with SmolLM2", _add_generate_arguments, _generate),
    Command("demo", "answer a prompt, then compare all caches", _add_model_arguments, _demo),
    Command("run", "run an ONNX model with GroupQueryAttention nodes", cli_onnx.add_arguments, cli_onnx.run),
    Command("build", "build kernels ahead, or a library of them", add_build_arguments, build_command),
    Command("info", "show this CPU's target and kernels, or a library's", add_info_arguments, info_command),
    Command("tune", "search faster block sizes for this CPU, or another one over RPC", add_tune_arguments, run_tune),
)


if __name__ == "__main__":
    raise SystemExit(main())
