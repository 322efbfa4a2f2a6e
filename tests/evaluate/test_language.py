"""Evaluation of language models: definitions of the metrics, all tasks, and interrupted runs."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_language import tiny_model, tiny_tokenizer

import sparge
from page_parser import Page
from sparge.backends import base
from sparge.evaluate.language import fidelity
from sparge.evaluate.language.answers import ask, tokenized
from sparge.evaluate.language.load import check_lengths, default_lengths, is_long_enough, load_tokenizer
from sparge.evaluate.language.page import render_page
from sparge.evaluate.language.run import KEY, Piece, evaluate_model, pieces
from sparge.evaluate.language.summary import explanations, lines_of, remarks
from sparge.evaluate.language.tasks import TASKS, make_item
from sparge.evaluate.rows import Rows
from sparge.evaluate.variants import Variant, parse_variant, spaced

pytest.importorskip("transformers")
TEXT = "It was a dark night. The wind blew. Nobody was there, or so it seemed. " * 60
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def forced(*words: str) -> list[Variant]:
    return [parse_variant(word).forced(CPU) for word in words]


@torch.no_grad()
def test_fidelity_matches_its_definition(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "CHUNK_TOKENS", 7)
    window = torch.randint(257, (1, 65), generator=torch.Generator().manual_seed(1))
    dense = fidelity.read(model, window)
    noise = 0.1 * torch.randn(dense.states.shape, generator=torch.Generator().manual_seed(2))
    other = replace(dense, states=dense.states + noise)
    got = fidelity.compare(window, dense, other)
    p, q = (model.lm_head(run.states)[0].double().softmax(-1) for run in (dense, other))
    divergences = (p * (p / q).log()).sum(-1)
    assert got.kl == pytest.approx(float(divergences.mean()), rel=1e-4)
    assert got.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    losses = -q.log().gather(1, window[0, 1:, None])[:, 0]
    assert got.nll == pytest.approx(float(losses.mean()), rel=1e-5)
    assert got.dense_nll == pytest.approx(float(model(window, labels=window).loss), rel=1e-5)
    assert fidelity.compare(window, dense, dense).kl == 0.0


@torch.no_grad()
def test_capped_logits_equal_the_models_logits() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=257, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, final_logit_softcapping=0.5,
    )  # fmt: skip
    capped = transformers.Gemma2ForCausalLM(config).eval()
    window = torch.arange(40)[None]
    read = fidelity.read(capped, window)
    assert read.states.shape == (1, 39, 32), "hidden states, not logits"
    expected = capped(window).logits[0, :-1].float()
    assert expected.abs().max() < 0.5
    assert torch.allclose(read.logits(slice(0, 40)), expected, atol=1e-6)
    assert torch.allclose(read.logits(slice(7, 9)), expected[7:9], atol=1e-6)


@torch.no_grad()
def test_loss_equals_the_models_loss(model: Any) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    scaled = CohereForCausalLM(CohereConfig(**sizes, num_attention_heads=2, logit_scale=0.0625)).eval()
    ids = torch.arange(8, 108)[None]
    for one in (model, scaled):
        read = fidelity.read(one, ids)
        assert fidelity.compare(ids, read, read).nll == pytest.approx(float(one(ids, labels=ids).loss), rel=1e-4)


class PairTokenizer:
    """A tokenizer with two letters per token and special tokens at both ends: token boundaries depend on the prefix."""

    eos_token_id = -1

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        pairs = [text[place : place + 2] for place in range(0, len(text), 2)]
        ids = [int.from_bytes(pair.encode(), "big") for pair in pairs]
        return SimpleNamespace(input_ids=[0, *ids, -1] if add_special_tokens else ids)


def test_references_are_tokenized_as_continued_prompts(tokenizer: Any) -> None:
    item = make_item("needle", tokenizer, 1000, 0, text=TEXT, depth=0.5)
    prompt, reference = tokenized(tokenizer, item)
    assert tokenizer.decode(prompt) == item.prompt and tokenizer.decode(reference) == item.reference
    for prompt, expected in (("ab", ([0, 24930], [0x2063, 0x64])), ("abc", ([0, 24930], [0x6320, 0x64]))):
        cut = replace(item, prompt=prompt, answers=("abcd"[len(prompt) :],))
        assert tokenized(PairTokenizer(), cut) == expected
        assert tokenized(PairTokenizer(), replace(cut, is_chat=True)) == (expected[0][1:], expected[1])


def test_prompts_run_sparse_and_answers_dense(model: Any, tokenizer: Any) -> None:
    item = make_item("single", tokenizer, 1600, 0, text=TEXT)
    stock = ask(model, tokenizer, item, nullcontext())
    (all_kept, few) = forced("topk=1.0", "topk=0.1,min_blocks=1")
    same = ask(model, tokenizer, item, all_kept.applied(model))
    assert sparge.stats().reasons == {"sparse: torch": 2}, "one call in each of two layers"
    assert same.nll == pytest.approx(stock.nll, abs=1e-3) and same.text == stock.text
    assert ask(model, tokenizer, item, few.applied(model)).nll != pytest.approx(stock.nll, abs=1e-3)
    ids = tokenizer(item.prompt + item.reference, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0].log_softmax(-1)
    wanted = range(stock.prompt_tokens, ids.shape[1])
    assert stock.nll == pytest.approx(-sum(float(logits[at - 1, ids[0, at]]) for at in wanted) / len(wanted), abs=1e-4)


def test_exact_answers_need_every_token_to_be_most_likely(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    constant = tiny_model()
    torch.nn.init.zeros_(constant.model.norm.weight)  # all logits are 0, and argmax is the first token, "!"
    item = make_item("needle", tokenizer, 1000, 0, text=TEXT, depth=0.5)
    assert ask(constant, tokenizer, item, nullcontext()).score == 0.0
    monkeypatch.setattr(type(item), "reference", property(lambda _: "!!!"))
    assert ask(constant, tokenizer, item, nullcontext()).score == 1.0
    assert ask(constant, tokenizer, replace(item, is_exact=False), nullcontext()).text == "!" * item.max_new_tokens


@pytest.fixture(scope="module")
def evaluation(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Variant]]:
    """Write the rows of an evaluation with all tasks and three kinds of variant."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    variants = forced("topk=0.2,min_blocks=1", "topk=0.2,min_blocks=1,oracle", "dense,quantization=none")
    work = list(pieces(tokenizer, TEXT, tokens=[1300], windows=2, tasks=list(TASKS), items=1, depths=(0.0, 1.0)))
    evaluate_model(model, tokenizer, variants, work, Rows(path, {"dtype": "x"}, KEY))
    return path, variants


