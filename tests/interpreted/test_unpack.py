"""Unpacking to a padded batch: the tokens of every segment, and 0 for padding and hidden tokens."""

from __future__ import annotations

import pytest
import torch

from conftest import make_qkv
from interpreted.conftest import call_of
from sparge.backends.gpu.stages.order import unpack
from sparge.masks.geometry import Shape
from sparge.masks.segments import Segment, longest, tables_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SEGMENTS = (Segment(0, 130, 0, 200), Segment(130, 70, 200, 129), Segment(200, 1, 329, 300))


@pytest.mark.parametrize("window", [(None, None), (None, 0), (60, 0)], ids=str)
@pytest.mark.parametrize("width", [16, 24])
def test_unpack_pads_segments_with_zeros(width: int, window: tuple[int | None, int | None]) -> None:
    query, key, value = make_qkv(201, 629, heads=4, kv_heads=2, head_dim=width)
    q_len, kv_len = longest(SEGMENTS)
    segments = tables_of(SEGMENTS, 4, query.device).with_results(
        query.new_empty(201, 4, width), query.new_empty(4, 201)
    )
    shape = Shape(len(SEGMENTS), 4, 2, q_len, kv_len, width, width)
    call = call_of(shape, window=window, segments=segments)
    tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    got = unpack(*(tensor.expand(len(SEGMENTS), -1, -1, -1) for tensor in tensors), call)
    for index, segment in enumerate(SEGMENTS):
        first = 0 if window[0] is None else max(segment.kv_len - segment.q_len - window[0], 0)
        for found, pack, start, count, seen in (
            (got[0], query, segment.q_start, segment.q_len, 0),
            (got[1], key, segment.kv_start, segment.kv_len, 0),
            (got[2], value, segment.kv_start, segment.kv_len, first),
        ):
            expected = torch.zeros_like(found[index])
            expected[:, seen:count] = pack[0, :, start + seen : start + count]
            assert torch.equal(found[index], expected)
            assert found.transpose(1, 2).is_contiguous()
