"""The public API as it was before the house was rebuilt, but for the name of the package.

Seen red with: a keyword renamed, a name left out of __all__, a default changed.
"""

from pathlib import Path

from tests.integration.public_api import lines


def test_public_api_is_the_golden_file():
    """Regenerate it with `python -m tests.integration.public_api` where a change is meant."""
    golden = Path(__file__).with_name("public_api.txt").read_text().splitlines()
    assert list(lines()) == golden
