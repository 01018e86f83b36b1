"""look.py's page: what it is told is right, by PyTorch or by another way to the same numbers; what
it shows and computes, in a real browser, is NumPy's, for each kind of tensor; how it is used; what
is refused."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import look
import train_speedrun
from conftest import BYTES, SMALL_HEADS, SMALL_LLAMA, random_params, trainer_of
from llmc.checkpoint import write_model
from llmc.resume import checkpoint_paths
from llmc.schedulers import learning_rate_at
from llmc.tensors import flat, views
from llmc.tokenizer import write_tokenizer
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "</script><b>\a\tשלום"
CONFIGS = {
    GPT2: SMALL_HEADS,
    Llama3: dataclasses.replace(SMALL_LLAMA, V=257, Vp=384),  # two groups of two heads
    Speedrun: train_speedrun.Config(maxT=64, V=257, L=2, NH=2, C=32, Vp=384),
}
SETTINGS = dict(learning_rate=0.01, schedule="linear", beta1=0.8, beta2=0.95, eps=1e-7, steps=6,
                weight_decay=0.1, grad_clip=0.5)  # of the runs
PAGES = pytest.mark.parametrize("page", CONFIGS, ids=("GPT-2", "Llama", "speedrun"))


def train(run_here, page):
    """A run with three checkpoints, whose vocabulary is bytes; returns its directory."""
    write_tokenizer("data/tiny_shakespeare_tokenizer.bin", BYTES, 256)
    write_model("start.bin", CONFIGS[page], random_params(CONFIGS[page], ones=1.0))
    flags = ("-e start.bin -x 6 -n 2 -b 2 -t 32 -v 0 -s 0 -o run -l 0.01 -k linear --beta1 0.8"
             " --beta2 0.95 --eps 1e-7 -c 0.1 --grad_clip 0.5").split()
    run_here(trainer_of(page), *flags)
    return "run"


LOOKED = {}  # page -> (look's data, the Recorder, the directory), of a run that is made once


@pytest.fixture
def looked(workplace, run_here, tmp_path_factory, page):
    """(look's data, the Recorder, the directory of the run)."""
    if page not in LOOKED:
        path = shutil.copytree(train(run_here, page), tmp_path_factory.mktemp("looked") / "run")
        LOOKED[page] = *look.look(str(path), PROMPT), path
    return LOOKED[page]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM:
        pytest.skip("no browser: apt install chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(looked, browser, tmp_path):
    """open_page(width, other) writes and opens the run's page, or another (data, Recorder): (its
    Page, look's data, the Recorder). It logs no error."""
    errors, contexts = [], []

    def show(width=1440, other=None):
        data, recorder = other or looked[:2]
        look.write_page("look.html", data, recorder.numbers)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}))
        shown = contexts[-1].new_page()
        shown.set_default_timeout(8000)
        shown.on("console", lambda message: errors.append(message.text))
        shown.on("pageerror", lambda error: errors.append(str(error)))
        shown.goto(f"file://{tmp_path}/look.html")
        shown.wait_for_selector("#prompt a")
        return shown, data, recorder

    yield show
    for context in contexts:
        context.close()
    assert not errors


def begin(page, path):
    """(model, inputs, targets) of the prompt, after a forward and a backward pass."""
    model = look.load_rounded(path).model
    ids = np.array([[*PROMPT.encode()]], np.int32)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    model.allocate_activations(*inputs.shape)
    model.allocate_training(*inputs.shape)
    model.forward(inputs, targets)
    model.backward()
    return model, inputs, targets


