"""Run EleutherAI's lm-evaluation-harness with sparse attention: `sparge lm-eval -- ARGUMENTS OF lm_eval`.

The harness loads models by name, so the attention "sparge" is registered in its process and set in the model arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sparge import integrations
from sparge.policy import Policy

CHOICE = "attn_implementation=sparge"


def with_sparse_attention(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the harness with sparse attention in the model arguments.

    Example:
        >>> with_sparse_attention(["--model", "hf", "--model_args", "pretrained=gpt2", "--tasks", "wikitext"])
        ['--model', 'hf', '--model_args', 'pretrained=gpt2,attn_implementation=sparge', '--tasks', 'wikitext']

    Raises:
        ValueError: there are no model arguments, or they set another attention.
    """
    arguments = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name not in ("--model_args", "-a"):
            continue
        target = index if equals else index + 1
        if target >= len(arguments):
            break
        value = value if equals else arguments[target]
        if value.lstrip().startswith("{"):
            raise ValueError(f"--model_args: expected name=value pairs, got JSON: {value!r}")
        chosen = [pair for pair in value.split(",") if pair.startswith("attn_implementation=")]
        if chosen not in ([], [CHOICE]):
            raise ValueError(f"--model_args: expected no attn_implementation other than sparge, got {value!r}")
        if not chosen:
            arguments[target] += f",{CHOICE}"
        return arguments
    raise ValueError("expected --model_args pretrained=... among the arguments of lm_eval, got none")


def run(policy: Policy, arguments: Sequence[str]) -> None:
    """Run the harness in this process with a policy.

    Raises:
        ImportError: lm_eval or transformers is not installed.
    """
    arguments = with_sparse_attention(arguments)
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ImportError(f"expected lm_eval to be installed (pip install 'lm_eval[hf]'), got {error!r}") from error
    integrations.register(policy)
    before = sys.argv
    sys.argv = ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
