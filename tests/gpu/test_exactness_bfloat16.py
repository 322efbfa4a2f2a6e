"""The exactness matrix in bfloat16."""

from __future__ import annotations

import pytest
import torch

from gpu.exactness import Exactness

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


class TestBfloat16(Exactness):
    dtype = torch.bfloat16
