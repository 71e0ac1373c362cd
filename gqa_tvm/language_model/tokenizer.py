"""Text to token ids and back: SmolLM2's byte-level BPE, and plain bytes for the tiny model."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

SYSTEM_MESSAGE = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer(Protocol):
    """What generation and perplexity need to know about a vocabulary."""

    end_token: int

    def encode(self, text: str) -> list[int]:
        """The token ids of a text; ``<|im_start|>`` and ``<|im_end|>`` are single tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; a special token stands for none."""
        ...


def chat_prompt(message: str) -> str:
    """A user's message in SmolLM2-Instruct's chat template, up to where the answer begins."""
    turns = (("system", SYSTEM_MESSAGE), ("user", message))
    lines = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return lines + "<|im_start|>assistant\n"


class BytePairTokenizer:
    """SmolLM2's vocabulary: single digits, then GPT-2's byte-level byte-pair encoding."""

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        special_tokens: Sequence[int],
        end_token: int,
    ) -> None:
        """Takes what GGUF holds: all tokens in id order, merges as "left right", special ids."""
        from tokenizers import AddedToken, models, pre_tokenizers
        from tokenizers import Tokenizer as ByteLevelTokenizer

        pairs = []
        for merge in merges:
            left, right = merge.split(" ", 1)
            pairs.append((left, right))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._encoder = ByteLevelTokenizer(models.BPE(vocab=vocabulary, merges=pairs))
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._encoder.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        self._encoder.add_special_tokens([AddedToken(tokens[index]) for index in special_tokens])
        self._tokens = tokens
        self._special = frozenset(special_tokens)
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        self.end_token = end_token

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        return list(self._encoder.encode(text).ids)

    def token_bytes(self, token: int) -> bytes:
        """See ``Tokenizer.token_bytes``."""
        if token in self._special:
            return b""
        return bytes(self._byte_of[character] for character in self._tokens[token])


class ByteTokenizer:
    """Three special tokens and the 256 bytes: the vocabulary of the tiny random model."""

    SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def __init__(self) -> None:
        self.end_token = self.SPECIAL_TOKENS.index("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer.encode``."""
        for index, token in enumerate(self.SPECIAL_TOKENS):
            before, found, after = text.partition(token)
            if found:
                return [*self.encode(before), index, *self.encode(after)]
        return [byte + len(self.SPECIAL_TOKENS) for byte in text.encode()]

    def token_bytes(self, token: int) -> bytes:
        """See ``Tokenizer.token_bytes``."""
        byte = token - len(self.SPECIAL_TOKENS)
        return bytes([byte]) if byte >= 0 else b""


class TextStream:
    """Turns tokens into text as they arrive; a character may be spread over several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes, possibly none."""
        return _without_control_codes(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def close(self) -> str:
        """What is left of a character that never became complete."""
        return _without_control_codes(self._decoder.decode(b"", final=True))


def _without_control_codes(text: str) -> str:
    """Keeps a model from sending escape sequences to the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def _byte_characters() -> list[str]:
    """The character by which a GPT-2 vocabulary writes each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    characters.update({byte: chr(0x100 + count) for count, byte in enumerate(others)})
    return [characters[byte] for byte in range(256)]
