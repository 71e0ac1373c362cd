"""Every shape that is timed, by name, with the work it takes; selections of them by name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

# Bits and float formats of a stored row; "i8c" and "i4c" are per channel.
CACHE_BITS = {"f32": 32, "f16": 16, "i8": 8, "i8c": 8, "i4": 4, "i4c": 4}
FEATURES = ("", "softcap", "sink", "bias", "window", "rotary")
GEMMS = ("qk_gemm", "sv_gemm")
_COLD_BYTES = 96 << 20


@dataclass(frozen=True)
class Workload:
    """One call: S new tokens of every entry, T keys after it. For the GEMMs: M = tokens, N or T = total, K = head_size.

    operation: "prefill" (S = T), "decode" (S = 1), "chunk" (S tokens behind a past), "qk_gemm" or "sv_gemm".
    cache: a key of CACHE_BITS; query: "f32" or "f16". window: keys a token sees, -1 = all. feature: one of FEATURES
    ("window": one that hides nothing). ragged: entries of T/2 to T keys. cold: takes turns over caches of 96 MiB in
    all, as a model of many layers does. paths: the naive path of this project is timed as well. precision: of this
    project, "exact", "balanced", "fast" or "approximate". layout: of this project's cache, "bnsh" or "packed", which is
    timed beside bnsh.
    """

    operation: str
    cache: str
    tokens: int
    total: int
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    query: str = "f32"
    batch: int = 1
    window: int = -1
    feature: str = ""
    ragged: bool = False
    cold: bool = False
    paths: bool = False
    precision: str = "exact"
    layout: str = "bnsh"

    @property
    def is_gemm(self) -> bool:
        return self.operation in GEMMS

    @property
    def name(self) -> str:
        """As kernels are named: operation, formats, sizes."""
        formats = self.cache if self.query == "f32" else f"{self.query}_{self.cache}"
        formats += f"_{self.layout}" if self.layout != "bnsh" else ""
        if self.is_gemm:
            length = "n" if self.operation == "qk_gemm" else "t"
            return f"{self.operation}_{formats}_m{self.tokens}_{length}{self.total}_k{self.head_size}"
        sizes = {
            "prefill": f"s{self.total}",
            "decode": f"t{self.total}",
            "chunk": f"s{self.tokens}_t{self.total}",
        }[self.operation]
        parts = [self.operation, formats, sizes, f"n{self.heads}", f"kv{self.kv_heads}", f"h{self.head_size}"]
        parts += [f"b{self.batch}"] if self.batch > 1 else []
        parts += [f"w{self.window}"] if self.window > 0 else []
        marks = {self.feature: bool(self.feature), "ragged": self.ragged, "cold": self.cold}
        marks[self.precision] = self.precision != "exact"
        return "_".join([*parts, *(mark for mark, holds in marks.items() if holds)])

    @property
    def totals(self) -> tuple[int, ...]:
        """Keys of every entry after the call."""
        if not self.ragged:
            return (self.total,) * self.batch
        return tuple(self.total - b * self.total // (2 * self.batch) for b in range(self.batch))

    @property
    def flops(self) -> int:
        """Useful float operations: two products of a row with H columns for every key it sees, 2 operations a column.

        Masked keys count as nothing, whoever computes them.
        """
        if self.is_gemm:
            return 2 * self.tokens * self.total * self.head_size
        return 4 * self.head_size * self.heads * sum(map(self._seen_pairs, self.totals))

    @property
    def read_bytes(self) -> int:
        """Bytes of the cache rows that any token sees, keys and values, each once."""
        row_bytes = self.head_size * CACHE_BITS[self.cache] // 8
        if self.is_gemm:
            return self.total * row_bytes
        return 2 * self.kv_heads * row_bytes * sum(map(self._seen_rows, self.totals))

    @property
    def copies(self) -> int:
        """Calls with memory of their own to take turns over."""
        return -(-_COLD_BYTES // self.read_bytes) if self.cold else 1

    @property
    def working_set(self) -> int:
        """Bytes that come back into the caches only after all others were read."""
        return self.copies * self.read_bytes

    def _seen_pairs(self, total: int) -> int:
        """Sum over an entry's new tokens of the keys each sees."""
        past = total - self.tokens
        positions = range(past + 1, past + self.tokens + 1)
        return sum(min(position, self.window) for position in positions) if self.window > 0 else sum(positions)

    def _seen_rows(self, total: int) -> int:
        return min(total, self.window + self.tokens - 1) if self.window > 0 else total


