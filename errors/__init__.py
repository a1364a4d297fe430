"""The exception tree of paro-advise, importable from every room.

ParoAdviseError                   E100     exit 1: something failed
+-- UsageError                    E200     exit 2: the command line asks for something impossible
+-- InputError                    E300     exit 3: the input cannot be used
|   +-- NoInputError              E301     nothing to read under the given paths
|   +-- UnknownFormatError        E302     the file is of no kind we know
|   +-- BrokenInputError          E303     the file holds nothing that can be salvaged
|   +-- HostileInputError         E304     the file would exhaust memory or run code
|   `-- ForeignDataError          E305     a paro-advise JSON file has another format or version
+-- OutputError                   E400     exit 1: the result cannot be written
|   `-- WouldOverwriteError       E401     a file exists and --force was not given
+-- UnlikeRunsError               E522     exit 4: two runs did not do the same work
+-- NoGainError                   E523     exit 4: a plan is not expected to make the run faster
`-- TrainingError                 E510     exit 1: the training job cannot go on as asked
    +-- DivergedError             E511     the ranks do not agree on what to do
    +-- CommunicationError        E512     a rank or the backend failed in a collective
    +-- SwitchError               E513     a switch broke off; the model cannot be used any more
    `-- StalePlanError            E521     exit 4: the plan was made for another job
"""

from __future__ import annotations

__all__ = [
    "BrokenInputError",
    "CommunicationError",
    "DivergedError",
    "ForeignDataError",
    "HostileInputError",
    "InputError",
    "NoGainError",
    "NoInputError",
    "OutputError",
    "ParoAdviseError",
    "StalePlanError",
    "SwitchError",
    "TrainingError",
    "UnknownFormatError",
    "UnlikeRunsError",
    "UsageError",
    "WouldOverwriteError",
]


class ParoAdviseError(Exception):
    """Base of all errors that a user may see.

    Attributes:
        what: the rule that was broken, with expected and got.
        where: the file or option concerned, or None.
        hint: the next step for the user, or None.
        code: stable identifier, the argument of ``paro-advise explain``.
        exit_code: the process exit code (docs/formats.md, exit codes).
    """

    code = "E100"
    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        # Raised in a training script or a notebook it is printed as a traceback, which shows notes.
        for note in self.lines()[1:]:
            self.add_note(note)

    def lines(self) -> list[str]:
        """Return the message as printed on stderr: rule, place, next step."""
        out = [f"error[{self.code}]: {self.what}"]
        if self.where:
            out.append(f"  --> {self.where}")
        if self.hint:
            out.append(f"  help: {self.hint}")
        return out

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword attributes when the error crosses a process border."""
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(kind: type[ParoAdviseError], what: str, where: str | None, hint: str | None) -> ParoAdviseError:
    return kind(what, where=where, hint=hint)


class UsageError(ParoAdviseError):
    """The options contradict each other or name something that does not exist."""

    code = "E200"
    exit_code = 2


class InputError(ParoAdviseError):
    """The input cannot be used."""

    code = "E300"
    exit_code = 3


class NoInputError(InputError):
    """Nothing to read under the given paths."""

    code = "E301"


class UnknownFormatError(InputError):
    """The file is of no kind that trace_parsers knows."""

    code = "E302"


class BrokenInputError(InputError):
    """The file is of a known kind but nothing in it could be read."""

    code = "E303"


class HostileInputError(InputError):
    """Reading the file would exhaust memory or execute code."""

    code = "E304"


class ForeignDataError(InputError):
    """A paro-advise JSON document has another format or major version."""

    code = "E305"


class OutputError(ParoAdviseError):
    """The result cannot be written."""

    code = "E400"


class WouldOverwriteError(OutputError):
    """The output exists already and --force was not given."""

    code = "E401"


class TrainingError(ParoAdviseError):
    """The training job cannot go on as asked."""

    code = "E510"


class DivergedError(TrainingError):
    """The ranks do not hold the same model, strategy or library versions."""

    code = "E511"


class CommunicationError(TrainingError):
    """A collective failed: another rank is gone, or the backend is wrong."""

    code = "E512"


class SwitchError(TrainingError):
    """A live switch broke off half way."""

    code = "E513"


class StalePlanError(TrainingError):
    """The plan was made for another job; the message names the fact that drifted."""

    code = "E521"
    exit_code = 4


class UnlikeRunsError(ParoAdviseError):
    """Two runs cannot be compared, since they did not do the same work."""

    code = "E522"
    exit_code = 4


class NoGainError(ParoAdviseError):
    """A change must not be written that is not expected to make the run faster."""

    code = "E523"
    exit_code = 4
