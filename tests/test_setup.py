"""Set-up on machines that lack something: one sentence that says what to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    """The files that set-up reads, in a folder with a space in its name."""
    root = tmp_path / "my clone"
    (root / "ci").mkdir(parents=True)
    for name in (
        "Makefile",
        "requirements.txt",
        "pyproject.toml",
        "ci/requirements.txt",
        "ci/setup.sh",
    ):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def tools(tmp_path):
    """A PATH with the shell's tools and no Python at all."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sh", "awk", "df", "mkdir", "rm", "touch", "tail", "grep", "make"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def make(clone: Path, tools: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(tools / "make"), ".venv", *arguments],
        cwd=clone,
        env={"PATH": str(tools), "HOME": os.environ.get("HOME", "")},
        capture_output=True,
        text=True,
    )


def complaint(done: subprocess.CompletedProcess) -> str:
    assert done.returncode != 0
    lines = [x for x in done.stderr.splitlines() if x.startswith("setup: ")]
    assert len(lines) == 1
    return lines[0]


def test_no_python_at_all(clone, tools):
    assert "Python 3.11 or later was not found" in complaint(make(clone, tools))
    assert not (clone / ".venv").exists()


def test_a_python_that_is_too_old(clone, tools):
    script(tools / "python3", "exit 1")
    assert "3.11 or later" in complaint(make(clone, tools))
    named = make(clone, tools, f"PYTHON={tools / 'python3'}")
    assert "older than 3.11; name another one" in complaint(named)


def test_a_python_without_the_venv_module(clone, tools):
    script(tools / "python3", 'case "$2" in *venv*) exit 1;; esac; exit 0')
    assert "apt-get install python3-venv" in complaint(make(clone, tools))


def test_a_disk_that_is_full_before_anything_is_installed(clone, tools):
    script(tools / "python3", "exit 0")
    (tools / "df").unlink()
    script(tools / "df", "echo head; echo disk 100 90 10 90% /")
    assert "10 MB free" in complaint(make(clone, tools))
    assert not (clone / ".venv").exists()


def test_a_disk_that_fills_up_on_the_way(clone, tools):
    script(
        tools / "python3",
        'case "$2" in venv) echo "No space left on device"; exit 1;; esac; exit 0',
    )
    assert "disk is full" in complaint(make(clone, tools))


def test_an_installation_that_fails_leaves_no_mark_of_completeness(clone, tools):
    script(tools / "python3", 'case "$2" in venv) echo "no network"; exit 1;; esac; exit 0')
    assert "build/setup.log" in complaint(make(clone, tools))
    assert not (clone / ".venv" / ".complete").exists()
