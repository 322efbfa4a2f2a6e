"""Questions in a chat template, for models that were tuned to chats.

The text and the question are the user's turn; the beginning of the answer starts the model's turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparge.evaluate.language.tasks import ANSWER, SUMMARY, Question

ROUNDING = 4
"""Tokens by which a template may take more of a long prompt than of one letter."""


def as_chat(item: Question, tokenizer: Any) -> Question:
    """Return the same question in the tokenizer's template.

    Raises:
        ValueError: the tokenizer has no template.
    """
    asked = item.prompt.removesuffix(item.begun).rstrip().removesuffix(ANSWER).removesuffix(SUMMARY).rstrip()
    reference = item.reference if item.begun else item.reference.lstrip()
    return replace(item, prompt=_templated(tokenizer, asked) + item.begun, reference=reference, is_chat=True)


def template_tokens(tokenizer: Any) -> int:
    """Return the number of tokens that the template takes from a prompt.

    Raises:
        ValueError: the tokenizer has no template.
    """
    return len(tokenizer(_templated(tokenizer, "a"), add_special_tokens=False).input_ids) + ROUNDING


def _templated(tokenizer: Any, asked: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat: expected a tokenizer with a chat template, got one without; leave --chat out")
    messages = [{"role": "user", "content": asked}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
