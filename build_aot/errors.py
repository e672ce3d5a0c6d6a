"""Errors that the build raises when it cannot deliver what was asked."""


class BuildError(RuntimeError):
    """A variant did not compile, a library did not link, or the machine lacks something the build needs."""


class AuditError(BuildError):
    """A library is not what it has to be; `problems` lists every finding, one sentence each."""

    def __init__(self, subject: str, problems: list[str]):
        super().__init__(f"{subject} fails the audit:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = problems