def test_rows_of_all_tasks(evaluation: tuple[Path, list[Variant]]) -> None:
    path, variants = evaluation
    rows = Rows(path, {"dtype": "x"}, KEY)
    tasks = {row["part"] for row in rows}
    assert tasks == {"fidelity", *TASKS}
    lines = {line.variant: line for line in lines_of(rows)}
    chosen, oracle, all_blocks = (lines[variant.label] for variant in variants)
    assert chosen.density == oracle.density and 0.2 < float(chosen.density or 0) < 0.4
    assert all_blocks.density is None and all_blocks.ran == "all blocks"
    for line in lines.values():
        assert line.kl is not None and line.perplexity is not None and line.dense_perplexity is not None
        assert line.kl.values == 2 and set(line.scores) == set(TASKS)
        assert line.rise is not None
        assert line.rise.mean == pytest.approx(math.log(line.perplexity / line.dense_perplexity), abs=1e-9)
    assert all_blocks.kl is not None and chosen.kl is not None and oracle.kl is not None
    assert abs(all_blocks.kl.mean) < 1e-6 < oracle.kl.mean < chosen.kl.mean


def test_page(evaluation: tuple[Path, list[Variant]]) -> None:
    path, variants = evaluation
    page = render_page(list(Rows(path, {"dtype": "x"}, KEY)), "tiny <model>", "sparge eval llm tiny --json rows.jsonl")
    assert "tiny &lt;model&gt;, sparse against dense" in page
    assert all(spaced(variant.label) in page for variant in variants)
    assert page.count('class="heat"') == 1 + len(variants) and page.count("<svg role=") == 1 + len(TASKS)
    Page(page).check()


