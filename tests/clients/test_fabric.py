"""examples/distributed/fabric_training.py on two processes of Lightning Fabric."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning.fabric")
EXAMPLE = Path(__file__).parents[2] / "examples/distributed/fabric_training.py"


def test_training_on_two_ranks():
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--devices", "2", "--epochs", "1"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.count("epoch 0: loss") == 1
    assert "on 2 ranks" in done.stdout
