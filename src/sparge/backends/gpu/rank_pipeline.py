"""Prediction for calls whose tokens are distributed over several ranks. The ranks communicate between the stages.

    summarize_keys      compute statistics of key blocks, which the ranks gather
    GpuCandidates       score query blocks, and count the blocks that they keep at each level of a budget
    choose_together     select the kept blocks, with one budget for all ranks

Each stage is recorded and replayed by itself (`replay`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparge.backends.gpu.pipeline import mask_facts
from sparge.backends.gpu.replay import lists_of, recordings_of, replayed
from sparge.backends.gpu.stages.budget import count_budget
from sparge.backends.gpu.stages.key_value_statistics import BlockStatistics
from sparge.backends.gpu.stages.quantize import summarize_query
from sparge.backends.gpu.stages.query_blocks import SelectionArguments
from sparge.backends.gpu.stages.rank_budget import blocks_of_level, own_totals, portions
from sparge.backends.gpu.stages.reduce import Scales
from sparge.backends.gpu.stages.score import block_probabilities, score_inputs
from sparge.backends.gpu.stages.select import select_blocks
from sparge.backends.gpu.stages.summary import KeyValueSummary, summarize_key_value
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.visibility import SeenTokens
from sparge.numerics.budget_allocation import RankPool
from sparge.options.rules import Budget


def summarize_keys(key: Tensor, call: Call) -> tuple[Tensor, ...]:
    """See `base.Backend.summarize_keys`."""
    shape = call.shape

    def run() -> tuple[Tensor, ...]:
        facts = mask_facts(call, has_scores=False)
        return _summaries(key, call, None if facts is None else facts.tokens)

    tensors = replayed(recordings_of(call), "keys", (key, call.attn_mask), run)
    return tuple(tensor.view(shape.batch, shape.kv_heads, shape.kv_blocks, -1) for tensor in tensors)


def _summaries(key: Tensor, call: Call, seen: SeenTokens | None) -> tuple[Tensor, ...]:
    variance = score_inputs(call.score).variance
    summary = summarize_key_value(
        key, key, key, call, seen, means=True, variance=variance, quantized=False, similarity=False
    )
    return summary.statistics if variance else summary.statistics[:2]


class GpuCandidates:
    """The result of `base.Backend.candidates`, with methods that score the query blocks and select their blocks."""

    def __init__(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> None:
        self.call = call
        self._query = query
        self._are_summarized = isinstance(keys, tuple)
        self._keys = [tensor.flatten(0, 1).contiguous() for tensor in keys] if isinstance(keys, tuple) else [keys]
        self._recordings = recordings_of(call) if call.attn_mask is None else None
        self._rows: SelectionArguments | None = None

    def _score(self) -> SelectionArguments:
        """Launch all stages up to the selection."""
        call, query = self.call, self._query
        inputs = score_inputs(call.score)
        facts = mask_facts(call, has_scores=True)
        seen = None if facts is None else facts.tokens
        summaries = self._keys if self._are_summarized else _summaries(self._keys[0], call, seen)
        statistics = BlockStatistics(summaries[0], summaries[1], summaries[-1])
        key_value = KeyValueSummary(statistics, Scales(query, query, query, query))
        parts = inputs.parts(call.score)
        summary = summarize_query(query, key_value.scales, call, seen, quantized=False, parts=parts, similarity=False)
        probability = block_probabilities(query, key_value, summary.mean, call, facts, None)
        return SelectionArguments(probability, summary.similarity, None, call, facts, None)

    def count(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        """Return the number of blocks that each query block keeps at every level of a budget, and their sums.

        `budget.count_kernel` and `rank_budget.own_totals` define the layouts.
        """

        def run() -> tuple[Tensor, Tensor, Tensor]:
            self._rows = self._score()
            kept, sums = count_budget(self._rows, self.call, kv_blocks, allocates=False)
            return self._rows.probability, kept, own_totals(sums)

        kind, inputs = ("counts", kv_blocks, self._are_summarized), (self._query, *self._keys)
        probability, kept, totals = replayed(self._recordings, kind, inputs, run)
        if self._recordings is not None:  # no mask and no threshold: the selection reads the probabilities only
            self._rows = SelectionArguments(probability, probability, None, self.call, None, None)
        return kept, totals

    def choose(self) -> BlockMask:
        """Select the blocks of each query block, for rules other than `Budget`."""

        def run() -> tuple[Tensor, Tensor, Tensor]:
            return lists_of(select_blocks(self._score(), self.call, None).mask)

        kind, inputs = ("choice", self._are_summarized), (self._query, *self._keys)
        return self._mask(*replayed(self._recordings, kind, inputs, run))

    def choose_portions(
        self, kept: Tensor, totals: Tensor, gathered: Tensor, order: Tensor, amount: float, first: int
    ) -> BlockMask:
        """Select as many blocks of each query block as `rank_budget.portions` allocates. `count` must run before."""
        rows = self._rows
        assert rows is not None

        def run() -> tuple[Tensor, Tensor, Tensor]:
            counts = portions(kept, totals, gathered, order, amount, first)
            return lists_of(select_blocks(rows, self.call, counts).mask)

        kind, inputs = ("portions", first, tuple(gathered.shape)), (rows.probability, kept, totals, gathered, order)
        return self._mask(*replayed(self._recordings, kind, inputs, run))

    def _mask(self, counts: Tensor, indices: Tensor, visible: Tensor) -> BlockMask:
        shape = self.call.shape
        return BlockMask(counts, indices, visible, shape.q_len, shape.kv_len, window=self.call.window)


def choose_together(candidates: Sequence[GpuCandidates], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
    """See `base.Backend.choose_together`."""
    call = candidates[0].call
    rule = call.selection
    if not isinstance(rule, Budget):
        return [piece.choose() for piece in candidates]
    amount = float(rule.density)
    counted = [piece.count(kv_blocks) for piece in candidates]
    kept = [piece_kept for piece_kept, _ in counted]
    rank_totals = counted[0][1]
    for _, piece_totals in counted[1:]:
        rank_totals = rank_totals + piece_totals
    totals = pool.total(rank_totals)

    def run() -> tuple[Tensor]:
        return (blocks_of_level(kept, totals, amount, pool.width),)

    kind = ("level", pool.width, tuple([len(piece_kept) for piece_kept in kept]))
    (blocks,) = replayed(recordings_of(call), kind, (totals, *kept), run)
    gathered, first, masks = pool.gather(blocks), pool.first, []
    for piece, piece_kept in zip(candidates, kept, strict=True):
        masks.append(piece.choose_portions(piece_kept, totals, gathered, pool.order, amount, first))
        first += len(piece_kept) // len(totals)
    return masks
