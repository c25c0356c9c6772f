"""Helpers of the tests: each is imported by its full name."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