def prefill(cache: str, tokens: int, *heads: int, **more: object) -> Workload:
    """heads: N, N_kv, H where they are not 16, 8, 128."""
    return Workload("prefill", cache, tokens, tokens, *heads, **more)  # type: ignore[arg-type]


def decode(cache: str, total: int, *heads: int, **more: object) -> Workload:
    """heads: N, N_kv, H where they are not 16, 8, 128."""
    return Workload("decode", cache, 1, total, *heads, **more)  # type: ignore[arg-type]


def chunk(cache: str, tokens: int, total: int, **more: object) -> Workload:
    return Workload("chunk", cache, tokens, total, **more)  # type: ignore[arg-type]


_LENGTHS = (512, 1024, 2048, 4096)
_CACHES = tuple(CACHE_BITS)
_SHAPES = ((16, 8, 128), (32, 8, 128), (4, 4, 128), (14, 2, 64), (9, 3, 64))


def _query_of(cache: str) -> str:
    """onnxruntime takes a float16 cache with a float16 query only."""
    return "f16" if cache == "f16" else "f32"


def _gemms() -> list[Workload]:
    """What onnxruntime's benchmarks time of its matrix kernels, M1 N512 K128 first."""
    shapes = product(GEMMS, (512, 4096), (1, 64), ("i8", "i8c", "i4"))
    return [
        Workload(operation, cache, rows, total, heads=1, kv_heads=1, head_size=128)
        for operation, total, rows, cache in shapes
    ]


def _onnxruntimes_own() -> list[Workload]:
    """The grid of onnxruntime's benchmarks of this operator."""
    paths = [prefill("i8", total, paths=True) for total in _LENGTHS]
    paths += [decode("i8", total, paths=True) for total in _LENGTHS]
    return [
        *paths,
        *(shape("i8c", total) for shape, total in product((prefill, decode), _LENGTHS)),
        decode("i8", 2048, batch=4),
        *(decode("i8", total, 4, 4, 128) for total in _LENGTHS),
        prefill("i4", 2048),
    ]


def _decodes() -> list[Workload]:
    """Our shapes: every cache and family of heads, short of memory and not."""
    by_cache = [decode(c, total, query=_query_of(c)) for c, total in product(_CACHES, (4096, 32768))]
    by_shape = [decode(c, 4096, *heads) for heads, c in product(_SHAPES[1:], ("f32", "i8", "i4"))]
    return [
        *by_cache,
        *by_shape,
        decode("f16", 4096),
        *(decode(c, 4096, cold=True) for c in ("f32", "i8", "i4")),
        *(decode(c, 1024, batch=64, ragged=True) for c in ("f32", "i8")),
        *(chunk("i8", tokens, 4096) for tokens in (2, 4, 8, 16)),
        *(chunk("f32", tokens, 4096) for tokens in (4, 16)),
    ]


def _prefills() -> list[Workload]:
    by_cache = [prefill(c, tokens, query=_query_of(c)) for c, tokens in product(_CACHES, (512, 2048))]
    by_shape = [prefill(c, 512, *heads) for heads, c in product(_SHAPES[1:], ("f32", "i8"))]
    return [*by_cache, prefill("f32", 4096), *by_shape]


def _features() -> list[Workload]:
    """Each feature beside the plain call; a narrow window; calls so small that only their overhead counts."""
    shapes = product(("f32", "i8"), FEATURES)
    pairs = [(decode(c, 4096, feature=f), prefill(c, 512, feature=f)) for c, f in shapes]
    return [
        *(workload for pair in pairs for workload in pair),
        *(decode(c, 16384, window=256) for c in ("f32", "i8")),
        *(decode(c, total, 2, 2, 64) for c, total in product(("f32", "i8"), (1, 6))),
    ]


def _precisions() -> list[Workload]:
    """What fewer digits gain over the exact kernels."""
    shapes = [(prefill, 512), (prefill, 2048), (decode, 4096)]
    return [
        shape(cache, total, precision=precision)
        for (shape, total), (cache, precision) in product(
            shapes, (("i8", "balanced"), ("i8", "fast"), ("i8", "approximate"), ("i4", "fast"))
        )
    ]


def _packed() -> list[Workload]:
    """Packed caches beside BNSH ones: 1 to 8 query heads per KV head."""
    shapes = product((4096, 32768), ("i8", "i4"), (8, 16, 32, 64))
    decodes = [decode(cache, total, heads, layout="packed") for total, cache, heads in shapes]
    return [*decodes, *(prefill(cache, 512, layout="packed") for cache in ("i8", "i4"))]


