"""look.py's page in a real browser: its numbers are NumPy's, for each kind of tensor; how it is
used; how it trains."""

import shutil

import numpy as np
import pytest

import look
from looking import (BYTES_OF, CONFIGS, PAGES, PROMPT, SETTINGS, begin,  # noqa: F401  (fixtures)
                     browser, looked, open_page)
from llmc.resume import checkpoint_paths
from llmc.tensors import flat, views
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun


def number(text):
    return float(text.replace("−", "-").replace("Infinity", "inf"))


@PAGES
def test_numbers_are_numpy_s(open_page):
    """Every number of every tensor; one of each that a function writes is shown to three digits,
    and explained, with the lines that make it."""
    page, data, recorder = open_page()
    shown, rng = {}, np.random.default_rng(0)
    for i, tensor in enumerate(data["tensors"]):
        computed = np.frombuffer(page.evaluate(BYTES_OF, i).encode("latin-1"), "<f4")
        expected = recorder.contents[i].ravel()
        near = 1e-5 * np.abs(expected[np.isfinite(expected)]).max()
        if tensor["kind"] in ("move", "state"):
            near *= 100  # of a gradient of rounding noise, AdamW makes a move
        np.testing.assert_allclose(computed, expected[: computed.size], rtol=1e-4, atol=near,
                                   err_msg=str(tensor))
        if tensor["by"] is not None:
            shown[data["calls"][tensor["by"]]["f"], tensor["arg"]] = i
        else:  # nothing else is given: what the backward pass reads, the forward pass wrote
            assert tensor["kind"] in ("params", "state") or tensor["arg"] in (
                "inp", "targets", "dlosses", "cos", "sin"), tensor
    assert {f for f, _ in shown} == {call["f"] for call in data["calls"]} == set(data["source"])
    assert len(shown) >= 20
    for (f, argument), i in shown.items():
        content = recorder.contents[i].reshape(data["tensors"][i]["shape"])
        index = rng.integers(content.shape)
        page.evaluate("([i, at]) => { location.hash = tensors[i].href(at); }", [i, index.tolist()])
        page.wait_for_function("([i, index]) => state.tensor?.number === i"
                               " && `${state.index}` === `${index}`", arg=[i, index.tolist()])
        expected, near = float(content[tuple(index)]), np.abs(content[np.isfinite(content)]).max()
        value = number(page.inner_text("#value"))
        assert value == expected or abs(value - expected) <= 1e-3 * near + 0.0051 * abs(expected), (
            f, argument, index)
        assert page.locator(".made p").count(), (f, argument)
        marked = page.locator("pre mark").all_inner_texts()
        assert marked and all(line.strip() in data["source"][f]["text"] for line in marked), f
    page.evaluate("location.hash = tensors.find(tensor => tensor.arg === 'dlosses').href([0])")
    page.wait_for_selector("text=It is given:")


@PAGES
def test_the_lines_that_are_marked(open_page, page):
    """All that make a number, and no other's: of the parts of a tensor that have lines of their
    own."""
    shown, data, _ = open_page()

    def marked(mode, key, index):
        shown.evaluate("hash => { location.hash = hash; }", f"#{mode}/{key}/{index}")
        shown.wait_for_function("index => `${state.index}` === index", arg=index)
        return [line.strip() for line in shown.locator("pre mark").all_inner_texts()]

    lines = marked("backward", "logits|", "0,0")
    if page is GPT2:
        target = data["ids"][1]
        assert [line[:11] for line in lines] == ["np.multiply"]
        lines = marked("backward", "logits|", f"0,{target}")
        assert [line[:11] for line in lines] == ["np.multiply", "d[np.arange"]
        lines = marked("forward", "ln1|0", "1,2")
        assert lines == ["np.subtract(inp, mean[..., None], out=out)", "out *= rstd[..., None]",
                         "out *= weight", "out += bias"]
    if page is Llama3:
        F = CONFIGS[Llama3].F
        assert marked("backward", "fch|0", "0,1")[-1] == "dup *= d"
        lines = marked("backward", "fch|0", f"0,{F + 1}")
        assert lines[-1] == "dgate *= d" and "dup *= d" not in lines


@PAGES
def test_update_guesses_and_film(open_page):
    """The largest move is explained; the slider goes back to the first checkpoint."""
    page, data, _ = open_page()
    page.click("nav >> text=update")
    page.click("#detail table a")
    assert number(page.inner_text("#value")) and "-= " in page.locator("pre mark").last.inner_text()
    page.click("nav >> text=guesses")
    page.wait_for_selector(".guess")
    layers = CONFIGS[GPT2].L
    assert page.locator(".guess").count() == (layers + 1) * (len(data["ids"]) - 1)
    page.evaluate("location.hash = '#attention/none'")  # no such tensor
    page.click("text=head 1 >> nth=1")
    page.wait_for_selector("h2:has-text('of layer 1')")
    page.click("nav >> text=training")
    for key, step in (("ArrowRight", 6), ("ArrowLeft", 4), ("ArrowLeft", 2)):
        page.press("#frame", key)
        page.wait_for_selector(f"h2:text('at step {step}:')")
    sizes = page.locator("tr:has-text('after layer 1') td").all_inner_texts()[1:]
    assert [f"{number(x):.2e}" for x in sizes] == [
        f"{frame['norms'][2]:.2e}" for frame in data["film"]]
    page.click("#play")
    page.wait_for_selector("h2:text('at step 6:')")


