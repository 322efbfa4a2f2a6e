"""Stages of calls whose tokens are distributed over several ranks, separated by the ranks' collectives.

    summarize_keys      statistics of key blocks, which the ranks gather
    GpuCandidates       scores of query blocks, and the number of blocks that they keep at each level of a budget
    choose_together     selection of the kept blocks, with one budget for all ranks
    attend_part         attention over a part of the keys, merged into the attention over other parts

Each stage is recorded and replayed (`replay`), as `pipeline` does with whole calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import cast

from torch import Tensor

from sparge.backends.base import Candidates
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.backends.gpu.pipeline import inputs_of, is_replayable, lists_of, prepare, seen_by_mask
from sparge.backends.gpu.replay import replayed
from sparge.backends.gpu.stages.budget import count_budget
from sparge.backends.gpu.stages.quantize import summarize_query
from sparge.backends.gpu.stages.query_blocks import SelectionArguments
from sparge.backends.gpu.stages.rank_budget import blocks_of_level, own_totals, portions
from sparge.backends.gpu.stages.ring_part import MAX_CUTS, cut_lists, merge
from sparge.backends.gpu.stages.score import block_probabilities, score_inputs
from sparge.backends.gpu.stages.select import select_blocks
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.visibility import SeenTokens
from sparge.numerics.budget_allocation import RankPool
from sparge.options.rules import BUDGET_LEVELS, Selection


def summarize_keys(key: Tensor, call: Call) -> tuple[Tensor, ...]:
    """See `base.Backend.summarize_keys`."""
    shape = call.shape

    def run() -> tuple[Tensor, ...]:
        seen, _, _ = seen_by_mask(call, has_scores=False)
        return _summaries(key, call, seen)

    tensors = replayed(call, "keys", (key, call.attn_mask), run) if is_replayable(call) else run()
    return tuple(tensor.view(shape.batch, shape.kv_heads, shape.kv_blocks, -1) for tensor in tensors)


def _summaries(key: Tensor, call: Call, seen: SeenTokens | None) -> tuple[Tensor, ...]:
    variance = score_inputs(call.score).variance
    summary = summarize_key_value(
        key, key, key, call, seen, means=True, variance=variance, quantized=False, similarity=False
    )
    return summary.mean_high, summary.mean_low, *([summary.variance] if variance else [])


class GpuCandidates(Candidates):
    """See `base.Candidates`. Computation is deferred to the first use.

    Args:
        keys: K itself, or the result of `summarize_keys`.
    """

    def __init__(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> None:
        self.call = call
        self._query = query
        self._are_summarized = isinstance(keys, tuple)
        self._keys = [tensor.flatten(0, 1).contiguous() for tensor in keys] if isinstance(keys, tuple) else [keys]
        self._is_replayable = is_replayable(call) and call.attn_mask is None
        self._rows: SelectionArguments | None = None
        self._probability: Tensor | None = None

    def _replayed(
        self, kind: Hashable, inputs: Sequence[Tensor], run: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        return replayed(self.call, kind, inputs, run) if self._is_replayable else run()

    def _score(self) -> SelectionArguments:
        """Launch all stages up to the selection."""
        call, query = self.call, self._query
        inputs = score_inputs(call.score)
        seen, masked_keys, blocks = seen_by_mask(call, has_scores=True)
        first_seen = first_query = None
        if masked_keys is not None:
            first_seen, first_query = masked_keys.first_seen, masked_keys.first_query
        summaries = self._keys if self._are_summarized else _summaries(self._keys[0], call, seen)
        key_value = KeyValueSummary(summaries[0], summaries[1], summaries[-1], query, query, query, query)
        parts = inputs.parts(call.score)
        summary = summarize_query(query, key_value, call, seen, quantized=False, parts=parts, similarity=False)
        probability = block_probabilities(query, key_value, summary.mean, call, first_seen, first_query, None, blocks)
        self._rows = SelectionArguments(probability, summary.similarity, None, call, first_seen, None, blocks)
        return self._rows

    def _scored(self) -> SelectionArguments:
        """Return the scored query blocks, for kernels outside of the recording of `_score`."""
        if not self._is_replayable:
            assert self._rows is not None
            return self._rows
        assert self._probability is not None
        return SelectionArguments(self._probability, self._probability, None, self.call, None, None, None)

    def count(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        """Return the number of blocks kept at every level of a budget, as `count_kernel` writes it, and the sums."""

        def run() -> tuple[Tensor, Tensor, Tensor]:
            rows = self._score()
            kept, sums = count_budget(rows, self.call, kv_blocks, shares=False)
            return rows.probability, kept, own_totals(sums)

        inputs = (self._query, *self._keys)
        self._probability, kept, totals = self._replayed(("counts", kv_blocks, self._are_summarized), inputs, run)
        return kept, totals

    def kept_by_level(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        shape = self.call.shape
        kept, totals = self.count(kv_blocks)
        by_row = kept.view(shape.batch, shape.heads, shape.q_blocks, -1)
        return by_row[..., : BUDGET_LEVELS + 1], totals[:, BUDGET_LEVELS + 1]

    def choose(self, counts: Tensor | None) -> BlockMask:
        def run() -> tuple[Tensor, Tensor, Tensor]:
            rows = self._score() if counts is None else self._scored()
            return lists_of(select_blocks(rows, self.call, None if counts is None else counts.int().contiguous()).mask)

        if counts is None:
            return self._mask(self._replayed(("choice", self._are_summarized), (self._query, *self._keys), run))
        return self._mask(run())

    def choose_portions(
        self, kept: Tensor, totals: Tensor, everyone: Tensor, order: Tensor, amount: float, first: int
    ) -> BlockMask:
        """Select as many blocks as `rank_budget.portions` allocates to each query block."""

        def run() -> tuple[Tensor, Tensor, Tensor]:
            counts = portions(kept, totals, everyone, order, amount, first)
            return lists_of(select_blocks(self._scored(), self.call, counts).mask)

        assert self._probability is not None
        kind = ("portions", first, tuple(everyone.shape))
        return self._mask(self._replayed(kind, (self._probability, kept, totals, everyone, order), run))

    def _mask(self, lists: tuple[Tensor, ...]) -> BlockMask:
        shape = self.call.shape
        return BlockMask(lists[0], lists[1], lists[2], shape.q_len, shape.kv_len, window=self.call.window)


def choose_together(
    candidates: Sequence[Candidates], rule: Selection, kv_blocks: int, pool: RankPool
) -> list[BlockMask]:
    """See `base.Backend.choose_together`."""
    pieces = [cast(GpuCandidates, candidate) for candidate in candidates]
    if not rule.is_call_wide:
        return [piece.choose(None) for piece in pieces]
    amount, call = float(cast(float, rule.amount)), pieces[0].call
    counted = [piece.count(kv_blocks) for piece in pieces]
    kept = [of_piece for of_piece, _ in counted]
    own = counted[0][1]
    for _, totals_of_piece in counted[1:]:
        own = own + totals_of_piece
    totals = pool.total(own)

    def run() -> tuple[Tensor]:
        return (blocks_of_level(kept, totals, amount, pool.width),)

    kind = ("level", pool.width, tuple([len(of_piece) for of_piece in kept]))
    (blocks,) = replayed(call, kind, (totals, *kept), run) if is_replayable(call) else run()
    everyone, first, masks = pool.gather(blocks), pool.first, []
    for piece, of_piece in zip(pieces, kept, strict=True):
        masks.append(piece.choose_portions(of_piece, totals, everyone, pool.order, amount, first))
        first += len(of_piece) // len(totals)
    return masks


def attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Sequence[BlockMask] | None,
    columns: tuple[slice, ...],
    call: Call,
    output: Tensor,
    lse: Tensor,
    *,
    is_first: bool,
    launcher: AttentionLauncher,
    totals: Tensor | None,
) -> None:
    """See `base.Backend.attend_part`."""
    masks = masks or ()
    columns = _joined(columns)
    lists = [x for mask in masks for x in (mask.kv_num_blocks, mask.kv_indices)]

    def run() -> tuple[Tensor, Tensor]:
        mask = cut_lists(masks, columns, call) if masks else None
        operands, _ = prepare(query, key, value, call, with_mask=False, with_operands=True, mask=mask)
        assert operands is not None
        merge(output, lse, *launcher(operands, mask, call, totals=totals), is_first=is_first)
        return output, lse

    if not is_replayable(call):
        run()
        return
    cuts = tuple([(cut.start, cut.stop) for cut in columns]) if masks else ()
    kind = ("part", launcher, cuts, tuple([mask.shape for mask in masks]), is_first)
    replayed(call, kind, (*inputs_of(query, key, value, call, totals), output, lse, *lists), run)


def _joined(columns: Sequence[slice]) -> tuple[slice, ...]:
    """Join adjacent ranges."""
    joined: list[slice] = []
    for cut in columns:
        if joined and joined[-1].stop == cut.start:
            joined[-1] = slice(joined[-1].start, cut.stop)
        else:
            joined.append(cut)
    assert len(joined) <= MAX_CUTS
    return tuple(joined)
