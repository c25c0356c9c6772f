from __future__ import annotations

import re
from contextlib import suppress
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchrun_hpc.schedulers.hostlist import (
    MAX_HOSTS,
    HostlistError,
    expand_counts,
    expand_hostlist,
)

GOOD = {
    # one name
    "n1": "n1",
    "localhost": "localhost",
    "x1000c0s0b0n0": "x1000c0s0b0n0",
    "jpbo-001-01": "jpbo-001-01",
    "gpu_a.cluster.example": "gpu_a.cluster.example",
    "10.0.0.1": "10.0.0.1",
    # separators, in any number and at either end
    "a,b": "a b",
    "a b": "a b",
    "a\tb\nc\n": "a b c",
    ",a,, b ,": "a b",
    "n[1-2] m[3,4]": "n1 n2 m3 m4",
    # ranges
    "n[1-3,7]": "n1 n2 n3 n7",
    "n[5-5]": "n5",
    "[1-3]": "1 2 3",
    "n[9-11]": "n9 n10 n11",
    "n[01-03]": "n01 n02 n03",
    "n[08-11]": "n08 n09 n10 n11",
    "n[099-101]": "n099 n100 n101",
    # the low end sets the width, for its own range alone
    "n[8-0011]": "n8 n9 n10 n11",
    "n[08-0011]": "n08 n09 n10 n11",
    "n[0008-11]": "n0008 n0009 n0010 n0011",
    "n[09,1]": "n09 n1",
    "n[01-1]": "n01",
    "n[000000000000000000000001-2]": (
        "n000000000000000000000001 n000000000000000000000002"
    ),
    # exact beyond 64 bits
    "n[18446744073709551615-18446744073709551616]": (
        "n18446744073709551615 n18446744073709551616"
    ),
    # order and duplicates are kept
    "n11,n[9-10],n2": "n11 n9 n10 n2",
    "n[3,1,2]": "n3 n1 n2",
    "tux2,tux1,tux2": "tux2 tux1 tux2",
    "n[1-2,2]": "n1 n2 n2",
    # text after the bracket
    "n[1-2]i": "n1i n2i",
    "x[1-2]-hsn0": "x1-hsn0 x2-hsn0",
    "c[09-10].dom": "c09.dom c10.dom",
    "r[1-2]n[3-4]i": "r1n3i r1n4i r2n3i r2n4i",
    # several brackets: the last is fastest, then the first, then the second
    "rack[1-2]n[01-02]": "rack1n01 rack1n02 rack2n01 rack2n02",
    "tux[1-2][03-04]": "tux103 tux104 tux203 tux204",
    "a[0-1]b[0-1]c[0-1]": ("a0b0c0 a0b0c1 a1b0c0 a1b0c1 a0b1c0 a0b1c1 a1b1c0 a1b1c1"),
    "[0-1][0-1][0-1]i": "000i 001i 100i 101i 010i 011i 110i 111i",
    "a[0-1]b[0-1]c[0-1]d[0,5]": (
        "a0b0c0d0 a0b0c0d5 a1b0c0d0 a1b0c0d5 a0b1c0d0 a0b1c0d5 a1b1c0d0 a1b1c0d5 "
        "a0b0c1d0 a0b0c1d5 a1b0c1d0 a1b0c1d5 a0b1c1d0 a0b1c1d5 a1b1c1d0 a1b1c1d5"
    ),
}

BAD = {
    # nothing
    "": "'' names no host",
    " ,\n": r"' ,\n' names no host",
    # ranges
    "n[3-1]": "'3-1' at position 3 is a range that ends before it begins",
    "n[10-9]": "'10-9' at position 3 is a range that ends before it begins",
    "n[a-b]": "'a-b' at position 3 is not a number",
    "n[]": "'' at position 3 is not a number",
    "n[1,]": "'' at position 5 is not a number",
    "n[1,,2]": "'' at position 5 is not a number",
    "n[-1]": "'-1' at position 3 is not a number",
    "n[1-]": "'1-' at position 3 is not a number",
    "n[1-2-3]": "'1-2-3' at position 3 is not a number",
    "n[1,2 ]": "'2 ' at position 5 is not a number",
    "n[+1-2]": "'+1-2' at position 3 is not a number",
    "n[1_0]": "'1_0' at position 3 is not a number",
    "n[0x1-0x3]": "'0x1-0x3' at position 3 is not a number",
    "n[１-２]": "'１-２' at position 3 is not a number",  # noqa: RUF001
    "m,n[1]k[x]": "'x' at position 9 is not a number",
    # brackets
    "n[1-2": "'[' at position 2 opens a bracket that is not closed",
    "n[1]m[": "'[' at position 6 opens a bracket that is not closed",
    "n[1-2]]": "']' at position 7 closes no bracket",
    "n1]": "']' at position 3 closes no bracket",
    "n[[1-2]]": "'[1-2' at position 3 is not a number",
    # characters
    "a,b$": "'$' at position 4 cannot be in a host name",
    "a:b": "':' at position 2 cannot be in a host name",
    "a/b": "'/' at position 2 cannot be in a host name",
    "n[1-2]+": "'+' at position 7 cannot be in a host name",
    "a\rb": r"'\r' at position 2 cannot be in a host name",
    "knöten": "'ö' at position 3 cannot be in a host name",
    "n1(x2)": "'(' at position 3 cannot be in a host name",
    # sizes
    "n[0-65536]": "'0-65536' at position 3 makes more than 65,536 hosts",
    "n[1-65536,7]": "'7' at position 11 makes more than 65,536 hosts",
    "n[1-65536],m": "'m' at position 12 exceeds the limit of 65,536 hosts",
    "n[1-40000],m[1-40000]": "'1-40000' at position 14 makes more than 65,536 hosts",
    "n[1-257]m[1-256]": "'1-256' at position 11 makes more than 65,536 hosts",
    "[1-65536]" * 10_000: "'1-65536' at position 11 makes more than 65,536 hosts",
    "n[1-" + "9" * 253 + "]": "' at position 3 makes more than 65,536 hosts",
    "n[" + "0" * 5000 + "1-2]": "...' at position 3 is not a number",
    "ok," + "n" * 254: "...' at position 4 is a name of over 253 characters",
    "[1-65536]" + "n" * 100_000: "...' at position 1 is a name of over 253 characters",
    "[1]" * 254: "...' at position 1 is a name of over 253 characters",
}