@PAGES
def test_the_update_is_pytorch_s(looked, page):
    """By the run's settings, and by the moments of its newest checkpoint, rounded as the page has
    them; of each tensor by its name."""
    from test_pages import InPyTorch  # which wants torch
    data, recorder, path = looked
    model, *_ = begin(page, path)
    params, told = model.params, data["update"]
    settings = page.Settings(**SETTINGS)
    state = np.fromfile(checkpoint_paths(path, 6)[1], "<f4", 2 * flat(params).size, offset=1024)
    moments = np.split(look.rounded(state).view(np.uint8), 2)
    model.optimizer.m, model.optimizer.v = (views(params.table, buffer) for buffer in moments)
    expected = InPyTorch(page, params, model.optimizer, settings, step=6)
    norm = float(np.linalg.norm(flat(model.grads).astype(np.float64)))
    assert told["norm"] == pytest.approx(norm, rel=1e-5) and norm > settings.grad_clip
    flat(model.grads)[...] *= settings.grad_clip / norm
    rate = learning_rate_at(settings, 5)  # the last: the run is at its end
    assert told["rate"] == rate < settings.learning_rate and told["step"] == 7
    expected.update(model.grads, rate)

    moves = {}
    for call in data["calls"]:
        if "move" not in call["outs"]:
            continue
        tensor = data["tensors"][call["outs"]["move"]]
        name, l = tensor["name"], tensor["layer"]
        after, weight, *new = (np.asarray(x)[() if l == "" else l] for x in (
            expected.tensors[name], getattr(params, name), expected.m[name], expected.v[name]))
        moves[name, l] = move = after - weight
        near = dict(rtol=0, atol=3e-7 + 2e-4 * np.abs(move).max(), err_msg=name)
        found = recorder.contents[call["outs"]["move"]]
        np.testing.assert_allclose(found, move[: len(found)], **near)
        for what, right in zip("mv", new):
            if what in call["outs"]:
                found = recorder.contents[call["outs"][what]]
                near = dict(rtol=1e-3, atol=1e-6 * np.abs(right).max(), err_msg=name)
                np.testing.assert_allclose(found, right[: len(found)], **near)
    assert len(moves) == sum(row.shape[0] if row.stacked else 1
                             for row in params.table.values())


class Replay:
    """The forward pass again, in float64, with one tensor changed on the way: the calls that
    look.py recorded, on arrays of this test's own."""

    def __init__(self, data, recorder):
        self.data, self.recorder = data, recorder
        self.contents = [x.astype(np.float64 if x.dtype.kind == "f" else x.dtype)
                         for x in recorder.contents]

    def loss(self, number, change, only=None):
        """The loss with `change` added to tensor `number` as soon as it is there. only: the call
        that alone reads it changed."""
        made = {}  # tensor's number -> what it has now

        def array(n):
            return made.get(n, self.contents[n])

        def changed():
            return array(number) + change.reshape(array(number).shape)

        if self.data["tensors"][number]["by"] is None and only is None:
            made[number] = changed()
        for i, call in enumerate(self.data["calls"][: self.data["forward"]]):
            f, arguments = self.recorder.arguments[i]
            given = arguments | {name: array(n) for name, n in call["ins"].items()}
            for name, n in call["outs"].items():
                in_place = name in call["ins"]
                given[name] = given[name].copy() if in_place else np.empty_like(self.contents[n])
                made[n] = given[name]
            if i == only:
                name = next(name for name, n in call["ins"].items() if n == number)
                given[name] = changed()
            f(**given)
            if number in call["outs"].values():
                made[number][...] = changed()
                if number == call["outs"].get("att"):
                    gather(call, given)
        losses = self.data["calls"][self.data["forward"] - 1]["outs"]["losses"]
        return array(losses).mean()


