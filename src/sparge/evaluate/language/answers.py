"""Ask a question: the prompt is prefilled under a variant and the answer is decoded dense, as in generation."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.language.tasks import ANSWER, Question

ROUNDING = 4
"""Upper bound on the tokens that a template adds to a long prompt beyond those it adds to a single letter."""


@dataclass(frozen=True)
class Answer:
    """The answer to a question."""

    score: float  # from 0 to 1
    nll: float  # negative log-likelihood of the reference, per token
    text: str  # the generated text; if the score is exact, the most likely token at each position of the reference
    prompt_tokens: int


@torch.no_grad()
def ask(model: Any, tokenizer: Any, question: Question, attention: AbstractContextManager[Any]) -> Answer:
    """Ask a question. The prompt is prefilled within the context ``attention``."""
    device = next(model.parameters()).device
    prompt, reference = (torch.tensor([ids], device=device) for ids in tokenized(tokenizer, question))
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with attention:
        prefill = model(prompt, use_cache=True, **last_only)
    first = prefill.logits[:, -1:]
    cache = prefill.past_key_values
    if question.is_exact:
        logits = _forced(model, first, reference, cache)
        text = tokenizer.decode(logits.argmax(-1)[0])
        score = float(bool((logits.argmax(-1) == reference).all()))
    else:
        logits = _forced(model, first, reference, copy.deepcopy(cache))
        text = _greedy(model, tokenizer, first, cache, question.max_new_tokens)
        score = share_found(text, question.answers)
    nll = -float(logits.float().log_softmax(-1).gather(2, reference[..., None]).mean())
    return Answer(score, nll, text, prompt.shape[1])


def share_found(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a text contains as whole words.

    Example:
        >>> share_found("They are 12 and 345.", ["12", "34"])
        0.5
    """
    patterns = (rf"(?<!\w){re.escape(answer)}(?!\w)" for answer in answers)
    return sum(bool(re.search(pattern, text, re.IGNORECASE)) for pattern in patterns) / len(answers)


def tokenized(tokenizer: Any, question: Question) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt and of the reference.

    Both are tokenized as one text, because tokenizers add a space before a text, or merge letters across the boundary.
    The prompt ends where its own tokens differ from those of the whole text.
    """
    texts = (question.prompt, question.prompt + question.reference)
    prompt, both = (tokenizer(text, add_special_tokens=not question.is_chat).input_ids for text in texts)
    if both[-1] == tokenizer.eos_token_id:
        both = both[:-1]
    shared = next((index for index, (one, other) in enumerate(zip(prompt, both, strict=False)) if one != other), None)
    cut = min(len(prompt), len(both) - 1) if shared is None else shared
    return both[:cut], both[cut:]


def _forced(model: Any, first: Tensor, reference: Tensor, cache: Any) -> Tensor:
    """Return the logits of each token of the reference, given all tokens before it: (1, tokens, vocabulary)."""
    if reference.shape[1] == 1:
        return first
    rest = model(reference[:, :-1], past_key_values=cache, use_cache=True).logits
    return torch.cat([first, rest], 1)


def _greedy(model: Any, tokenizer: Any, first: Tensor, cache: Any, max_new_tokens: int) -> str:
    """Decode greedily up to the end-of-text token or the end of a non-empty line."""
    written: list[int] = []
    token, text = first.argmax(-1), ""
    for _ in range(max_new_tokens):
        written.append(int(token))
        text = str(tokenizer.decode(written, skip_special_tokens=True))
        if written[-1] == tokenizer.eos_token_id or "\n" in text.lstrip():
            break
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    return text


def as_chat(question: Question, tokenizer: Any) -> Question:
    """Return a question as the user's turn of a chat. The beginning of the answer becomes part of the model's turn.

    Raises:
        ValueError: the tokenizer has no template.
    """
    text = question.prompt.removesuffix(f"\n{ANSWER} {question.answer_start}")
    return replace(question, prompt=_templated(tokenizer, text) + question.answer_start, is_chat=True)


def template_tokens(tokenizer: Any) -> int:
    """Return the number of tokens that the chat template adds to a prompt.

    Raises:
        ValueError: the tokenizer has no template.
    """
    return len(tokenizer(_templated(tokenizer, "a"), add_special_tokens=False).input_ids) + ROUNDING


def _templated(tokenizer: Any, text: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat: expected a tokenizer with a chat template, got one without; omit --chat")
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