@pytest.mark.parametrize("page", (Speedrun,))
def test_how_long_a_matrix_s_directions_are(open_page):
    shown, data, recorder = open_page()
    for name, shape in (("qkvw", (96, 32)), ("fcprojw", (32, 128))):
        found = shown.evaluate(f"lengthsOf(newest['{name}|0'].data, {shape[0]}, {shape[1]})")
        matrix = next(content for tensor, content in zip(data["tensors"], recorder.contents)
                      if (tensor["kind"], tensor["name"]) == ("params", name))
        assert found == pytest.approx(np.linalg.svd(matrix, compute_uv=False), rel=1e-4)


@pytest.mark.parametrize("page", (GPT2,))
def test_a_layer_without_a_formula(open_page, looked, page, monkeypatch, tmp_path):
    """It is shown, as are the calls that read it; it is not explained, and nothing is trained."""
    shutil.copytree(look.FOLDER, tmp_path / "look")
    formulas = tmp_path / "look" / "formulas.js"
    formulas.write_text(formulas.read_text().replace('"gelu_', '"other_'))
    monkeypatch.setattr(look, "FOLDER", tmp_path / "look")
    data, recorder = look.look(str(looked[2]), PROMPT)
    assert not data["alive"]
    shown, *_ = open_page(other=(data, recorder))
    assert shown.evaluate("lossOf()") == pytest.approx(data["loss"], rel=1e-5)
    shown.evaluate("location.hash = '#forward/fch_gelu|0/3,4'")
    shown.wait_for_selector("text=No formula is written for this layer")
    expected = recorder.contents[newest(data, "fch_gelu", 0)][0, 3, 4]
    assert number(shown.inner_text("#value")) == pytest.approx(expected, rel=0.01)


def newest(data, name, layer):
    """The number of a forward tensor."""
    return max(i for i, tensor in enumerate(data["tensors"]) if tensor["kind"] == "acts"
               and (tensor["name"], tensor["layer"]) == (name, layer))


@pytest.mark.parametrize("page", (GPT2,))
@pytest.mark.parametrize("width", (390, 1440, 2560))
def test_the_explanation_is_in_view(open_page, width):
    """Nothing is wider than the page, and a click on a tile shows number, formula and source line
    without scrolling; in both themes."""
    page, data, _ = open_page(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click('[href^="#forward/atty|0/"]')
    page.wait_for_selector("#value")
    for what in ("#value", "pre mark >> nth=0"):
        box = page.locator(what).bounding_box()
        assert 0 <= box["y"] and box["y"] + box["height"] <= 900, what
    lines = page.locator("pre > *").all()
    last = max(i for i, line in enumerate(lines) if line.evaluate("x => x.tagName") == "MARK")
    shown = [lines[i].bounding_box() for i in (last, last + 1)]
    assert shown[1]["height"] > 5 and shown[1]["y"] >= shown[0]["y"] + shown[0]["height"] - 1
    before = page.evaluate("getComputedStyle(document.body).color")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).color") != before
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@PAGES
def test_it_is_used_by_click_and_key(open_page):
    page, data, _ = open_page()
    assert page.locator("#detail b").count() == 0  # of the prompt
    assert page.locator("#prompt a").count() == len(data["ids"]) - 1 == len(PROMPT.encode()) - 1
    for card in ("Why is its loss", "Why there?", "Why that far?"):  # how it opens, and one click
        page.evaluate("location.hash = '#start'")
        page.click(f"text={card}")
        page.wait_for_selector("#value")
    page.evaluate("location.hash = '#forward'")
    page.click('[href^="#forward/qkv|1/"]')
    page.wait_for_function("state.key === 'qkv|1'")
    assert page.locator(".across span").all_inner_texts() == ["query", "key", "value"]
    canvas, entries = page.locator(".big canvas"), page.evaluate("history.length")
    row = canvas.bounding_box()["height"] / (len(data["ids"]) - 1)
    canvas.click(position={"x": 2, "y": 1.5 * row})
    page.wait_for_function("state.index[0] === 1")
    page.locator("h2").first.click()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("state.index[0] === 2")
    assert page.evaluate("history.length") == entries + 1  # the click's
    page.focus("[aria-current=true] >> nth=-1")
    page.keyboard.press("Escape")
    page.wait_for_function("state.key === ''")
    page.keyboard.type("/dfch 1\n")
    page.wait_for_function("state.mode === 'backward' && state.key === 'fch|1'")
    assert page.evaluate("""[...document.querySelectorAll("a, button, input, [tabindex]")]
        .filter(x => x.tabIndex >= 0 && x.closest("header, #map")).length""") < 22
    for station in range(10):
        page.evaluate(f"location.hash = '#tour//{station}'")
        page.wait_for_selector(f"text={station + 1} of 10")
        assert page.locator("#value").count() == 1


