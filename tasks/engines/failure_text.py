"""What a foreign error says, in one line. Standard library only, Python 3.10."""

from __future__ import annotations


def last_line(error: Exception, default: str) -> str:
    """The last line that says something, which TVM's long messages end with; ``default`` where none does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else default


def describe_failure(error: Exception) -> str:
    """The error's class and its last line."""
    return f"{type(error).__name__}: {last_line(error, 'no message')[:500]}"
