"""One GroupQueryAttention call as a few numbers: small changes of them are calls again, and they print as code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from oracle import INPUT_NAMES

CACHE_BITS = {"int8": 8, "uint8": 4}


class Call(NamedTuple):
    """Attributes and all of ORT's inputs in ORT's order, None for an absent one."""

    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray | None]


@dataclass(frozen=True)
class Configuration:
    """A call without its random numbers. Every default is the plainest choice, which is where shrinking goes.

    Lengths: totals [B] keys per entry after the step, counts [B] = query_seqlens, capacity = rows of past (None = no
    past). Dtypes are NumPy names; an int8 cache is INT8, a uint8 one INT4.
    """

    seed: int = 0
    phase: str = ""
    # heads
    query: str = "float32"
    cache: str = "float32"
    kv_heads: int = 1
    group: int = 1
    head_size: int = 8
    # lengths
    new_tokens: int = 1
    total: int = 1
    totals: tuple[int, ...] = (1,)
    counts: tuple[int, ...] | None = None
    capacity: int | None = None
    shared_kv: bool = False
    sliding: bool = False
    # scores
    scale: float = 0.0
    softcap: float = 0.0
    window: int = -1
    causal: int = 1
    smooth: bool = False
    sink: bool = False
    qk_output: int = 0
    bias: str = ""  # which of B and N it has; "1" = neither
    bias_masks: bool = False  # some of it is -inf
    # tokens
    packed: bool = False
    norm: bool = False
    q_epsilon: float | None = None
    rotary: int = 0  # columns of the tables
    interleaved: bool = False
    position_columns: int = 0  # of position_ids, 0 = absent
    # cache
    per_channel: bool = False
    scale_shape: int = 0  # which of the shapes that are allowed
    negative_scale: bool = False
    stale_nan: bool = False  # past rows and bias columns that nobody may read are NaN
    # call
    in_place: bool = False
    strategy: str = "auto"
    seqlens_shape: int = 0  # [B], [B, 1] or [1, B]

    @property
    def batch(self) -> int:
        return len(self.totals)

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def bits(self) -> int:
        return CACHE_BITS.get(self.cache, 0)

    @property
    def is_prompt(self) -> bool:
        """S == T without query_seqlens: positions start at 0."""
        return self.new_tokens == self.total and self.counts is None

    @property
    def pasts(self) -> np.ndarray:
        """int [B]: position of query row 0."""
        if self.is_prompt and not self.sliding:
            return np.zeros(self.batch, int)
        return np.array(self.totals) - (self.new_tokens if self.counts is None else np.array(self.counts))

    @property
    def tables_rows(self) -> int:
        return max(self.total, *self.totals, self.new_tokens) + 2

    def __str__(self) -> str:
        plain = Configuration()
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name))

    def attributes(self) -> dict[str, Any]:
        """ORT's attributes, only those that are not at their default."""
        quant_type = "PER_CHANNEL" if self.per_channel else "PER_TENSOR"
        quantized = {"k_quant_type": quant_type, "v_quant_type": quant_type, "kv_cache_bit_width": self.bits}
        optional = {
            "scale": self.scale,
            "softcap": self.softcap,
            "do_rotary": int(self.rotary > 0),
            "rotary_interleaved": int(self.interleaved),
            "smooth_softmax": int(self.smooth),
            "sliding_window_cache": int(self.sliding),
            "qk_output": self.qk_output,
            "q_norm_epsilon": self.q_epsilon,
        }
        return {
            "num_heads": self.num_heads,
            "kv_num_heads": self.kv_heads,
            **{name: value for name, value in optional.items() if value},
            **({} if self.window == -1 else {"local_window_size": self.window}),
            **({} if self.causal else {"causal": 0}),
            **(quantized if self.bits else {}),
        }

    def sources(self) -> dict[str, str]:
        """Each present input as the expression that draws it from `rng`: what runs is what a report prints."""
        tokens = (self.batch, self.new_tokens)
        kv_shape = (self.batch, 0 if self.shared_kv else self.new_tokens, self.kv_heads * self.head_size)
        heads = self.num_heads + (2 * self.kv_heads if self.packed else 0)
        drawn = {"query": normal((*tokens, heads * self.head_size), self.query)}
        if not self.packed:
            drawn |= dict.fromkeys(("key", "value"), normal(kv_shape, self.query))
        if self.capacity is not None:
            drawn |= dict.fromkeys(("past_key", "past_value"), self._past_source(self.capacity))
        drawn["seqlens_k"] = _integers(self._shaped_seqlens())
        drawn["total_sequence_length"] = _integers([self.total])
        if self.rotary:
            drawn |= dict.fromkeys(("cos_cache", "sin_cache"), self._uniform((self.tables_rows, self.rotary), -1, 1))
        if self.position_columns:
            drawn["position_ids"] = self._positions_source()
        if self.bias:
            drawn["attention_bias"] = self._bias_source()
        if self.sink:
            drawn["head_sink"] = normal((self.num_heads,), self.query)
        if self.bits:
            drawn |= dict.fromkeys(("k_scale", "v_scale"), self._scale_source())
        if self.norm:
            weight = self._uniform((self.head_size,), 0.5, 1.5)
            drawn |= {"q_norm_weight": weight, "k_norm_weight": weight}
        if self.counts is not None:
            drawn["query_seqlens"] = _integers(list(self.counts))
        return drawn

    def draw(self) -> Call:
        """The call with its numbers: the same configuration, the same call."""
        names = {"np": np, "ml_dtypes": ml_dtypes, "rng": np.random.default_rng(self.seed)}
        # The expressions are made above.
        drawn = {name: eval(source, names) for name, source in self.sources().items()}
        return Call(self.attributes(), dict.fromkeys(INPUT_NAMES) | drawn)

    def held_rows(self) -> list[int]:
        """The past rows of each entry that the call may read."""
        held = np.array(self.totals) if self.shared_kv else self.pasts
        return [retained_rows(int(rows), self) for rows in held]

    def _shaped_seqlens(self) -> list[Any]:
        last = [total - 1 for total in self.totals]
        return (last, [[number] for number in last], [last])[self.seqlens_shape]

    def _uniform(self, shape: tuple[int, ...], low: float, high: float) -> str:
        return f'rng.uniform({low}, {high}, {shape}).astype("{self.query}")'

    def _past_source(self, capacity: int) -> str:
        shape = (self.batch, self.kv_heads, capacity, self.head_size)
        if self.bits == 8:
            return f'rng.integers(-128, 128, {shape}, "int8")'
        if self.bits == 4:
            return f'rng.integers(0, 256, {(*shape[:3], (self.head_size + 1) // 2)}, "uint8")'
        drawn = normal(shape, self.cache)
        if not self.stale_nan:
            return drawn
        held = f"np.array({self.held_rows()})[:, None, None, None]"
        return f'np.where(np.arange({capacity})[:, None] < {held}, {drawn}, np.nan).astype("{self.cache}")'

    def _positions_source(self) -> str:
        most = self.tables_rows - self.new_tokens + 1
        drawn = f"rng.integers(0, {most}, {(self.batch, self.position_columns)})"
        if self.counts is None:
            return drawn
        # Padding may carry any id.
        return f"np.where(np.arange({self.position_columns}) < np.array({list(self.counts)})[:, None], {drawn}, -7)"

    def _bias_source(self) -> str:
        shape = (
            self.batch if "B" in self.bias else 1,
            self.num_heads if "N" in self.bias else 1,
            self.new_tokens,
            self.total,
        )
        drawn = normal(shape, self.query)
        if self.bias_masks:
            drawn = f'np.where(rng.random({shape}) < 0.3, -np.inf, {drawn}).astype("{self.query}")'
        if self.stale_nan:
            seen = f"np.arange({self.total}) < np.array({list(self.totals)})[:, None, None, None]"
            drawn = f'np.where({seen}, {drawn}, np.nan).astype("{self.query}")'
        return drawn

    def _scale_source(self) -> str:
        """Scales that make codes of unit normals fill the range, or clamp."""
        channels = self.kv_heads * self.head_size
        shapes: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
        if self.per_channel:
            shapes = ((channels,), (self.kv_heads, self.head_size), (1, self.kv_heads, 1, self.head_size))
        low, high = {8: (0.01, 0.03), 4: (0.12, 0.4)}[self.bits]
        if self.negative_scale:
            low, high = -high, -low
        return f'rng.uniform({low}, {high}, {shapes[self.scale_shape]}).astype("float32")'


def normal(shape: tuple[int, ...], dtype: str) -> str:
    """Source of unit normals."""
    if dtype == "float32":
        return f'rng.standard_normal({shape}, "f4")'
    return f'rng.standard_normal({shape}).astype("{dtype}")'


def _integers(numbers: list[Any]) -> str:
    return f"np.int32({numbers})"


def retained_rows(total: int, configuration: Configuration) -> int:
    """Rows the cache holds of `total` tokens, counted one by one: a full window keeps its last rows, then goes on."""
    if not configuration.sliding:
        return total
    rows = 0
    for _ in range(total):
        rows = (configuration.window - 1 if rows == configuration.capacity else rows) + 1
    return rows
