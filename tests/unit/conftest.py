"""Another user."""

from __future__ import annotations

import json
import os
import signal

import pytest

NOBODY = 65534  # user and group


@pytest.fixture
def as_nobody():
    """Call functions as another user, in a fork; return what they return."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def call(function, *args):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(30)
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                os.write(writing, json.dumps(function(*args)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        return json.loads(text)

    return call
