"""Token by token generation, greedy or sampled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gqa_tvm.language_model.transformer import Transformer
from gqa_tvm.language_model.weights import FloatArray


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the best one at temperature 0, else drawn at random."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")


@dataclass
class Timing:
    """Seconds of every decode step, and of the attention calls in it."""

    step_seconds: list[float] = field(default_factory=list)
    attention_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """From the median step, as single steps are disturbed by other processes."""
        return 1.0 / statistics.median(self.step_seconds) if self.step_seconds else float("nan")

    @property
    def attention_share(self) -> float:
        """The part of a decode step that was spent in attention, between 0 and 1.

        The median over the steps, as for the speed: from sums, one long stall would decide it.
        """
        pairs = zip(self.attention_seconds, self.step_seconds, strict=True)
        shares = [attention / step for attention, step in pairs]
        return statistics.median(shares) if shares else float("nan")


def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling | None = None,
    end_token: int | None = None,
    timing: Timing | None = None,
) -> Iterator[int]:
    """Yields up to ``max_tokens`` tokens that follow ``prompt``, ending before ``end_token``.

    The prompt goes through the model in one call; ``timing`` collects the decode steps after it.
    """
    sampling = Sampling() if sampling is None else sampling
    rng = np.random.default_rng(sampling.seed)
    scores = model.logits(model.forward(prompt)[-1:])[0]
    for count in range(1, max_tokens + 1):
        token = _choose(scores, sampling.temperature, rng)
        if token == end_token:
            return
        yield token
        if count < max_tokens:
            scores = _step(model, token, timing)


def _step(model: Transformer, token: int, timing: Timing | None) -> FloatArray:
    started = time.perf_counter()
    attention_before = model.attention_seconds
    scores: FloatArray = model.logits(model.forward([token]))[0]
    if timing is not None:
        timing.step_seconds.append(time.perf_counter() - started)
        timing.attention_seconds.append(model.attention_seconds - attention_before)
    return scores


def _choose(scores: FloatArray, temperature: float, rng: np.random.Generator) -> int:
    if temperature == 0.0:
        return int(scores.argmax())
    # The largest of scores / temperature plus Gumbel noise is a draw from their softmax.
    return int((scores / temperature + rng.gumbel(size=scores.shape)).argmax())
