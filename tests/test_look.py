"""look.py's page in a real browser: what it shows and computes is NumPy's, for each kind of tensor; how it is used."""

import shutil

import numpy as np
import pytest

import look
from conftest import BYTES, trainer_of
from llmc.tokenizer import write_tokenizer
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no browser: apt install chromium")
PROMPT = "</script><b>\a\tשלום"


def train(run_here, architecture):
    """A run with three checkpoints, whose vocabulary is bytes; returns its directory."""
    write_tokenizer("data/tiny_shakespeare_tokenizer.bin", BYTES, 256)
    flags = "-e", next(iter(architecture.SIZES)), *"-x 6 -n 2 -b 2 -t 32 -v 0 -s 0 -o run".split()
    run_here(trainer_of(architecture), *flags)
    return "run"


LOOKED = {}  # architecture -> (look's data, the Recorder), of a run that is made once


@pytest.fixture(params=(GPT2, Llama3, Speedrun), ids=("GPT-2", "Llama", "speedrun"))
def open_page(request, workplace, run_here, tmp_path):
    """open_page(width) writes and opens the page: (its Page, look's data, the Recorder). It logs no error."""
    if request.param not in LOOKED:
        LOOKED[request.param] = look.look(train(run_here, request.param), PROMPT)
    data, recorder = LOOKED[request.param]
    look.write_page("look.html", data, recorder.numbers)
    errors = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def show(width=1440):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.on("console", lambda message: errors.append(message.text))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"file://{tmp_path}/look.html")
            page.wait_for_selector("#prompt a")
            return page, data, recorder

        yield show
        browser.close()
    assert not errors


def number(text):
    return float(text.replace("−", "-").replace("Infinity", "inf"))


BYTES_OF = """i => Array.from(new Uint8Array(Float32Array.from(tensors[i].data).buffer), byte =>
    String.fromCharCode(byte)).join("")"""  # much faster than a list


def test_numbers_are_numpy_s(open_page):
    """Every number of every tensor; one of each that a function writes is shown to three digits, and explained."""
    page, data, recorder = open_page()
    shown, rng = {}, np.random.default_rng(0)
    for i, tensor in enumerate(data["tensors"]):
        computed, expected = page.evaluate(BYTES_OF, i).encode("latin-1"), recorder.contents[i].ravel()
        near = 1e-5 * np.abs(expected[np.isfinite(expected)]).max()
        np.testing.assert_allclose(np.frombuffer(computed, "<f4"), expected, rtol=1e-4, atol=near, err_msg=str(tensor))
        if tensor["by"] is not None:
            shown[recorder.calls[tensor["by"]]["f"], tensor["arg"]] = i
        else:  # nothing else is given: what the backward pass reads, the forward pass wrote
            assert tensor["kind"] == "params" or tensor["arg"] in ("inp", "targets", "dlosses", "cos", "sin"), tensor
    assert {f for f, _ in shown} == {call["f"] for call in recorder.calls} <= set(data["source"]) and len(shown) >= 20
    for (f, argument), i in shown.items():
        content = recorder.contents[i].reshape(data["tensors"][i]["shape"])
        index = rng.integers(content.shape)
        page.evaluate("([i, index]) => { location.hash = tensors[i].href(index); }", [i, index.tolist()])
        page.wait_for_function("([i, index]) => state.tensor?.number === i && `${state.index}` === `${index}`",
                               arg=[i, index.tolist()])
        expected, near = float(content[tuple(index)]), 1e-5 * np.abs(content[np.isfinite(content)]).max()
        for value in map(number, page.locator("#detail output").all_inner_texts()):  # shown, and explained
            assert value == expected or abs(value - expected) <= near + 0.0051 * abs(expected), (f, argument, index)
        assert page.locator(".made b").count() and page.locator("pre mark").count() == 1, (f, argument)
    page.evaluate("location.hash = tensors.find(tensor => tensor.arg === 'dlosses').href([0])")
    page.wait_for_selector("text=It is given.")


def test_update_guesses_and_film(open_page):
    """The largest move is explained; the last guesses are the model's; the slider goes back to the first checkpoint."""
    page, data, _ = open_page()
    page.click("nav >> text=update")
    page.click("#detail table a")
    assert number(page.inner_text("#value")) and "p -= t" in page.inner_text("pre mark")
    page.click("nav >> text=guesses")
    page.wait_for_selector(".guess")
    assert page.locator(".guess").count() == (data["L"] + 1) * (len(data["ids"]) - 1)
    page.evaluate("location.hash = '#attention/none'")  # no such tensor
    page.click("text=head 1 >> nth=1")
    page.wait_for_selector("h2:text('att of layer 2')")
    assert page.locator("details a").count() == min(8, len(data["ids"]) - 1) == 8
    page.click("nav >> text=training")
    for key, step in (("ArrowRight", 6), ("ArrowLeft", 4), ("ArrowLeft", 2)):
        page.press("#frame", key)
        page.wait_for_selector(f"h2:text('at step {step}:')")
    sizes = page.locator("tr:has-text('after layer 2') td").all_inner_texts()[1:]
    assert [f"{number(x):.2e}" for x in sizes] == [f"{frame['norms'][2]:.2e}" for frame in data["film"]]


def test_it_is_used_by_click_and_key_in_both_themes(open_page, width=390):  # of a telephone
    page, data, _ = open_page(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width and page.locator("b").count() == 0
    assert page.locator("#prompt a").count() == len(data["ids"]) - 1 == len(PROMPT.encode()) - 1
    page.click('[href="#forward/qkv|1/"]')
    page.wait_for_selector("#value")
    assert page.locator(".down span").all_inner_texts() == ["query", "key", "value"]
    canvas = page.locator(".big canvas")
    canvas.click(position={"x": canvas.bounding_box()["width"] * 1.5 / (len(data["ids"]) - 1), "y": 3})
    page.wait_for_function("state.index[0] === 1")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("state.index[0] === 2")
    before = page.evaluate("getComputedStyle(document.body).color")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).color") != before and page.inner_text("#value")
    page.locator("h2").first.click()
    page.keyboard.press("Escape")
    page.wait_for_function("state.key === ''")
    page.keyboard.type("/dfch 2\n")
    page.wait_for_function("state.mode === 'backward' && state.key === 'fch|1'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_is_refused(workplace, run_here, monkeypatch):
    train(run_here, GPT2)
    for flag, value, words in (("--prompt", "ab", "2 tokens, expected 3 to 33"), ("--prompt", "", "0 tokens"), (
            "--tokenizer", "none.bin", "no such file"), ("-o", "none/x.html", "none/x.html: cannot be written")):
        run_here(look, "run", "--open", 0, flag, value, fails=[words])
    monkeypatch.setattr(look, "MOST_MB", 0.5)
    run_here(look, "run", "--open", 0, fails=["the page would have 1 MB, of at most 0.5"])
