"""Set-up of tests with other libraries."""

from collections.abc import Iterator

import pytest
import torch

from torchweft.core.default_dtype import default_dtype


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """Libraries set it for the process; each test leaves it as it was."""
    with default_dtype(torch.get_default_dtype()):
        yield
