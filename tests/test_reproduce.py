"""The runner of the notebooks, on small notebooks in a copy of the layout."""

import json
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "ci"))
import reproduce  # noqa: E402

GOOD = """\
from kvlab.ledger import Ledger, Rate
book = Ledger("01_good")
book.sequence("a", "float32", [1, 2], [5.0, 5.0])
book.claim("A1", colliding_runs_with_a_victim=Rate(1 if FAST else 2, 2))
"""
TOKENS = "requests_with_the_same_tokens"


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with one notebook, in a folder with a space in its name."""
    root = tmp_path / "a house"
    (root / "notebooks").mkdir(parents=True)
    (root / "ci").mkdir()
    (root / "README.md").write_text(f"before\n{reproduce.START}\nold\n{reproduce.END}\nafter\n")
    for name, value in {
        "ROOT": root,
        "NOTEBOOKS": root / "notebooks",
        "BUILD": root / "build",
        "RECORD": root / "ci" / "record.json",
        "FIGURES": root / "figures",
    }.items():
        monkeypatch.setattr(reproduce, name, value)
    monkeypatch.setenv("KVLAB_RECORD", "")
    monkeypatch.setenv("KVLAB_FIGURES", "")
    write(root, "01_good", GOOD)
    return root


def write(root: Path, name: str, *cells: str) -> None:
    parameters = nbformat.v4.new_code_cell("FAST = False", metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[parameters, *map(nbformat.v4.new_code_cell, cells)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "p", "language": "python"}
    nbformat.write(book, root / "notebooks" / f"{name}.ipynb")


def files(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and "build" not in p.parts
    }


def test_accepting_writes_record_notebook_and_table_and_nothing_else_ever_does(house, capsys):
    before = files(house)
    assert reproduce.main([]) == 1
    assert "make accept" in capsys.readouterr().err
    assert files(house) == before

    assert reproduce.main(["--accept"]) == 0
    after = files(house)
    claim = json.loads(after["ci/record.json"])["01_good"]["claims"][0]
    assert claim["measured"]["colliding runs with a victim"] == {"kind": "Rate", "value": 2, "n": 2}
    readme = after["README.md"].decode()
    assert readme.startswith("before\n")
    assert "| A1 | Two sessions" in readme
    assert "| colliding runs with a victim 2 of 2 | reproduced: Over" in readme
    assert "| [01](notebooks/01_good.ipynb) |" in readme
    executed = nbformat.reads(after["notebooks/01_good.ipynb"].decode(), 4)
    assert executed.cells[1].outputs
    assert "papermill" not in executed.metadata
    assert executed.cells[1].execution_count is None

    assert reproduce.main([]) == 0
    assert "All 1 claims and 2 recorded tokens agree" in capsys.readouterr().out
    assert files(house) == after

    write(house, "01_good", GOOD.replace("[1, 2]", "[1, 3]"))
    assert reproduce.main([]) == 1
    assert "token 2 is 3, recorded 2 (alone: make reproduce ONLY=01)" in capsys.readouterr().err


def test_accepting_one_notebook_keeps_what_the_others_have_recorded(house, capsys):
    other = GOOD.replace("A1", "D0").replace("colliding_runs_with_a_victim", TOKENS)
    other = other.replace("01_good", "02_other")
    write(house, "02_other", other)
    assert reproduce.main(["--accept"]) == 0
    before = files(house)
    write(house, "02_other", other.replace("[1, 2]", "[1, 3]"))
    assert reproduce.main(["--accept", "--only", "02"]) == 0
    after = files(house)
    assert after["notebooks/01_good.ipynb"] == before["notebooks/01_good.ipynb"]
    one, two = (json.loads(x["ci/record.json"]) for x in (before, after))
    assert two["01_good"] == one["01_good"]
    assert two["02_other"] != one["02_other"]
    assert "| A1 |" in after["README.md"].decode()
    assert "| D0 |" in after["README.md"].decode()
    capsys.readouterr()
    assert reproduce.main([]) == 0


def test_a_fast_run_is_not_compared_and_says_so(house, capsys):
    assert reproduce.main(["--fast"]) == 0
    assert "Nothing was compared" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        reproduce.main(["--fast", "--accept"])


def test_a_notebook_that_raises_or_claims_nothing_fails_and_is_not_accepted(house, capsys):
    write(house, "02_raises", "1 / 0")
    write(house, "03_silent", "1 + 1")
    before = files(house)
    assert reproduce.main(["--accept"]) == 1
    errors = capsys.readouterr().err
    assert "02_raises: cell 2 raised ZeroDivisionError: division by zero" in errors
    assert "03_silent: recorded no claim" in errors
    assert files(house) == before


def test_solutions_that_raise_fail(house, capsys):
    (house / "notebooks" / "solutions").mkdir()
    write(house, "solutions/01_solutions", "assert False, 'wrong'")
    assert reproduce.main(["--accept"]) == 1
    assert "AssertionError: wrong" in capsys.readouterr().err
