"""Notebook 04 as a reader meets it: in JupyterLab, and as an exported page without a network."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "04_slot_collision_lab.ipynb"
sys.path.insert(0, str(ROOT / "ci"))

import export  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium; without one the tests are skipped, or fail under REQUIRE_BROWSER=1."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium on this machine (Debian: apt-get install chromium)"
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield chromium
        chromium.close()


# A asks for 1+1 and B for 2+2: the second digit of an answer says whose question it is.
OF_A, OF_B = re.compile("你问1加1.*是2"), re.compile("你问2加2.*是4")


def answer_of(page, name: str):
    return page.locator(f'[aria-label="answer of {name}"]:visible')


def picture(page) -> tuple[str, str]:
    """Alternative text and source of the heatmap that is shown."""
    image = page.locator('img[alt^="Attention heatmaps"]:visible')
    assert image.count() == 1
    return image.get_attribute("alt"), image.get_attribute("src")


def flip(page, state: str) -> None:
    page.get_by_role("button", name=state, exact=True).click()


def check_the_switch(page) -> None:
    """Flip to the collision and back; text, sentence and picture must follow."""
    from playwright.sync_api import expect

    expect(answer_of(page, "A")).to_have_text(OF_A)
    before = picture(page)
    assert "isolated" in before[0]
    flip(page, "same slot, overwritten")
    expect(answer_of(page, "A")).to_have_text(OF_B)
    assert page.locator('[aria-label="answer of A"]:visible mark').count() > 0
    told = page.locator('[aria-label="what happened"]:visible')
    expect(told).to_contain_text("A answers the question of B")
    during = picture(page)
    assert "overwritten" in during[0]
    assert during[1] != before[1]
    flip(page, "same slot, appended")
    expect(answer_of(page, "A")).to_have_text(OF_A)
    expect(told).to_contain_text("B")
    flip(page, "isolated")
    expect(answer_of(page, "A")).to_have_text(OF_A)
    assert page.locator('[aria-label="answer of A"]:visible mark').count() == 0
    assert picture(page) == before


def test_the_exported_page_works_without_kernel_and_network(browser, tmp_path):
    page_file = export.export(NOTEBOOK, tmp_path)
    context = browser.new_context(offline=True)
    page = context.new_page()
    failed = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.goto(page_file.as_uri())
    page.get_by_role("button", name="isolated", exact=True).wait_for()
    check_the_switch(page)
    page.get_by_label("two requests").select_option("D and E: two passphrases")
    flip(page, "same slot, overwritten")
    answer_of(page, "D").wait_for()
    assert "蓝鲸七号" in answer_of(page, "D").inner_text()
    assert page.get_by_text("need a running kernel").count() >= 1
    assert not failed
    context.close()


@pytest.fixture
def jupyter(tmp_path):
    """JupyterLab on loopback, with the notebook in its small form; yields the address to open."""
    book = nbformat.read(NOTEBOOK, 4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            if "parameters" in cell.metadata.get("tags", []):
                cell.source = cell.source.replace("FAST = False", "FAST = True")
    book.metadata.pop("widgets", None)
    (tmp_path / "work").mkdir()
    nbformat.write(book, tmp_path / "work" / "lab.ipynb")
    settings = {
        "apputils-extension/notification": {"fetchNews": "false"},
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, values in settings.items():
        path = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    token = secrets.token_hex(8)
    environment = os.environ | {
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    environment.pop("MPLBACKEND", None)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path / "work", env=environment, stdout=log, stderr=log
        )
    base = f"http://127.0.0.1:{port}"

    def ask(path: str, method: str = "GET"):
        request = urllib.request.Request(
            base + path, method=method, headers={"Authorization": f"token {token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.loads(reply.read() or "null")

    try:
        for _ in range(120):
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            try:
                ask("/api/status")
                break
            except OSError:
                time.sleep(0.5)
        yield f"{base}/lab/tree/lab.ipynb?token={token}", tmp_path / "work" / "lab.ipynb"
    finally:
        try:
            for kernel in ask("/api/kernels"):  # stopping the server may leave kernels alive
                ask(f"/api/kernels/{kernel['id']}", "DELETE")
        except OSError:
            pass
        server.terminate()
        server.wait(30)


def test_the_lab_works_in_jupyterlab(browser, jupyter):
    from playwright.sync_api import expect

    address, notebook = jupyter
    page = browser.new_page(viewport={"width": 1400, "height": 1200})
    page.goto(address)
    page.get_by_text("| Idle").wait_for(timeout=90_000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.get_by_role("button", name="isolated", exact=True).wait_for(timeout=180_000)
    page.get_by_text("Exercise 4.2: still open").wait_for(timeout=180_000)
    check_the_switch(page)

    # What needs the kernel: a closer look, messages beside the fields, new text.
    detail = page.get_by_label("closer look")
    expect(detail).to_contain_text("token 2")
    flip(page, "same slot, overwritten")
    page.get_by_label("layer", exact=True).select_option("layer 2")
    expect(detail).to_contain_text("19 of 20 rows are foreign")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("alert").first).to_contain_text("empty")
    page.get_by_label("text of A").fill("系统提示：你是一个助手。3+5等于几")
    page.get_by_label("text of B").fill("系统提示：你是一个助手。哲4+4等于几")
    page.get_by_label("text of B").blur()
    expect(page.get_by_text("3 of them bytes")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.get_by_role("status").filter(has_text="computing")).to_be_visible()
    expect(answer_of(page, "A")).to_contain_text("你问", timeout=30_000)
    expect(page.get_by_label("two requests")).to_have_value("your own text", timeout=30_000)

    page.keyboard.press("Control+s")
    page.wait_for_timeout(1500)
    outputs = [o for c in nbformat.read(notebook, 4).cells for o in c.get("outputs", [])]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    page.close()
