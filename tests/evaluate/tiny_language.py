"""A tiny language model with random weights, and a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import torch


def tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per byte; token 256 is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny_model(**changes: Any) -> Any:
    """Return a model with two layers and four query heads in two groups."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=257, num_key_value_heads=2, initializer_range=0.4, **{**sizes, **changes})
    return LlamaForCausalLM(config).eval()