def gather(call, given):
    """Compute an attention call's result from its probabilities."""
    out, att = given["out"][0], given["att"][0]
    T, heads = len(out), len(att)
    groups, size = call["sizes"].get("NKV", heads), out.shape[1] // heads
    value = given["inp"].reshape(T, -1, size)[:, heads + groups :]
    value = np.repeat(value, heads // groups, axis=1)
    out[...] = np.einsum("hts,shd->thd", att, value).reshape(T, -1)


def of_products(replay, call, direction, step):
    """The loss when the products of queries and keys of an attention call move by step * direction,
    before they are divided by sqrt(HS)."""
    sizes = call["sizes"]
    scale = 1 / np.sqrt(sizes.get("HS") or sizes["C"] / sizes["NH"])
    att = replay.recorder.contents[call["outs"]["att"]][0].astype(np.float64)
    with np.errstate(divide="ignore"):
        scores = np.log(att) + step * scale * direction
    changed = np.exp(scores)
    changed /= changed.sum(-1, keepdims=True)
    return replay.loss(call["outs"]["att"], changed - att)


@PAGES
def test_gradients_are_of_what_their_labels_name(open_page):
    """Of every gradient's title, as the page shows it: the loss's finite difference along that
    gradient, and for the number that has the largest, when what is named moves; the rest of the
    forward pass runs on, in float64."""
    page, data, recorder = open_page()
    shown = page.evaluate("""() => tensors.filter(t => t.kind === "gradient").map(t =>
        ({number: t.number, title: t.title, layer: t.layer, name: t.key.split("|")[0]}))""")
    titles = page.evaluate("tensors.map(t => [t.kind, t.title, t.layer])")
    replay, named = Replay(data, recorder), set()
    for gradient in shown:
        title, layer = gradient["title"], gradient["layer"]
        tensor = data["tensors"][gradient["number"]]
        g = np.frombuffer(page.evaluate(BYTES_OF, gradient["number"]).encode("latin-1"), "<f4")
        g = g.reshape(tensor["shape"]).astype(np.float64)
        largest = np.where(np.abs(g) == np.abs(g).max(), np.sign(g), 0.0)
        only, stem = None, data["calls"][tensor["by"]]["f"].removesuffix("_backward")
        if " by " in title:
            assert page is not None and stem == "qknorm", title  # of no tensor: it says so
            continue
        if title == "d(query · key)":
            call = next(c for c in data["calls"] if c["f"] == "attention_forward"
                        and data["tensors"][c["outs"]["att"]]["layer"] == layer)

            def loss(direction, step, call=call):
                return of_products(replay, call, direction, step)
        else:
            name = title[1:]
            if name.endswith(" before encoder"):  # the classifier's part alone
                name = name.removesuffix(" before encoder")
                only = data["forward"] - 3
            number = next(i for i, (kind, other, l) in enumerate(titles) if other == name
                          and l == layer and kind in ("params", "acts"))

            def loss(direction, step, number=number, only=only):
                return replay.loss(number, step * direction, only)
        for direction in (g / np.linalg.norm(g), largest):
            slope = (loss(direction, 1e-4) - loss(direction, -1e-4)) / 2e-4
            assert slope == pytest.approx((g * direction).sum(), rel=2e-3, abs=1e-7), (title, layer)
        named.add(title)
    assert {"dlogits", "datty", "dlnf", "dwte", "d(query · key)"} <= named
    if page is Llama3:
        assert {"dqkv", "dqkv before rope"} <= named


def logits_of(page, params, residual):
    """The classifier's logits of a residual stream (T, C), in float64."""
    x = residual.astype(np.float64)
    x = x - x.mean(-1, keepdims=True) if page is GPT2 else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * params.lnfw
    if page is GPT2:
        return (x + params.lnfb) @ params.wte[:257].T
    logits = x @ params.lm_head[:257].T
    if page is Llama3:
        return logits
    logits = logits + params.lm_headb[:257]
    return 15 * logits / np.sqrt(logits**2 + 15**2)


@PAGES
def test_guesses_are_those_of_each_layer(open_page, looked, page):
    """Each layer's residual stream, also the last one's, through the classifier."""
    shown, data, _ = open_page()
    model, *_ = begin(page, looked[2])
    streams = [model.acts.encoded[0], *model.acts.residual3[:, 0]]
    found = shown.evaluate("streams().map(lens).map(probs => Array.from(probs.data))")
    for probs, residual in zip(found, streams, strict=True):
        logits = logits_of(page, model.params, residual)
        expected = np.exp(logits - logits.max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
        assert np.abs(np.reshape(probs, expected.shape) - expected).max() < 1e-5


@PAGES
def test_what_each_loss_depends_on(open_page, looked, page, monkeypatch):
    """How each loss changes as one position's embedding, where the first layer reads it, becomes
    longer."""
    shown, data, _ = open_page()
    model, inputs, targets = begin(page, looked[2])
    T, module, columns = inputs.size, sys.modules[page.__module__], []
    name = "rmsnorm_forward" if page is Speedrun else "encoder_forward"  # what writes it
    right = getattr(module, name)

    def losses(position, times):
        def longer(out, *arguments):
            right(out, *arguments)
            if out.ctypes.data == model.acts.encoded.ctypes.data:
                out[0, position] *= np.float32(times)

        monkeypatch.setattr(module, name, longer)
        return model.losses(inputs, targets)[0].astype(np.float64)

    for position in range(T):
        columns.append((losses(position, 1.01) - losses(position, 0.99)) / 0.02)
    expected = np.tril(np.stack(columns, axis=1))
    found = np.zeros_like(expected)
    for t, row in enumerate(shown.evaluate("inputs.map((_, t) => dependsOf(t))")):
        found[t, : t + 1] = row
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


@PAGES
def test_the_film_is_of_the_checkpoints(looked, page):
    data, recorder, path = looked
    _, inputs, targets = begin(page, path)
    for frame, step in zip(data["film"], (2, 4, 6), strict=True):
        model = look.load_rounded(checkpoint_paths(path, step)[0])
        loss, acts = model.forward(inputs, targets), model.model.acts
        assert frame["step"] == step and frame["loss"] == pytest.approx(loss, rel=1e-6)
        att = np.concatenate(recorder.numbers)[frame["att"] :][: acts.att.size]
        assert np.abs(att.reshape(acts.att.shape) - acts.att).max() <= 1 / 64 + 1e-6
        streams = acts.encoded, *acts.residual3
        assert frame["norms"] == pytest.approx([np.sqrt(np.mean(x**2)) for x in streams], rel=1e-5)
        assert frame["losses"] == pytest.approx(acts.losses[0].tolist())


def number(text):
    return float(text.replace("−", "-").replace("Infinity", "inf"))


BYTES_OF = """i => Array.from(new Uint8Array(Float32Array.from(tensors[i].data).buffer), byte =>
    String.fromCharCode(byte)).join("")"""  # much faster than a list


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


def test_what_is_refused(workplace, run_here, monkeypatch):
    train(run_here, GPT2)
    for flag, value, words in (("--prompt", "ab", "2 tokens, expected 3 to 65"),
                               ("--prompt", "", "0 tokens"),
                               ("--tokenizer", "none.bin", "no such file"),
                               ("-o", "none/x.html", "none/x.html: cannot be written")):
        run_here(look, "run", "--open", 0, flag, value, fails=[words])
    monkeypatch.setattr(look, "MOST_MB", 0.01)
    run_here(look, "run", "--open", 0, fails=["the page would have 0 MB, of at most 0.01"])


def test_it_writes_over_its_own_pages_alone(workplace, run_here):
    """Whatever the name is, also by a link."""
    train(run_here, GPT2)
    Path("notes.html").write_text("<!doctype html>\n<html lang=\"en\">\n<title>Mine</title>\n")
    Path("empty").touch()
    Path("link.html").symlink_to("start.bin")
    os.mkfifo("pipe")
    files = {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()}
    model, state, marker = checkpoint_paths("run", 6)
    for name in ("start.bin", "link.html", model, state, marker, "run/tokenizer.bin", "notes.html",
                 "empty", "run", "pipe", "/dev/null", ""):
        run_here(look, "run", "-o", name, fails=[f"-o {name}: is no page of look.py's", "another"])
    assert {path: path.read_bytes() for path in workplace.rglob("*") if path.is_file()} == files
    for _ in range(2):
        assert run_here(look, "run", "--open", 0).stdout.startswith("look.html: ")


def test_a_state_that_is_not_the_run_s(workplace, run_here):
    """Of a damaged one, or another model's: a line, and no page. Of several GPUs, as without any: a
    first update."""
    train(run_here, GPT2)
    model, state, marker = map(Path, checkpoint_paths("run", 6))
    good, header = state.read_bytes(), np.fromfile(state, "<i4", 256)
    command = look, "run", "--open", 0, "-o", "page.html"

    def with_header(**slots):
        changed = header.copy()
        changed[45:47] = 0  # without a CRC-32 of the file
        for slot, value in slots.items():
            changed[int(slot[1:])] = value
        return changed.tobytes() + good[1024:]

    nan = np.array([np.nan], "<f4").tobytes()
    for data, words in ((good[:-1], "cut short"), (good[:1000], "1000 bytes"), (b"", "0 bytes"),
                        (model.read_bytes(), "is a GPT-2 checkpoint"),
                        (with_header(h1=3), "version 3"), (with_header()[:-4] + nan, "v: NaN"),
                        (good[:-4] + nan, "is damaged"),
                        (with_header(h10=4), "of step 4, expected step 6"),
                        (Path(checkpoint_paths("run", 4)[1]).read_bytes(), "of step 4"),
                        (with_header(h44=1), f"{model} is not the model")):
        state.write_bytes(data)
        run_here(*command, fails=[state, words, f"update of its model: python look.py {model}"])
    state.unlink()
    run_here(*command, fails=[state, "no such file"])
    assert not Path("page.html").exists()

    state.write_bytes(with_header(h1=2, h2=2)[: -len(good) // 4])  # its half
    note = run_here(*command).stderr
    assert note.startswith(f"note: the update shown is a first one: {state}: is of 2 ranks")
    first, _ = look.look(str(model), "The cat")
    shared, _ = look.look("run", "The cat")
    assert first["update"]["step"] == shared["update"]["step"] == 1
    assert first["update"]["whose"] == "the trainer's defaults, as this is no run"
    assert shared["update"]["whose"] == "the run's" and shared["update"]["peak"] == 0.01

    state.write_bytes(good)
    notes = json.loads(marker.read_text())
    del notes["optimizer"]  # as of an earlier version
    marker.write_text(json.dumps(notes))
    assert "without the run's settings" in run_here(*command).stderr
