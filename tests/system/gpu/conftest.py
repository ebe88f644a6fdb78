"""Without a CUDA device nothing here is collected; the header of a run says so (`tests/conftest.py`)."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