@pytest.mark.parametrize(("text", "names"), GOOD.items())
def test_good_list(text, names):
    assert expand_hostlist(text) == tuple(names.split())


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=range(len(BAD)))
def test_bad_list(text, message):
    with pytest.raises(HostlistError, match=re.escape(message)) as caught:
        expand_hostlist(text)
    assert len(str(caught.value)) < 120
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "text", ["n[1-65536]", "n[1-256]m[1-256]", ",".join(["n"] * MAX_HOSTS), "n" * 253]
)
def test_just_within_the_limits(text):
    assert len(expand_hostlist(text)) in {1, MAX_HOSTS}


literals = st.text("abn09.-_", max_size=4)
numbers = st.builds(
    lambda number, width: f"{number:0{width}}",
    st.integers(0, 10**6),
    st.integers(1, 9),
)


@given(st.lists(st.builds(str.__add__, literals, numbers), min_size=1))
def test_compressed_list_gives_the_names_back(names):
    assert list(expand_hostlist(compress(names))) == names


def compress(names):
    """Write neighbours with one prefix and one width as ranges, as scontrol does."""

    def prefix_and_width(name):
        prefix = name.rstrip("0123456789")
        return prefix, len(name) - len(prefix)

    elements = []
    for (prefix, width), group in groupby(names, prefix_and_width):
        ranges: list[list[int]] = []
        for number in (int(name[len(prefix) :]) for name in group):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        inside = ",".join(
            f"{low:0{width}}" + (f"-{high:0{width}}" if high > low else "")
            for low, high in ranges
        )
        elements.append(f"{prefix}[{inside}]")
    return ",".join(elements)


brackets = st.lists(numbers, min_size=1, max_size=2)


@given(literals, st.lists(st.tuples(brackets, literals), min_size=1, max_size=4))
@example("a", [(["0", "1"], "b"), (["0", "1"], "c"), (["0", "1"], "d")])
def test_brackets_vary_in_slurms_order(head, parts):
    text = head + "".join(f"[{','.join(inside)}]{tail}" for inside, tail in parts)
    *prefix, (inside, tail) = parts
    expected = [
        before + number + tail
        for before in unfold_from_the_right(head, prefix)
        for number in inside
    ]
    assert list(expand_hostlist(text)) == expected


def unfold_from_the_right(head, parts, behind=""):
    """Do to a prefix what _push_range_list in Slurm's hostlist.c does."""
    if not parts:
        return [head + behind]
    *parts, (inside, tail) = parts
    return [
        name
        for number in inside
        for name in unfold_from_the_right(head, parts, number + tail + behind)
    ]


@given(st.text() | st.text("n019[]-,. ", max_size=40))
def test_any_text_is_expanded_or_refused(text):
    with suppress(HostlistError):
        names = expand_hostlist(text)
        assert 1 <= len(names) <= MAX_HOSTS
        assert all(re.fullmatch("[A-Za-z0-9._-]{1,253}", name) for name in names)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", [1]),
        ("2(x2),1", [2, 2, 1]),
        ("4(x1)", [4]),
        ("72(x2),36,8(x3)", [72, 72, 36, 8, 8, 8]),
        ("1(x65536)", [1] * MAX_HOSTS),
    ],
)
def test_good_counts(text, counts):
    assert expand_counts(text) == tuple(counts)


NO_COUNTS = ["", "0", "-1", "1.5", "two", "²", "1\n", "2(x)", "2x2", "2(x2", "2(*2)"]
NO_COUNTS += ["2(x2)(x2)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, f"{text!r} at position 1 is not a positive count")
            for text in NO_COUNTS
        ),
        ("2,", "'' at position 3 is not a positive count"),
        ("2, 1", "' 1' at position 3 is not a positive count"),
        ("1,2(x0)", "'2(x0)' at position 3 is not a positive count"),
        ("9" * 5000, "...' at position 1 is not a positive count"),
        ("1(x65537)", "'1(x65537)' at position 1 makes more than 65,536 nodes"),
        ("1(x65536),1", "'1' at position 11 makes more than 65,536 nodes"),
        ("1(x999999999)", "'1(x999999999)' at position 1 makes more than 65,536"),
    ],
)
def test_bad_counts(text, message):
    with pytest.raises(HostlistError, match=re.escape(message)) as caught:
        expand_counts(text)
    assert len(str(caught.value)) < 120
    assert str(caught.value).isprintable()


runs = st.tuples(st.integers(1, 999), st.integers(1, 9))


@given(st.lists(runs, min_size=1))
def test_compressed_counts_give_the_counts_back(runs):
    text = ",".join(f"{count}(x{nodes})" for count, nodes in runs)
    expected = [count for count, nodes in runs for _ in range(nodes)]
    assert list(expand_counts(text)) == expected
    assert expand_counts(text.replace("(x1)", "")) == tuple(expected)


@given(st.text() | st.text("019(x),", max_size=20))
def test_any_text_is_counted_or_refused(text):
    with suppress(HostlistError):
        counts = expand_counts(text)
        assert 1 <= len(counts) <= MAX_HOSTS
        assert min(counts) > 0
