"""The lab for tests: one node with two running containers, 101 and 102, for the whole session.

Without root the containers are a user's (`userlab.py`), and what takes a real one is skipped and says so. Where no lab
can be had at all, or with CI=true or SPECCTL_LAB=require no real one, the tests fail or are skipped and say why: no
machine passes CI by not having looked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.lab.lab import Lab, LabUnavailable, setup
from tests.lab.userlab import UserLab, needs

REQUIRED = os.environ.get("CI") == "true" or os.environ.get("SPECCTL_LAB") == "require"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.lab)
            # Containers, and links that are waited for: on a machine that is busy with much else that takes its time.
            item.add_marker(pytest.mark.timeout(600))


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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_lab(why): skipped in a user's lab, which does not have what is named")


@contextlib.contextmanager
def skipped_without() -> Iterator[None]:
    """A test that meets something which a user's lab cannot do is skipped for that reason."""
    try:
        yield
    except LabUnavailable as error:
        if REQUIRED:
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with skipped_without():
        if os.geteuid() != 0 and (mark := item.get_closest_marker("real_lab")):
            needs(mark.args[0])
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    with skipped_without():
        return (yield)


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if os.geteuid() == 0 or REQUIRED:
        request.getfixturevalue("lab_ready")
    with Lab() if os.geteuid() == 0 else UserLab() as lab:
        lab.container(101)
        lab.container(102)
        yield lab
