"""The lab for tests: one node with two running containers, 101 and 102, for the whole session.

Where a lab cannot be had (not root, no namespaces) the tests that need it are skipped, and say why; with CI=true or
SPECCTL_LAB=require that is a failure, so that no machine can pass by not having looked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import Lab, LabUnavailable, setup

REQUIRED = os.environ.get("CI") == "true" or os.environ.get("SPECCTL_LAB") == "require"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab_ready() -> None:
    """A Lab can be made: packages and root image are there."""
    try:
        setup(install=REQUIRED)
        with Lab():
            pass
    except LabUnavailable as error:
        if REQUIRED:
            pytest.fail(f"this run must have a lab: {error}", pytrace=False)
        pytest.skip(f"no lab: {error}")


@pytest.fixture(scope="session")
def lab(lab_ready: None) -> Iterator[Lab]:
    with Lab() as lab:
        lab.container(101)
        lab.container(102)
        yield lab
