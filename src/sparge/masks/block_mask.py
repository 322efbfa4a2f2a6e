"""`BlockMask`: the kept blocks of the attention map. Its attributes are named as in FlexAttention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.masks.visibility import Visibility, find_visibility
from sparge.masks.window import Window, window_of, without_redundant_bounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The kept blocks of 128 queries x 64 keys of one attention call.

    Attributes:
        kv_num_blocks: (B, H, q_blocks) int32, number of key blocks kept by each query block.
        kv_indices: (B, H, q_blocks, kv_blocks) int32; the first ``kv_num_blocks`` entries of a query block are its kept
            key blocks in ascending order, followed by the other key blocks.
        visible_num_blocks: (B, H, q_blocks) int32, number of key blocks visible to each query block; the denominator of
            `density`.
        q_len: number of queries.
        kv_len: number of keys.
        is_causal: whether the mask belongs to causal attention (aligned bottom-right).
        window: the window (left, right) of each query, as in `sparge.attention`. None means no bound, and right is 0 if
            the mask is causal.

    Example:
        >>> dense = torch.tensor([[True, False, True], [True, True, True]]).expand(1, 1, 2, 3)
        >>> mask = BlockMask.from_dense(dense, q_len=200, kv_len=192)
        >>> mask.kv_num_blocks.tolist(), mask.density()
        ([[[2, 3]]], 0.8333333333333334)
        >>> torch.equal(mask.to_dense(), dense)
        True
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    visible_num_blocks: Tensor
    q_len: int
    kv_len: int
    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        """Make ``is_causal`` and ``window`` consistent."""
        window = window_of(self.is_causal, self.window)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "is_causal", window.right == 0)

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        *,
        q_len: int,
        kv_len: int,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        visible: Tensor | None = None,
    ) -> BlockMask:
        """Create a mask from a bool tensor of shape (B, H, ceil(q_len / 128), ceil(kv_len / 64)).

        Args:
            dense: True where a block is kept.
            q_len: number of queries.
            kv_len: number of keys.
            is_causal: drop blocks that are entirely in the future.
            window: drop blocks that are entirely outside this window, (left, right) as in `sparge.attention`.
            visible: blocks that may be kept, broadcastable to ``dense``. Default: all blocks inside the window.

        Raises:
            TypeError: ``dense`` is not a bool tensor.
            ValueError: the shape of ``dense`` does not match the lengths.
        """
        if not isinstance(dense, Tensor) or dense.dtype != torch.bool:
            got = dense.dtype if isinstance(dense, Tensor) else type(dense).__name__
            raise TypeError(f"dense: expected a bool tensor, got {got}")
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal: expected a bool, got {is_causal!r}")
        blocks = (ceil_div(q_len, BLOCK_Q), ceil_div(kv_len, BLOCK_K))
        if dense.ndim != 4 or tuple(dense.shape[2:]) != blocks:
            raise ValueError(
                f"dense: expected shape (B, H, {blocks[0]}, {blocks[1]}) for {q_len} queries and {kv_len} keys in "
                f"blocks of {BLOCK_Q} x {BLOCK_K}, got {tuple(dense.shape)}"
            )
        window = without_redundant_bounds(window_of(is_causal, window), q_len, kv_len)
        if visible is None:
            shape = Shape(1, 1, 1, q_len, kv_len, 1, 1)
            visible = find_visibility(shape, window, None, dense.device).blocks
        dense = dense & visible
        return cls(
            kv_num_blocks=dense.sum(-1, dtype=torch.int32),
            kv_indices=torch.argsort((~dense).to(torch.uint8), dim=-1, stable=True).to(torch.int32),
            visible_num_blocks=visible.sum(-1, dtype=torch.int32).expand(dense.shape[:3]),
            q_len=q_len,
            kv_len=kv_len,
            window=window,
        )

    @property
    def block_size(self) -> tuple[int, int]:
        """(128, 64), the numbers of queries and keys per block."""
        return BLOCK_Q, BLOCK_K

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, q_blocks, kv_blocks)."""
        batch, heads, q_blocks, kv_blocks = self.kv_indices.shape
        return batch, heads, q_blocks, kv_blocks

    def to_dense(self) -> Tensor:
        """Return a bool tensor of shape (B, H, q_blocks, kv_blocks), True where a block is kept."""
        return _lists_to_dense(self.kv_num_blocks, self.kv_indices)

    def __repr__(self) -> str:
        kind = "causal" if self.is_causal else "full"
        if self.window[0] is not None or self.window[1]:
            kind = f"window={tuple(self.window)}"
        return f"BlockMask(shape={self.shape}, {kind}, q_len={self.q_len}, kv_len={self.kv_len})"

    def density(self) -> float:
        """Return the share of visible blocks that are kept. This synchronizes with the device."""
        visible = int(self.visible_num_blocks.sum())
        return int(self.kv_num_blocks.sum()) / visible if visible else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the same mask on another device."""
        return replace(
            self,
            kv_num_blocks=self.kv_num_blocks.to(device),
            kv_indices=self.kv_indices.to(device),
            visible_num_blocks=self.visible_num_blocks.to(device),
        )

    def to_flex(self) -> Any:
        """Convert to a ``torch.nn.attention.flex_attention.BlockMask`` of block size (128, 64).

        Blocks cut by the causal diagonal, by an edge of the window or by the end of the sequence are partial blocks.
        All other blocks are full blocks. The ``mask_mod`` also expresses the kept blocks and the window, because eager
        FlexAttention evaluates only the ``mask_mod``.
        """
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        dense = self.to_dense()
        full = self._visibility(dense.device).full
        parts = [
            BlockMask.from_dense(part, q_len=self.q_len, kv_len=self.kv_len) for part in (dense & ~full, dense & full)
        ]
        return FlexBlockMask.from_kv_blocks(
            parts[0].kv_num_blocks,
            parts[0].kv_indices,
            parts[1].kv_num_blocks,
            parts[1].kv_indices,
            BLOCK_SIZE=self.block_size,
            mask_mod=_KeptElements(dense, self.kv_len - self.q_len, Window(*self.window)),
            seq_lengths=(self.q_len, self.kv_len),
        )

    @classmethod
    def from_flex(
        cls, flex: Any, *, is_causal: bool | None = None, window: tuple[int | None, int | None] | None = None
    ) -> BlockMask:
        """Convert a FlexAttention mask whose block sizes are multiples of 128 and 64.

        Args:
            flex: a ``torch.nn.attention.flex_attention.BlockMask``.
            is_causal: True if the ``mask_mod`` is bottom-right causal. Detected for masks from `to_flex`.
            window: (left, right) as in `sparge.attention`, if the ``mask_mod`` is this window. Detected for masks from
                `to_flex`.

        Raises:
            ValueError: the block size is not supported, or a partial block has a ``mask_mod`` that lists of whole
                blocks cannot express.
        """
        flex_q, flex_k = flex.BLOCK_SIZE
        if flex_q % BLOCK_Q or flex_k % BLOCK_K:
            raise ValueError(
                f"expected a FlexAttention block size that is a multiple of ({BLOCK_Q}, {BLOCK_K}), "
                f"got ({flex_q}, {flex_k})"
            )
        is_ours = isinstance(flex.mask_mod, _KeptElements)
        if is_causal is None and window is None and is_ours:
            window = flex.mask_mod.window
        has_mask_mod = not is_ours and getattr(flex.mask_mod, "__name__", "") != "noop_mask"
        if has_mask_mod and not is_causal and window is None and bool(flex.kv_num_blocks.any()):
            raise ValueError(
                "expected a FlexAttention mask of whole blocks, got partial blocks with a mask_mod, which block lists "
                "cannot express: pass is_causal=True if it is bottom-right causal, window=(left, right) for a window"
            )
        kept = _lists_to_dense(flex.kv_num_blocks, flex.kv_indices)
        if flex.full_kv_num_blocks is not None:
            kept = kept | _lists_to_dense(flex.full_kv_num_blocks, flex.full_kv_indices)
        q_len, kv_len = flex.seq_lengths
        dense = kept.repeat_interleave(flex_q // BLOCK_Q, 2).repeat_interleave(flex_k // BLOCK_K, 3)
        dense = dense[:, :, : ceil_div(q_len, BLOCK_Q), : ceil_div(kv_len, BLOCK_K)]
        return cls.from_dense(dense, q_len=q_len, kv_len=kv_len, is_causal=bool(is_causal), window=window)

    def visible_blocks(self) -> Tensor:
        """Return the blocks that causality and the window make visible: bool (q_blocks, kv_blocks), on the CPU."""
        return self._visibility(torch.device("cpu")).blocks.expand(1, 1, *self.shape[2:])[0, 0]

    def _visibility(self, device: torch.device) -> Visibility:
        shape = Shape(1, 1, 1, self.q_len, self.kv_len, 1, 1)
        return find_visibility(shape, Window(*self.window), None, device)

    def plot(self, *, batch: int = 0, max_heads: int = 8) -> Figure:
        """Draw the kept blocks of the first heads of one batch entry, one panel per head.

        Blocks outside the causal triangle or the window are hatched. A mask does not store the blocks that an
        ``attn_mask`` hides, so they are drawn as skipped.

        Args:
            batch: index of the batch entry.
            max_heads: maximum number of heads to draw.

        Raises:
            ImportError: matplotlib is not installed (the extra ``plot``).
            ValueError: ``batch`` or ``max_heads`` is out of range.

        Example:
            >>> import torch, sparge
            >>> q = torch.randn(1, 2, 2048, 64)
            >>> figure = sparge.predict(q, q, sparsity=sparge.TopK(0.25), is_causal=True).plot()
            >>> figure.axes[0].get_title()
            'head 0: 73.5% kept'
        """
        from sparge.masks.plot import plot_blocks

        batches, heads = self.shape[:2]
        if not 0 <= batch < batches:
            raise ValueError(f"batch: expected a value in [0, {batches}), got {batch}")
        if max_heads < 1:
            raise ValueError(f"max_heads: expected 1 or more, got {max_heads}")
        shown = min(heads, max_heads)
        kept, visible = (
            lists[batch, :shown].sum(-1).tolist() for lists in (self.kv_num_blocks, self.visible_num_blocks)
        )
        titles = [
            f"head {head}: {100 * count / max(total, 1):.1f}% kept"
            for head, (count, total) in enumerate(zip(kept, visible, strict=True))
        ]
        blocks = self.to_dense()[batch, :shown].cpu()
        return plot_blocks(blocks, self.visible_blocks(), titles, q_len=self.q_len, kv_len=self.kv_len)


@dataclass(frozen=True, eq=False)
class _KeptElements:
    """A ``mask_mod`` that is True for elements of kept blocks within the window around key position query + offset."""

    kept: Tensor
    offset: int
    window: Window

    def __call__(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = self.kept[batch, head, query // BLOCK_Q, key // BLOCK_K]
        left, right = self.window
        if right is not None:
            kept = kept & (key <= query + (self.offset + right))
        return kept if left is None else kept & (key >= query + (self.offset - left))


def _lists_to_dense(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Convert lists of block indices to a bool tensor. Entries beyond the end of a list are ignored."""
    is_entry = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    counts = torch.zeros(is_entry.shape, dtype=torch.int32, device=is_entry.device)
    return counts.scatter_add_(-1, torch.where(is_entry, indices, 0).long(), is_entry.int()) > 0
