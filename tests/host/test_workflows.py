"""Workflows run what was looked at, with no more rights than a job needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github" / "workflows").glob("*.yml"))


def jobs(text: str) -> dict[str, str]:
    """Name -> text of each job."""
    _, _, below = text.partition("\njobs:\n")
    parts = re.split(r"^  ([\w-]+):\n", below, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_rights_are_given_job_by_job(path):
    text = path.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert "\npermissions: {}\n" in text
    for name, job in jobs(text).items():
        assert "permissions:" in job and "timeout-minutes:" in job, name


def test_what_builds_cannot_publish_and_what_publishes_runs_nothing():
    release = jobs(Path(WORKFLOWS[0].parent, "release.yml").read_text())
    assert set(release) == {"build", "same", "test", "attest", "publish"}
    assert "environment: pypi\n" in release["publish"]
    for name, job in release.items():
        rights = set(re.findall(r"^      ([\w-]+): (?:read|write)", job, re.MULTILINE))
        if "run:" in job:
            assert rights <= {"contents"} and "contents: write" not in job, name
        assert ("id-token" in rights) == (name in ("attest", "publish"))
    assert "wheels/build_hub.py dist/*manylinux*.whl --out hub\n" in release["build"]
    assert "wheels/audit_wheel.py --records dist/*.whl\n" in release["build"], "records of other kernels do not ship"
    assert "run:" not in release["publish"] and "cache" not in "".join(release.values())
