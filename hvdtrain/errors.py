"""The two ways in which hvdtrain refuses: each is one line for a person and an exit code for a script."""

import difflib


class _Refusal(Exception):
    """Where several things are wrong, on each of several hosts for one, there is an argument for each, and a line."""

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class UsageError(_Refusal):
    """The request cannot be carried out as asked; nothing was touched. Exit code 2."""

    exit_code = 2


class Failure(_Refusal):
    """The work was started and failed. Exit code 1."""

    exit_code = 1


def unknown(what: str, name: str, valid: list[str]) -> UsageError:
    """The error for a name that is not among the valid ones; it lists those, and the one that may be meant."""
    names = " ".join(valid).replace(",", " ").split()
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    meant = f"; did you mean {near[0]}?" if near else ""
    return UsageError(f"unknown {what} '{name}': choose from {', '.join(valid)}{meant}")
