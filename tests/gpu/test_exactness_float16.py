"""The exactness matrix in float16."""

from __future__ import annotations

import pytest
import torch

from gpu.exactness import Exactness

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


class TestFloat16(Exactness):
    dtype = torch.float16
