"""Questions with known answers: they fit into the length, contain the answers, and depend only on the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_language import tiny_tokenizer

from sparge.evaluate.language.answers import as_chat, share_found, tokenized
from sparge.evaluate.language.run import pieces
from sparge.evaluate.language.tasks import TASKS, Question, make_item
from sparge.evaluate.language.texts import read_text, windows_of

pytest.importorskip("transformers")
TEXT = "It was a dark night. The wind blew. Nobody was there, or so it seemed. " * 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [1600, 4000])
def test_questions_fit_and_can_be_answered(tokenizer: Any, task: str, tokens: int) -> None:
    items = [make_item(task, tokenizer, tokens, number, text=TEXT) for number in (0, 1, 0)]
    assert items[0] == items[2] != items[1]
    for item in items:
        length = len(tokenizer(item.prompt).input_ids)
        assert length <= tokens
        assert length > tokens - 8 or task == "aggregation"
        assert all(answer in item.prompt for answer in item.answers)
        assert share_found(item.reference, item.answers) == 1.0
        question = item.prompt[item.prompt.rindex("Question:") :]
        assert not any(answer in question for answer in item.answers), "the question does not contain the answer"


def test_most_frequent_words_are_most_frequent(tokenizer: Any) -> None:
    item = make_item("aggregation", tokenizer, 3000, 0, text="")
    listed = item.prompt.partition(": ")[2].partition(".")[0].split()
    counts = {word: listed.count(word) for word in set(listed)}
    assert set(sorted(counts, key=lambda word: -counts[word])[: len(item.answers)]) == set(item.answers)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_needles_are_at_the_requested_depth(tokenizer: Any, depth: float) -> None:
    item = make_item("needle", tokenizer, 3000, 0, text=TEXT, depth=depth)
    hay = item.prompt[: item.prompt.rindex("\n\nQuestion:")]
    assert hay.index("The pass code") / len(hay) == pytest.approx(depth, abs=0.05)


@pytest.mark.parametrize("text", ["昔々あるところに" * 900, "word " * 2000], ids=["no spaces", "no sentences"])
def test_needle_depth_in_texts_without_sentences(tokenizer: Any, text: str) -> None:
    for depth in (0.15, 0.45, 0.75):
        item = make_item("needle", tokenizer, 3000, 0, text=text, depth=depth)
        hay = item.prompt[: item.prompt.rindex("\n\nQuestion:")]
        assert hay.index("The pass code") / len(hay) == pytest.approx(depth, abs=0.06)


def test_too_few_tokens_raise(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="tokens: expected room for facts and question"):
        make_item("multikey", tokenizer, 300, 0, text=TEXT)


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_questions_as_a_chat(chat_tokenizer: Any, task: str) -> None:
    """The user asks the question, the model's message starts the answer, and the length still fits."""
    settings: dict[str, Any] = {"tokens": [2000], "windows": 0, "tasks": [task], "items": 1, "depths": (0.5,)}
    (plain,), (chat,) = (
        [piece.content for piece in pieces(chat_tokenizer, TEXT, **settings, chat=chat)] for chat in (False, True)
    )
    assert isinstance(plain, Question) and isinstance(chat, Question)
    assert plain.prompt.endswith(f"\nAnswer: {plain.answer_start}") and plain.answer_start
    assert chat.prompt.startswith("<user>") and "Answer:" not in chat.prompt
    question = chat.prompt[chat.prompt.rindex("Question:") :]
    assert question.endswith(f"?</user><assistant>{chat.answer_start}") and chat.reference[0] == " "
    assert len(chat_tokenizer(chat.prompt).input_ids) <= 2000
    assert tokenized(chat_tokenizer, chat)[0] == chat_tokenizer(chat.prompt, add_special_tokens=False).input_ids


def test_chat_has_one_bos_token(chat_tokenizer: Any) -> None:
    """The template contains the BOS token, and the tokenizer does not add a second one."""
    from tokenizers.processors import TemplateProcessing

    chat_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 256)]
    )
    chat_tokenizer.chat_template = "<end>" + TEMPLATE
    item = make_item("single", chat_tokenizer, 1600, 0, text=TEXT)
    assert chat_tokenizer("a").input_ids[0] == tokenized(chat_tokenizer, item)[0][0] == 256
    assert tokenized(chat_tokenizer, as_chat(item, chat_tokenizer))[0].count(256) == 1


def test_missing_chat_template_raises(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="chat: expected a tokenizer with a chat template, got one without"):
        list(pieces(tokenizer, TEXT, tokens=[2000], windows=0, chat=True))


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "wiki.test.raw").write_text(" = Title = \n text \n")
    assert read_text(str(tmp_path)) == "first\n\nsecond"
    assert read_text(str(tmp_path / "wiki.test.raw")) == " = Title = \n text \n"
    assert len(read_text(None)) > 200_000, "Python's own reference"
    with pytest.raises(ValueError, match="text: expected a file, a folder or 'wikitext', got 'nothing'"):
        read_text("nothing")
    with pytest.raises(ValueError, match="text: expected 9 tokens or more, got 3"):
        import torch

        windows_of(torch.arange(3), 9, 1)
