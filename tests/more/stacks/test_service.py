"""Other users get nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE
from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.service import Service, ask, launches

pytestmark = pytest.mark.usefixtures("own_names")

NOBODY = 65534  # user and group


def names():
    return [name for _, name in launches()]


def bytes_of(name):
    """Return what the service sends, whoever has it."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE)
        asking.connect(name)
        return b"".join(iter(lambda: asking.recv(2**16), b"")).decode()


def result_of_ask(name):
    try:
        return ask(name, PATIENCE)
    except OSError as error:
        return type(error).__name__


def test_another_user_gets_no_answer(serve, as_nobody):
    collected = []
    serve("19.0", lambda: collected.append(1))
    (name,) = names()
    assert bytes_of(name) == "null\n"
    assert as_nobody(bytes_of, name) == ""
    assert len(collected) == 1  # nor is anything looked at
    assert bytes_of(name) == "null\n"


def test_launches_of_other_users_are_not_found(serve, as_nobody):
    serve("19.0", dict)
    assert as_nobody(names) == []


def test_the_agent_of_another_user_is_not_asked(serve, as_nobody):
    """Whatever its name, and also if it would answer."""
    serve("19.0", dict)
    (name,) = names()
    assert as_nobody(result_of_ask, name) is None


@pytest.mark.usefixtures("pretender")
def test_another_user_may_not_pretend_to_be_this_one():
    """Everybody may take a name. The answer of another user is not even read."""
    (name,) = names()
    assert ask(name, PATIENCE) is None


def test_root_may_ask_everybody(beside_nobody):
    """It can look at every process all the same."""

    def serve(ready, wait):
        made = Service("19.0", lambda: {"user": os.getuid()})
        made.start()
        ready()
        wait()

    with beside_nobody(serve):
        prefix = f"{service._PREFIX}/{NOBODY}/19.0/"
        number = Path(service._SOCKETS).read_text().partition(prefix)[2].splitlines()[0]
        assert json.loads(bytes_of(f"\0{prefix}{number}")) == {"user": NOBODY}