def _quick() -> list[Workload]:
    """The claims of the README, the rows closest to a loss, and one of everything else."""
    return [
        *(prefill(c, 512) for c in ("f32", "i8", "i8c", "i4", "i4c")),
        *(decode(c, 4096) for c in ("f32", "i8", "i8c", "i4", "i4c")),
        decode("f32", 32768),
        decode("i8", 32768),
        decode("f16", 4096, query="f16"),
        decode("i8", 4096, 14, 2, 64),
        decode("i8", 4096, 4, 4, 128),
        chunk("i8", 4, 4096),
        decode("i8", 16384, window=256),
        decode("f32", 6, 2, 2, 64),
        decode("i8", 1024, batch=64, ragged=True),
        Workload("qk_gemm", "i8", 1, 512, heads=1, kv_heads=1),
    ]


def _documentation() -> list[Workload]:
    """What docs/performance.md shows of one thread."""
    plain = ("i8", "i8c", "i4", "f32")
    return [
        *(prefill("i8", total, paths=True) for total in _LENGTHS),
        *(decode("i8", total, paths=True) for total in (*_LENGTHS, 16384, 32768)),
        *(decode(c, total, query=_query_of(c)) for c, total in product(("f32", "i4"), (512, 1024, 2048, 4096))),
        *(prefill(c, tokens, query=_query_of(c)) for tokens, c in product((512, 2048), _CACHES)),
        *(prefill(c, 1024, query=_query_of(c)) for c in ("f32", "f16", "i4")),
        *(decode(c, total, query=_query_of(c)) for total, c in product((4096, 32768), _CACHES)),
        *(decode(c, total) for total, c in product((64, 300), ("f32", "i8", "i4"))),
        *(decode(c, 4096, *heads) for heads, c in product(_SHAPES[1:], plain)),
        *(decode(c, 32768, *heads) for heads, c in product(_SHAPES[1:3], ("i8", "i4"))),
        *(prefill(c, 512, *heads) for heads, c in product(_SHAPES[1:], ("f32", "i8"))),
        decode("i8", 2048, batch=4),
        *(decode("i8", total, 4, 4, 128) for total in (512, 2048)),
        decode("f16", 4096),
        *(decode(c, 4096, cold=True) for c in ("f32", "i8", "i4")),
        *(decode(c, 1024, batch=64, ragged=True) for c in ("f32", "i8")),
        *(chunk("i8", tokens, 4096) for tokens in (2, 4, 8, 16)),
        *(chunk(c, 128, 16384, query=_query_of(c)) for c in ("f32", "f16", "i8", "i4")),
        *_features(),
        *_precisions(),
        *(w for w in _gemms() if w.cache != "i8c"),
    ]


def _scaling() -> list[Workload]:
    """What docs/performance.md shows of several threads; all of it is in the documentation, too."""
    plain = ("f32", "i8", "i4")
    return [
        *(prefill("i8", total, paths=True) for total in _LENGTHS[:3]),
        *(prefill(c, 512, query=_query_of(c)) for c in _CACHES),
        *(decode("i8", total, paths=True) for total in (*_LENGTHS, 32768)),
        *(decode(c, total, query=_query_of(c)) for total, c in product((4096, 32768), _CACHES)),
        *(decode(c, 4096, *heads) for heads, c in product(_SHAPES[1:], plain)),
        decode("i8", 2048, batch=4),
        *(decode(c, 1024, batch=64, ragged=True) for c in ("f32", "i8")),
        *(decode(c, 4096, cold=True) for c in plain),
        *(chunk("i8", tokens, 4096) for tokens in (4, 16)),
        *(decode(c, total) for total, c in product((64, 300), plain)),
    ]


def _unique(workloads: list[Workload]) -> tuple[Workload, ...]:
    """Each name once; the first with a name stays."""
    by_name: dict[str, Workload] = {}
    for workload in workloads:
        by_name.setdefault(workload.name, workload)
    return tuple(by_name.values())


SELECTIONS: dict[str, tuple[Workload, ...]] = {
    "quick": _unique(_quick()),
    "onnxruntime": _unique([*_onnxruntimes_own(), *_gemms()]),
    "decode": _unique(_decodes()),
    "prefill": _unique(_prefills()),
    "features": _unique(_features()),
    "precisions": _unique(_precisions()),
    "packed": _unique(_packed()),
    "documentation": _unique(_documentation()),
    "scaling": _unique(_scaling()),
}
SELECTIONS["all"] = _unique(
    [*_onnxruntimes_own(), *_gemms(), *_decodes(), *_prefills(), *_features(), *_quick(), *_documentation(), *_packed()]
)