@pytest.mark.parametrize("page", (GPT2,))
@pytest.mark.parametrize("width", (390, 1440))
def test_axe_finds_nothing(open_page, width):
    """Names, contrast, order of headings, keyboard: of each kind of view, in both themes."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page, *_ = open_page(width)
    options = {"rules": {"skip-link": {"enabled": False}}}  # any link that is scrolled out of view
    for where in ("start", "forward/ln1|0/3,4", "guesses//3"):
        page.evaluate("where => { location.hash = where; }", where)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            found = axe.run(page, options=options).response["violations"]
            assert not found, (where, scheme, [(x["id"], x["nodes"][0]["html"]) for x in found])


@PAGES
def test_it_trains_as_numpy_does(open_page, looked, page):
    """Twenty steps on the prompt: the page's losses are NumPy's; so is that of another prompt, and
    of a weight that was moved."""
    shown, data, _ = open_page()
    model, inputs, targets = begin(page, looked[2])
    state = np.fromfile(checkpoint_paths(looked[2], 6)[1], "<f4", offset=1024)
    moments = np.split(look.rounded(state[: 2 * flat(model.params).size]).view(np.uint8), 2)
    model.optimizer.m, model.optimizer.v = (
        views(model.params.table, buffer) for buffer in moments)
    settings, expected = page.Settings(**SETTINGS, B=2, T=32), []
    for step in range(20):
        model.forward(inputs, targets)
        model.backward()
        _, scale = model.norm_and_scale(settings)
        model.optimizer.update(model.params, model.grads, settings, 0.002, 7 + step, scale)
        expected.append(model.forward(inputs, targets))
    found = shown.evaluate("list(20, () => { train(.002); return lossOf(); })")
    assert expected[-1] < expected[0] - 0.1
    assert np.abs(np.array(found) - expected).max() < 1e-4

    text = "A longer text than the first."
    shown.fill("#typed", text)
    shown.press("#typed", "Enter")
    shown.wait_for_function(f"T === {len(text) - 1}")
    ids = np.array([[*text.encode()]], np.int32)
    model.allocate_activations(1, len(text) - 1)
    assert shown.evaluate("lossOf()") == pytest.approx(
        model.forward(ids[:, :-1], ids[:, 1:]), abs=1e-4)
    shown.evaluate("location.hash = '#guesses//4'")
    shown.fill("#temperature", "0.5")
    logits = model.acts.logits[0, 4].astype(np.float64) / 0.5
    probs = np.exp(logits - logits.max())
    percent = round(100 * probs.max() / probs.sum())
    shown.wait_for_selector(f"text=/when text is drawn: .* {percent}%, /")
    shown.evaluate("location.hash = '#forward/fcw|1/3,4'")
    shown.focus("#weight")
    shown.keyboard.press("End")
    shown.wait_for_function("told.textContent.includes('foretold')")
    model.params.fcw[1, 3, 4] = shown.evaluate("newest['fcw|1'].num(3, 4)")
    assert shown.evaluate("lossOf()") == pytest.approx(
        model.forward(ids[:, :-1], ids[:, 1:]), abs=1e-4)


CHAT = ("{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}")


@pytest.mark.parametrize("page", (GPT2, Speedrun), ids=("GPT-2", "speedrun"))
def test_the_loss_of_an_answer(open_page, looked, page):
    """Its tokens alone count: the loss, its gradients and a step are those of NumPy with weights;
    another prompt has none."""
    path = looked[2]
    (path / "chat_template.jinja").write_text(CHAT)
    other = look.look(str(path), "Hi", answer="Yo!")
    text = b"u:Hi\na:Yo!\n"
    assert bytes(other[0]["ids"]) == text
    weights = np.zeros((1, len(text) - 1), np.float32)
    weights[0, text.index(b"Yo") - 1 :] = 1
    assert other[0]["weights"] == weights[0].tolist()

    model = look.load_rounded(path).model
    ids = np.array([[*text]], np.int32)
    model.allocate_activations(1, len(text) - 1)
    model.allocate_training(1, len(text) - 1)
    loss = model.forward(ids[:, :-1], ids[:, 1:], weights)
    model.backward()
    assert other[0]["loss"] == loss and other[0]["film"][-1]["loss"] == pytest.approx(loss)

    shown, data, recorder = open_page(other=other)
    assert shown.evaluate("lossOf()") == pytest.approx(loss, abs=1e-5)
    shown.evaluate("location.hash = '#forward'")
    shown.wait_for_selector("text=the mean over the answer's tokens")
    found = shown.evaluate("Array.from(gradients['qkvw|0'].data)")
    expected = model.grads.qkvw[0].ravel()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    shown.fill("#typed", "another")
    shown.press("#typed", "Enter")
    shown.wait_for_selector("text=the mean over the positions")