def test_interrupted_run_resumes(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    variants = forced("topk=0.5", "topk=0.3")
    work = list(pieces(tokenizer, TEXT, tokens=[600], windows=2, depths=(0.5,)))
    done: list[str] = []

    def stop(doing: str, *_: int) -> None:
        done.append(doing)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_model(model, tokenizer, variants, work, Rows(path, {"model": "m"}, KEY), stop)
    assert len(path.read_text().splitlines()) == 2, "the interruption is before the third row"
    path.write_text(path.read_text() + '{"part": "fid')  # interrupted within a line
    rows = Rows(path, {"model": "m"}, KEY)
    counts: list[tuple[int, int]] = []
    results = evaluate_model(model, tokenizer, variants, work, rows, lambda _, *count: counts.append(count))
    assert rows.reused == 2 and counts == [(number, 7) for number in range(2, 7)]
    again = Rows(path, {"model": "m"}, KEY)
    assert again.reused == len(results) == 7, "two variants on two windows, and on one needle with the dense model"
    assert evaluate_model(model, tokenizer, variants, work, again, lambda *_: pytest.fail("a run")) == results
    assert Rows(path, {"model": "another"}, KEY).reused == 0, "rows of another run are ignored"
    assert model.config._attn_implementation != "sparge", "the model is restored"


def test_every_window_starts_with_the_bos_token(tokenizer: Any) -> None:
    class Marked:
        eos_token_id = 256

        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            return SimpleNamespace(input_ids=[7, *ids, 256] if add_special_tokens else ids)

    work = list(pieces(Marked(), TEXT, tokens=[100], windows=3, tasks=()))
    windows = [piece.content[0].tolist() for piece in work if isinstance(piece.content, torch.Tensor)]
    assert [len(window) for window in windows] == [100] * 3 and [window[0] for window in windows] == [7] * 3
    assert windows[1][1:] == tokenizer(TEXT).input_ids[99:198]
    keys = [key for piece in work for key, _ in piece.runs([parse_variant("topk=0.5")])]
    assert len({key["content"] for key in keys}) == 3


def test_variants_may_have_any_label(model: Any, tokenizer: Any) -> None:
    """A variant labeled "dense" is distinct from the dense reference."""
    rows = Rows(None, {}, KEY)
    variants = forced("dense", "topk=0.3,min_blocks=1")
    evaluate_model(model, tokenizer, variants, list(pieces(tokenizer, TEXT, tokens=[600], depths=(0.5,))), rows)
    lines = {line.variant: line for line in lines_of(rows)}
    assert set(lines) == {"dense", "topk=0.3,min_blocks=1"} and lines["dense"].ran == "all blocks"
    stock = next(row for row in rows if row["part"] == "needle" and row["policy"] == "")
    assert lines["topk=0.3,min_blocks=1"].scores["needle"].dense_nll == stock["nll"]


def test_run_below_the_crossover_has_a_remark(model: Any, tokenizer: Any) -> None:
    rows = Rows(None, {}, KEY)
    window = torch.tensor(tokenizer(TEXT).input_ids)[None, :500]
    evaluate_model(model, tokenizer, [parse_variant("topk=0.1")], [Piece("fidelity", 500, 0, window)], rows)
    (line,) = lines_of(rows)
    assert line.ran == "dense: below the crossover" and line.density is None
    assert line.kl is not None and line.kl.mean == 0.0
    (remark,) = remarks([line])
    assert remark.startswith("topk=0.1, 500 tokens: nothing ran sparse") and "--force" in remark
    page = render_page([{**row, "run": {"dtype": "float32"}} for row in rows], "model", "command")
    assert "There are no charts: nothing ran sparse" in page and '<figure class="chart">' not in page


def test_run_without_skipped_blocks_has_a_remark(model: Any, tokenizer: Any) -> None:
    """Eight blocks are fewer than the minimum of 16."""
    rows = Rows(None, {"dtype": "float32"}, KEY)
    window = torch.tensor(tokenizer(TEXT).input_ids)[None, :500]
    variants = forced("rows=0.1", "rows=0.1,min_blocks=1", "dense,quantization=none")
    evaluate_model(model, tokenizer, variants, [Piece("fidelity", 500, 0, window)], rows)
    (remark,) = remarks(lines_of(rows))
    assert remark.startswith("rows=0.1, 500 tokens: every block was kept")
    assert escape(remark) in render_page(list(rows), "model", "command")


def test_missing_gguf_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr("sparge.evaluate.language.load.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"expected the package gguf for .*m.gguf': pip install gguf"):
        load_tokenizer(str(tmp_path / "m.gguf"))


def test_command(model: Any, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sparge.cli.app import main

    model.config.max_position_embeddings = 1000
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = ["eval", "llm", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--tokens", "700"]
    arguments += ["--windows", "1", "--variant", "topk=0.5,min_blocks=1", "--force", "--device", "cpu"]
    arguments += ["--output", str(tmp_path / "page.html"), "--json", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert not done.value.code
    printed = capsys.readouterr().out
    assert "700 tokens" in printed and "topk=0.5,min_blocks=1" in printed and "page.html" in printed
    assert f"700 tokens, 1 window of {tmp_path}/text.txt" in " ".join(printed.split())
    assert "A KL of 0.02 means" in printed and "Noise: the dense model on two kernels of torch" in printed
    assert re.search(r"\d of 8 \(\d+-\d+ %\), dense \d", printed) and re.search(r"speed-up: \d+\.\d\dx", printed)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (
        len(rows) == 2 + 2 * 8
        and [row["part"] for row in rows[:3]] == ["noise", "fidelity", "needle"]
        and rows[1]["policy"] == '{"backend": "torch", "sparsity": {"kind": "Budget", "min_blocks": 1, "density": 0.5}}'
        and rows[0]["sparge"] == sparge.__version__
        and rows[1]["seconds"] > 0 < rows[1]["dense_seconds"]
    )
    page = (tmp_path / "page.html").read_text()
    assert "topk=0.5, min_blocks=1" in page and f"window of {tmp_path}/text.txt" in page
    assert "A KL of 0.02 means" in page and "Noise: the dense model on two kernels of torch" in page
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--tokens", "2000"])
    assert done.value.code == 2
    assert "tokens: expected at most 1000, the model's max_position_embeddings" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main([*arguments, "--chat"])
    assert done.value.code == 2
    assert "chat: expected a tokenizer with a chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere/at/all"], "model: expected a hub name, a folder or a GGUF file"),
        (["m.gguf"], "model: expected a GGUF file, got 'm.gguf', which does not exist"),
        (["m", "--text", "nowhere"], "text: expected a file, a folder or 'wikitext', got 'nowhere'"),
        (["m", "--variant", "topk=2"], "topk: expected a value in (0, 1], got 2"),
        (["m", "--task", "needles"], "expected all or one of needle, single"),
        (
            ["m", "--variant", "topk=0.5", "--variant", "topk=0.5"],
            "variants: expected one or more with different labels",
        ),
        (["m", "--windows", "0", "--needles", "0"], "expected windows, needles or tasks, got none of them"),
        (["m", "--tokens", "4"], "--tokens"),
    ],
)
def test_invalid_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sparge.cli.app import main

    with pytest.raises(SystemExit) as done:
        main(["eval", "llm", *arguments])
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def test_lengths_below_the_crossover_raise(model: Any) -> None:
    sparse, noise = parse_variant("topk=0.5"), parse_variant("sdpa=math")
    crossover = base.crossover_for(torch.device("cpu"), torch.float32).causal_keys
    model.config.max_position_embeddings = 2**17
    shortest = next(tokens for tokens in range(1024, 2**17, 1024) if is_long_enough(model, sparse, tokens))
    assert shortest >= crossover
    for lengths in ((2048,), (2048, 2 * crossover)):
        with pytest.raises(ValueError, match=rf"expected {shortest} or more .*got 2048; use --tokens \d+, or --force"):
            check_lengths(model, [sparse, noise], lengths)
    check_lengths(model, [sparse], (shortest,))
    check_lengths(model, [noise], (2048,))
    check_lengths(model, [sparse.forced(CPU)], (2048,))
    model.config.max_position_embeddings = 2048
    with pytest.raises(ValueError, match="got 2048; use --force for sparse attention"):
        check_lengths(model, [sparse], (2048,))
    with pytest.raises(
        ValueError, match="tokens: expected at most 2048, the model's max_position_embeddings, got 4096"
    ):
        check_lengths(model, [sparse.forced(CPU)], (2048, 4096))


def test_default_lengths_reach_the_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys, expected in ((4096, (4096, 8192)), (8192, (8192,)), (16384, (16384,)), (2**62, (4096, 8192))):
        found = replace(base.ALWAYS, causal_keys=keys)
        monkeypatch.setattr(base, "crossover_for", lambda *_, found=found: found)
        assert default_lengths(CPU, torch.float32) == expected


def test_prompts_slightly_below_the_crossover_run_sparse(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may have up to 8 tokens fewer than the requested length."""
    monkeypatch.setattr("sparge.evaluate.language.run.is_long_enough", lambda *_: True)
    rows = Rows(None, {}, KEY)
    work = list(pieces(tokenizer, TEXT, tokens=[600], windows=0, depths=(0.5,)))
    evaluate_model(model, tokenizer, [parse_variant("topk=0.3,min_blocks=1")], work, rows)
    (line,) = lines_of(rows)
    assert line.ran == "sparse"


def test_noise_compares_two_dense_kernels(model: Any, tokenizer: Any) -> None:
    rows = Rows(None, {"dtype": "float32"}, KEY)
    work = list(pieces(tokenizer, TEXT, tokens=[600, 700], windows=2, tasks=(), noise=True))
    assert [(piece.part, piece.tokens) for piece in work][:2] == [("noise", 600), ("fidelity", 600)]
    assert sum(piece.part == "noise" for piece in work) == 1
    assert len(evaluate_model(model, tokenizer, forced("topk=0.3,min_blocks=1"), work, rows)) == 5
    assert [line.tokens for line in lines_of(rows)] == [600, 700]
    meaning, noise = explanations(list(rows))
    assert "A KL of 0.02" in meaning and "(float32, 600 tokens)" in noise
    assert abs(next(row["kl"] for row in rows if row["part"] == "noise")) < 1e-6
