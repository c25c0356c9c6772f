"""Compares expand_hostlist with the real thing: needs scontrol, no running Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.patience import PATIENCE
from torchrun_hpc.schedulers.hostlist import HostlistError, expand_hostlist

SUFFIXES_SINCE = (23, 2, 5)

# The generated lists are not as large, and have fewer brackets.
SAME = [
    "n[000000000000000000000001-2]",
    "n[4294967294-4294967297]",
    "tux2,tux1,tux2",
    "a[0-1]b[0-2]c[0-1]d[0-2]",
    "a[0-1]b[0-1]c[0-1]d[0-1]e[0-1]",
    "n[1-65536]",
    "n[1-256]m[1-256]",
]

REFUSED_BY_BOTH = [
    "n[3-1]",
    "n[a-b]",
    "n[0x1-0x3]",
    "n[]",
    "n[1,]",
    "n[,1]",
    "n[1,,2]",
    "n[-1]",
    "n[-]",
    "n[1--2]",
    "n[1-2-3]",
    "n[1,2 ]",
    "n[3-1]m[1-2]",
    "n[]m[1-2]",
    "n[1-2]]m[1-2]",
    "n[0-65536]",
]

# Text after a bracket: refused by scontrol up to 23.02.4, never by us.
SUFFIXES = ["n[1-2]i", "x[1-2]-hsn0", "c[1-2].dom", "n[1]2", "c,r[1-2]n[3-4]i,d"]

# What scontrol of that time makes of a broken list, which we refuse.
GUESSES_UP_TO_23_02_4 = {
    "n[1-]": ["n1"],
    "n[2-]m[1-2]": ["n2m1", "n2m2"],
    "n[+1-2]": ["n01", "n02"],
    "n[ 1-2]": ["n01", "n02"],
    "n[1 -2]": ["n01", "n02"],
    "n[": ["n]"],
    "n[1-2": ["n]"],
    "n1-2]": ["n1-2]"],
    "a]b[1-2]": ["a]b1", "a]b2"],
    "a;b": ["a;b"],
    "a:b": ["a:b"],
}


# scontrol has no limit on the whole list.
TOO_LONG = "n[1-40000],m[1-40000]"


class Scontrol:
    """``scontrol show hostnames``, which reads a slurm.conf and calls no daemon."""

    def __init__(self, folder):
        conf = folder / "slurm.conf"
        conf.write_text(
            "ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n"
        )
        self._env = {**os.environ, "SLURM_CONF": str(conf)}
        version = re.search(r"(\d+)\.(\d+)\.(\d+)", self._run("version").stdout)
        assert version
        self.version = tuple(map(int, version.groups()))

    def expand(self, text):
        """Return the names, or None where scontrol refuses; its exit code is 0."""
        done = self._run("show", "hostnames", text)
        assert done.returncode == 0, done.stderr
        if "Invalid hostlist" in done.stdout + done.stderr:
            return None
        return done.stdout.splitlines()

    def _run(self, *arguments):
        return subprocess.run(
            ["scontrol", "--", *arguments],
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    if not shutil.which("scontrol"):
        if os.environ.get("CI"):
            pytest.fail("scontrol is missing: install Slurm's client commands")
        pytest.skip("scontrol is missing")
    return Scontrol(tmp_path_factory.mktemp("scontrol"))


def test_same(scontrol):
    for text in SAME:
        assert list(expand_hostlist(text)) == scontrol.expand(text), text
    is_new = scontrol.version >= SUFFIXES_SINCE
    for text in SUFFIXES:
        expected = list(expand_hostlist(text)) if is_new else None
        assert scontrol.expand(text) == expected, text


def test_refused(scontrol):
    for text in REFUSED_BY_BOTH:
        assert scontrol.expand(text) is None, text
    if scontrol.version < SUFFIXES_SINCE:
        for text, names in GUESSES_UP_TO_23_02_4.items():
            assert scontrol.expand(text) == names, text
        # A newline separates for us alone.
        assert scontrol.expand("n[1-2]\nm") is None
        assert len(scontrol.expand(TOO_LONG)) == 80_000
    for text in (*REFUSED_BY_BOTH, *GUESSES_UP_TO_23_02_4, TOO_LONG):
        with pytest.raises(HostlistError):
            print(text, expand_hostlist(text))
    assert expand_hostlist("n[1-2]\nm") == ("n1", "n2", "m")


literals = st.text("anx.-_09", max_size=4)
lows = st.builds(
    lambda number, width: f"{number:0{width}}",
    st.sampled_from([0, 1, 8, 9, 10, 98, 99, 100, 999, 123_456]),
    st.integers(1, 7),
)
ranges = st.one_of(
    lows,
    st.builds(
        lambda low, more, width: f"{low}-{int(low) + more:0{width}}",
        lows,
        st.integers(0, 2),
        st.integers(1, 7),
    ),
)
brackets = st.lists(ranges, min_size=1, max_size=2).map(lambda x: f"[{','.join(x)}]")
bracketed = st.lists(
    st.builds(str.__add__, literals, brackets), min_size=1, max_size=4
).map("".join)
elements = bracketed | st.text("anx.-_09", min_size=1, max_size=8)
separators = st.text(", \t", min_size=1, max_size=2)
hostlists = st.lists(
    st.builds(str.__add__, elements, separators), min_size=1, max_size=3
).map("".join)

END_OF_LIST = "end-of-list"


# Twenty lists or more to one call of scontrol, with a name after each.
@settings(max_examples=30, deadline=None, derandomize=True)
@given(texts=st.lists(hostlists, min_size=20, max_size=40))
def test_generated_lists(scontrol, texts):
    names = scontrol.expand("".join(f"{text}{END_OF_LIST}," for text in texts))
    assert names is not None
    assert names.count(END_OF_LIST) == len(texts)
    for text in texts:
        end = names.index(END_OF_LIST)
        assert list(expand_hostlist(text)) == names[:end], text
        del names[: end + 1]
