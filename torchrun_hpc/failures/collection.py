"""The workers' failures: which was first, and which others are equal."""

from __future__ import annotations

from dataclasses import dataclass

from torchrun_hpc.failures.failure import Failure, ending
from torchrun_hpc.wire import WireError

_CAUSES = 5  # in a report
_LONGEST = 150  # characters of a cause


@dataclass(frozen=True)
class Summary:
    """The content of a report."""

    first: Failure
    same_as_first: tuple[int, ...] = ()  # ranks of workers with the same failure
    others: tuple[tuple[str, tuple[int, ...]], ...] = ()  # other causes, with ranks
    unlisted: int = 0  # number of workers that failed in yet other ways


class Collection:
    """The failures of one round."""

    def __init__(self) -> None:
        self._failures: dict[int, Failure] = {}

    def add(self, failure: Failure) -> None:
        """Add a failure; only the first one of a worker counts."""
        if failure.worker is None:
            raise WireError("not a worker's failure")
        self._failures.setdefault(failure.rank, failure)

    def clear(self) -> None:
        """Begin another round."""
        self._failures.clear()

    def summary(self) -> Summary | None:
        """Return what to report; ``None`` if nothing has failed."""
        if not self._failures:
            return None
        # In order of arrival, but possible consequences of other failures come last.
        first, *rest = sorted(self._failures.values(), key=lambda f: f.is_doubtful)
        others: dict[tuple[int, str], list[Failure]] = {}
        for failure in rest:
            others.setdefault(failure.signature, []).append(failure)
        same = others.pop(first.signature, [])
        groups = sorted(others.values(), key=len, reverse=True)
        return Summary(
            first,
            _ranks(same),
            tuple((_cause(group), _ranks(group)) for group in groups[:_CAUSES]),
            sum(map(len, groups[_CAUSES:])),
        )


def _ranks(group: list[Failure]) -> tuple[int, ...]:
    return tuple(sorted(failure.rank for failure in group))


def _cause(group: list[Failure]) -> str:
    first = group[0]
    text = first.plain or ending(first.code)
    if any(failure.text != first.text for failure in group):
        text = first.signature[1]
    sentence = text.partition(". ")[0]
    return sentence if len(sentence) <= _LONGEST else sentence[:_LONGEST] + " ..."
