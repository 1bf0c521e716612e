"""The two errors of hvdtrain, each with a line for a person and an exit code for a script."""

import difflib


class _Refusal(Exception):
    """An error with an argument for each problem, such as one of each host."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UsageError(_Refusal):
    """The request cannot be carried out, and nothing was touched. Exit code 2."""

    exit_code = 2


class Failure(_Refusal):
    """The work was started and failed. Exit code 1."""

    exit_code = 1


def unknown(what: str, name: str, valid: list[str]) -> UsageError:
    """Returns the error for an unknown name, with the valid names and the one most like it.

    Args:
        what: the kind of thing that the name is for.
    """
    names = " ".join(valid).replace(",", " ").split()
    similar = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    return UsageError(f"unknown {what} '{name}': choose from {', '.join(valid)}{hint}")
