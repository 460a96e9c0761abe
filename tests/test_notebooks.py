"""The committed notebooks: what a reader on GitHub gets."""

import json
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from kvlab.ledger.claims import CLAIMS
from kvlab.ledger.values import Time, read

ROOT = Path(__file__).parents[1]
BOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
RECORD = json.loads((ROOT / "ci" / "record.json").read_text(encoding="utf-8"))


def code(path: Path) -> list:
    return [c for c in nbformat.read(path, 4).cells if c.cell_type == "code"]


def outputs(path: Path) -> list:
    return [o for c in code(path) for o in c.outputs]


@pytest.fixture(params=BOOKS, ids=lambda p: p.stem)
def book(request) -> Path:
    return request.param


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda p: p.stem)
def test_solutions_pass_their_own_checks(path):
    names: dict = {}
    for cell in code(path):
        exec(cell.source, names)


def test_there_is_a_solution_for_every_notebook():
    assert BOOKS
    assert [p.name[:2] for p in SOLUTIONS] == [p.name[:2] for p in BOOKS]


def test_it_is_valid_and_small_enough_to_be_shown(book):
    nbformat.validate(nbformat.read(book, 4))
    assert book.stat().st_size < 3e6


def test_it_was_executed_without_errors_or_warnings(book):
    assert outputs(book)
    assert not [o for o in outputs(book) if o.output_type == "error"]
    assert not [o for o in outputs(book) if o.get("name") == "stderr"]


def test_every_cell_that_should_show_something_shows_it(book):
    for cell in code(book):
        if re.search(r"^print\(|^figure = plots|^book$", cell.source, re.M):
            assert cell.outputs, cell.source


def test_it_names_no_folder_of_the_machine_that_made_it(book):
    text = book.read_text(encoding="utf-8")
    assert not re.findall(r"/(?:work|root|home|tmp|Users|private)/[^\s\"]*", text)


def test_its_widgets_carry_their_state(book):
    for widgets in nbformat.read(book, 4).metadata.get("widgets", {}).values():
        assert widgets["state"]


def test_its_parameters_are_literals_in_a_tagged_cell_and_full_by_default(book):
    tagged = [c for c in code(book) if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    names: dict = {}
    exec(tagged[0].source, {"__builtins__": {}}, names)
    assert names == {"MODEL": "bundled", "FAST": False}


def test_no_injected_parameters_or_execution_counts_were_committed(book):
    for cell in code(book):
        assert "injected-parameters" not in cell.metadata.get("tags", [])
        assert cell.execution_count is None


def test_it_owns_no_path_and_no_helper_of_its_own(book):
    for cell in code(book):
        assert "sys.path" not in cell.source
        assert "chdir" not in cell.source
        assert len(cell.source.splitlines()) <= 30


def test_the_record_holds_its_claims(book):
    claims = RECORD[book.stem]["claims"]
    assert claims
    for claim in claims:
        assert set(claim) == {"id", "measured", "verdict"}
        measured = {name: read(value) for name, value in claim["measured"].items()}
        assert CLAIMS[claim["id"]].judge(measured) == claim["verdict"]


BY_THE_CLOCK = {"E5", "F2"}
"""What a probe costs, and what a look-up costs: these two claims are about time alone."""


def test_no_other_verdict_hangs_on_a_clock():
    for claim in (c for part in RECORD.values() for c in part["claims"]):
        measured = {name: read(value) for name, value in claim["measured"].items()}
        for told in (1e-6, 1.0, 1e6):
            other = {
                name: replace(value, value=told) if isinstance(value, Time) else value
                for name, value in measured.items()
            }
            verdict = CLAIMS[claim["id"]].judge(other)
            assert verdict == claim["verdict"] or claim["id"] in BY_THE_CLOCK, claim["id"]


def test_every_claim_is_owned_by_one_notebook():
    ids = [c["id"] for part in RECORD.values() for c in part["claims"]]
    assert sorted(ids) == sorted(CLAIMS)


def test_the_readme_shows_the_record():
    import sys

    sys.path.insert(0, str(ROOT / "ci"))
    import reproduce

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    between = readme.split(reproduce.START)[1].split(reproduce.END)[0]
    assert between.strip() == reproduce.table(RECORD)


def test_every_link_and_picture_of_the_readme_exists():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", readme):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_readme_shows_the_audited_engines():
    import sys

    sys.path.insert(0, str(ROOT / "ci"))
    import engines_table

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    between = readme.split(engines_table.START)[1].split(engines_table.END)[0]
    assert between.strip() == engines_table.table()
