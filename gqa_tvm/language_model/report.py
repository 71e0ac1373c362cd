"""The table of all cache modes: speed, share of attention, cache size, perplexity."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gqa_tvm.language_model.cache_modes import CACHE_MODES, CacheMode
from gqa_tvm.language_model.calibration import LayerMagnitudes, scales_for
from gqa_tvm.language_model.generate import Timing, generate
from gqa_tvm.language_model.transformer import AttentionFactory, Transformer
from gqa_tvm.language_model.weights import FloatArray, ModelWeights
from gqa_tvm.progress import ProgressBar

LOGIT_ROWS = 64  # rows of logits at a time: a full-size vocabulary takes 0.2 MB a row


@dataclass(frozen=True)
class CacheReport:
    """What one cache mode costs and how well it predicts the evaluation text."""

    mode: CacheMode
    tokens_per_second: float
    attention_share: float
    bytes_per_token: int
    perplexity: float


def perplexity(model: Transformer, tokens: Sequence[int]) -> float:
    """exp of the mean negative log likelihood of ``tokens[1:]``, after one prefill of them all."""
    if len(tokens) < 2:
        raise ValueError(f"perplexity needs at least 2 tokens, got {len(tokens)}")
    hidden = model.forward(tokens)[:-1]
    targets = np.asarray(tokens[1:], dtype=np.int64)
    total = 0.0
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        total += _negative_log_likelihood(model.logits(hidden[rows]), targets[rows])
    return float(np.exp(total / len(targets)))


def compare_cache_modes(
    weights: ModelWeights,
    attention: AttentionFactory,
    magnitudes: Sequence[LayerMagnitudes],
    evaluation_tokens: Sequence[int],
    decode_tokens: int = 48,
) -> list[CacheReport]:
    """Measures every mode on the same tokens; shows a progress bar."""
    reports = []
    with ProgressBar("measuring the cache modes", len(CACHE_MODES)) as progress:
        for mode in CACHE_MODES.values():
            capacity = len(evaluation_tokens) + decode_tokens
            scales = scales_for(mode, magnitudes)
            model = Transformer(weights, attention, mode, scales, capacity)
            reports.append(_measure(model, evaluation_tokens, decode_tokens))
            progress.advance()
    return reports


def format_table(reports: Sequence[CacheReport]) -> str:
    """The reports as a Markdown table."""
    lines = [
        "| cache            | tokens/s | in attention | cache bytes/token | perplexity |",
        "|------------------|---------:|-------------:|------------------:|-----------:|",
    ]
    for report in reports:
        share = f"{100 * report.attention_share:.1f} %"
        lines.append(
            f"| {report.mode.name:<16} | {report.tokens_per_second:8.1f} | {share:>12} "
            f"| {report.bytes_per_token:17,d} | {report.perplexity:10.2f} |"
        )
    return "\n".join(lines)


def machine_line() -> str:
    """CPU model, number of usable cores and versions, to stand beside every table."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}, NumPy {np.__version__}"


def _measure(model: Transformer, tokens: Sequence[int], decode_tokens: int) -> CacheReport:
    measured_perplexity = perplexity(model, tokens)
    timing = Timing()
    # The text starts over; what matters is that the cache is as full as the text is long.
    for _ in generate(model, tokens[:1], decode_tokens, timing=timing):
        pass
    return CacheReport(
        mode=model.mode,
        tokens_per_second=timing.tokens_per_second,
        attention_share=timing.attention_share,
        bytes_per_token=model.mode.bytes_per_token(model.weights.architecture),
        perplexity=measured_perplexity,
    )


def _negative_log_likelihood(logits: FloatArray, targets: np.ndarray) -> float:
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(scores).sum(axis=1))
    return float((log_sum - scores[np.arange(len(targets)), targets]).sum())
